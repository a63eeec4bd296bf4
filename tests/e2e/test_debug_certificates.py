"""Whom the debug API knows by a client certificate: one of the real cluster's CA, over TLS."""

import json
import ssl
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.certificates import Authority, Certificate
from tests.controlplane import ADMIN_TOKEN, STRANGER_TOKEN
from tests.e2e.cluster import RBAC, Cluster
from tests.e2e.conftest import NewCluster

GROUP = "gpu-watchers"
CONFIG_MAP = "kube-system/extension-apiserver-authentication"
BINDINGS = f"{RBAC}/clusterrolebindings"
ROLE = f"{RBAC}/namespaces/kube-system/roles/headroom-extender"


@pytest.fixture
def cluster(new_cluster: NewCluster) -> Iterator[Cluster]:
    """In which a group may read the debug API."""
    cluster = new_cluster(1)
    binding = {
        "metadata": {"name": GROUP},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "headroom-viewer",
        },
        "subjects": [{"kind": "Group", "name": GROUP, "apiGroup": "rbac.authorization.k8s.io"}],
    }
    cluster.plane.call("POST", BINDINGS, binding)
    yield cluster
    cluster.plane.call("DELETE", f"{BINDINGS}/{GROUP}")


def serve_over_tls(cluster: Cluster, tmp_path: Path) -> None:
    served = Authority(tmp_path, "served-by").sign("extender")
    settings = {"debug_tls_cert": str(served.cert), "debug_tls_key": str(served.key)}
    cluster.start_extender(guarded=True, settings=settings)


def answer(
    cluster: Cluster, tmp_path: Path, client: Certificate | None, token: str | None = None
) -> httpx.Response:
    """To /v1/nodes. Raises ``httpx.TransportError`` where the handshake fails."""
    context = ssl.create_default_context(cafile=str(tmp_path / "served-by.crt"))
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = cluster.debug_url().replace("http://", "https://")
    with httpx.Client(verify=context, timeout=30, trust_env=False) as http:
        return http.get(f"{url}/v1/nodes", headers=headers)


def is_known(cluster: Cluster, tmp_path: Path, client: Certificate) -> bool:
    try:
        return answer(cluster, tmp_path, client).status_code in (200, 403)
    except httpx.TransportError:
        return False


def test_a_certificate_of_the_cluster_s_ca_names_its_user(cluster: Cluster, tmp_path: Path) -> None:
    serve_over_tls(cluster, tmp_path)
    ca = cluster.plane.clients_ca
    watcher, stranger = ca.sign("watcher", ["other", GROUP]), ca.sign("nobody-s")
    cluster.until(lambda: is_known(cluster, tmp_path, stranger), "certificates are taken")
    assert answer(cluster, tmp_path, watcher).status_code == 200
    refused = answer(cluster, tmp_path, stranger)
    assert refused.status_code == 403
    assert refused.json()["detail"].startswith("nobody-s may not get path /v1/nodes; right is")
    # The CA's cluster knows its admin as a member of this group: one without a token.
    assert answer(cluster, tmp_path, ca.sign("kubernetes-admin", ["system:masters"])).is_success

    assert answer(cluster, tmp_path, None).status_code == 401
    assert answer(cluster, tmp_path, None, ADMIN_TOKEN).status_code == 200
    assert answer(cluster, tmp_path, watcher, STRANGER_TOKEN).status_code == 403
    for forged in (
        Authority(tmp_path, "other-ca").sign("other-watcher", [GROUP]),
        ca.sign("for-servers", [GROUP], usage="serverAuth"),
    ):
        with pytest.raises(httpx.TransportError):
            answer(cluster, tmp_path, forged)
    logged = [json.loads(line) for line in cluster.plane.log("extender").splitlines()]
    reasons = [line["message"] for line in logged if line["event"] == "tls_client_refused"]
    assert reasons[-2:] == ["CERTIFICATE_VERIFY_FAILED", "CERTIFICATE_VERIFY_FAILED"]


def test_where_the_ca_may_not_be_read_tokens_are_taken_all_the_same(
    cluster: Cluster, tmp_path: Path
) -> None:
    plane = cluster.plane
    role = plane.call("GET", ROLE)
    plane.call("PUT", ROLE, role | {"rules": []})
    try:
        serve_over_tls(cluster, tmp_path)
        cluster.until(
            lambda: "client_ca_unknown" in cluster.plane.log("extender"), "it says that it may not"
        )
        told = next(
            json.loads(line)
            for line in cluster.plane.log("extender").splitlines()
            if "client_ca_unknown" in line
        )
        assert told["message"].startswith(f"the extender may not get ConfigMap {CONFIG_MAP}; right")
        assert answer(cluster, tmp_path, None, ADMIN_TOKEN).status_code == 200
        watcher = plane.clients_ca.sign("early-watcher", [GROUP])
        unknown = answer(cluster, tmp_path, watcher)
        assert unknown.status_code == 401
        assert "client_ca_unknown" in unknown.json()["detail"]
    finally:
        plane.call("PUT", ROLE, {**role, "metadata": {"name": "headroom-extender"}})
    cluster.until(
        lambda: answer(cluster, tmp_path, watcher).status_code == 200, "it is read in the end"
    )
