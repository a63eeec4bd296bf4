"""Checks which client certificates the debug API accepts over TLS: those of the real cluster's
CA.
"""

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
from tests.e2e.plugin import headroom
from tests.waiting import PATIENCE_S

GROUP = "gpu-watchers"
CONFIG_MAP = "kube-system/extension-apiserver-authentication"
BINDINGS = f"{RBAC}/clusterrolebindings"
ROLE = f"{RBAC}/namespaces/kube-system/roles/headroom-console"


@pytest.fixture
def cluster(new_cluster: NewCluster) -> Iterator[Cluster]:
    """A cluster in which a group may read the debug API."""
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
    """Return the response of /v1/nodes. Raise ``httpx.TransportError`` if the handshake fails."""
    context = ssl.create_default_context(cafile=str(tmp_path / "served-by.crt"))
    if client is not None:
        context.load_cert_chain(client.cert, client.key)
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    url = cluster.debug_url().replace("http://", "https://")
    with httpx.Client(verify=context, timeout=PATIENCE_S, trust_env=False) as http:
        return http.get(f"{url}/v1/nodes", headers=headers)


def is_known(cluster: Cluster, tmp_path: Path, client: Certificate) -> bool:
    try:
        return answer(cluster, tmp_path, client).status_code in (200, 403)
    except httpx.TransportError:
        return False


def test_a_certificate_of_the_cluster_ca_identifies_its_user(
    cluster: Cluster, tmp_path: Path
) -> None:
    serve_over_tls(cluster, tmp_path)
    ca = cluster.plane.clients_ca
    watcher, outsider = ca.sign("watcher", ["other", GROUP]), ca.sign("unknown-user")
    cluster.until(lambda: is_known(cluster, tmp_path, outsider), "certificates are taken")
    assert answer(cluster, tmp_path, watcher).status_code == 200
    rejected = answer(cluster, tmp_path, outsider)
    assert rejected.status_code == 403
    assert rejected.json()["detail"].startswith("unknown-user may not get path /v1/nodes; bind")
    # The cluster's admin is in this group and has a certificate instead of a token.
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
    reasons = [line["message"] for line in logged if line["event"] == "tls_client_rejected"]
    assert reasons[-2:] == [
        "CERTIFICATE_VERIFY_FAILED: unable to get local issuer certificate",
        "CERTIFICATE_VERIFY_FAILED: unsuitable certificate purpose",
    ]


def test_tokens_are_accepted_if_the_ca_is_not_readable(cluster: Cluster, tmp_path: Path) -> None:
    plane = cluster.plane
    role = plane.call("GET", ROLE)
    plane.call("PUT", ROLE, role | {"rules": []})
    try:
        serve_over_tls(cluster, tmp_path)
        cluster.until(
            lambda: "client_ca_unknown" in cluster.plane.log("extender"), "it logs that it may not"
        )
        shown = next(
            json.loads(line)
            for line in cluster.plane.log("extender").splitlines()
            if "client_ca_unknown" in line
        )
        assert shown["message"].startswith(f"the console may not get ConfigMap {CONFIG_MAP}; bind")
        assert answer(cluster, tmp_path, None, ADMIN_TOKEN).status_code == 200
        watcher = plane.clients_ca.sign("early-watcher", [GROUP])
        unknown = answer(cluster, tmp_path, watcher)
        assert unknown.status_code == 401
        assert "client_ca_unknown" in unknown.json()["detail"]
    finally:
        plane.call("PUT", ROLE, {**role, "metadata": {"name": "headroom-console"}})
    cluster.until(
        lambda: answer(cluster, tmp_path, watcher).status_code == 200, "it is read in the end"
    )


def test_the_plugin_presents_a_certificate_to_a_given_address(
    cluster: Cluster, tmp_path: Path
) -> None:
    serve_over_tls(cluster, tmp_path)
    watcher = cluster.plane.clients_ca.sign("kubectl-watcher", [GROUP])
    cluster.until(lambda: is_known(cluster, tmp_path, watcher), "certificates are taken")
    url = cluster.debug_url().replace("http://", "https://")
    trusts = "--server", url, "--certificate-authority", tmp_path / "served-by.crt"
    shows = "--client-certificate", watcher.cert, "--client-key", watcher.key
    assert headroom(*trusts, *shows, "top").status == 0
    assert "neither a token nor a client certificate" in headroom(*trusts, "top").stderr
    untrusted = headroom("--server", url, *shows, "top")
    assert untrusted.status == 3
    assert "certificate verify failed" in untrusted.stderr
