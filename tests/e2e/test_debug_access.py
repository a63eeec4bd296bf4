"""Checks who may access the debug API of a real extender, with a real API server and the shipped
roles.
"""

from collections.abc import Iterator

import httpx
import pytest

from tests.controlplane import ADMIN_TOKEN, STRANGER_TOKEN
from tests.e2e.cluster import RBAC, Cluster, pod_manifest
from tests.e2e.conftest import NewCluster
from tests.loopback import LOOPBACK
from tests.reverse_proxy import proxy_to

VIEWER_TOKEN = "viewer-of-the-tests"
NAMESPACE = f"{RBAC}/namespaces/e2e"
DEFAULT_PODS = "/api/v1/namespaces/default/pods"
OF_A_POD = ("/v1/explain?pod=e2e/p", "/v1/decisions?pod=e2e/p")
OF_ALL = ("/v1/nodes", "/metrics", "/v1/decisions", "/v1/explain?pod=other/p")


def status(cluster: Cluster, path: str, token: str | None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answer = LOOPBACK.get(cluster.debug_url() + path, headers=headers)
    if answer.status_code in (401, 403, 503) and path != "/readyz":
        assert answer.headers["content-type"] == "application/problem+json"
        assert token is None or token not in answer.text
    return answer.status_code


def is_ready(cluster: Cluster) -> bool:
    try:
        return status(cluster, "/readyz", None) == 200
    except httpx.ConnectError:
        return False


@pytest.fixture
def may_get_pods(new_cluster: NewCluster) -> Iterator[Cluster]:
    """A cluster in which a user may read only the pods of one namespace."""
    cluster = new_cluster(1)
    rule = {"apiGroups": [""], "resources": ["pods"], "verbs": ["get"]}
    role = {"metadata": {"name": "reads-pods"}, "rules": [rule]}
    binding = {
        "metadata": {"name": "reads-pods"},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "reads-pods"},
        "subjects": [{"kind": "User", "name": "stranger", "apiGroup": "rbac.authorization.k8s.io"}],
    }
    for kind, body in (("roles", role), ("rolebindings", binding)):
        cluster.plane.call("POST", f"{NAMESPACE}/{kind}", body)
    yield cluster
    for kind in ("rolebindings", "roles"):
        cluster.plane.call("DELETE", f"{NAMESPACE}/{kind}/reads-pods")


def test_only_readers_permitted_by_the_api_server_get_a_view(may_get_pods: Cluster) -> None:
    cluster = may_get_pods
    plane = cluster.plane
    with proxy_to(plane.url, certificate=plane.certificate) as (proxy, wire):
        cluster.start_extender(guarded=True, api_port=proxy.port)
        cluster.until(lambda: is_ready(cluster), "the extender is ready")
        for path in (*OF_ALL, *OF_A_POD):
            assert status(cluster, path, None) == 401, path
            assert status(cluster, path, "unknown-user") == 401, path
            for token in (ADMIN_TOKEN, VIEWER_TOKEN):
                assert status(cluster, path, token) in (200, 404), path
        for path in OF_ALL:
            assert status(cluster, path, STRANGER_TOKEN) == 403, path
        for path in OF_A_POD:
            assert status(cluster, path, STRANGER_TOKEN) in (200, 404), path
        wire.faults = {"stalled": 1.0}
        assert status(cluster, "/v1/nodes", "agent-of-the-tests") == 503
        assert status(cluster, "/healthz", None) == 200


def test_a_reader_of_one_namespace_gets_no_pod_of_another(may_get_pods: Cluster) -> None:
    cluster = may_get_pods
    (node,) = cluster.names
    elsewhere = pod_manifest("2Gi")
    elsewhere["metadata"]["name"] = "of-another-team"
    elsewhere["spec"]["nodeName"] = node
    cluster.start_extender(guarded=True)
    cluster.settle()
    cluster.plane.call("POST", DEFAULT_PODS, elsewhere)
    try:
        cluster.create_pod("neighbour", "2Gi", nodeName=node)
        cluster.create_pod("p", "1000Gi")
        for path in ("/v1/explain?pod=e2e/p", f"/v1/score?pod=e2e/p&node={node}"):

            def shown(token: str, path: str = path) -> str:
                headers = {"Authorization": f"Bearer {token}"}
                url = cluster.debug_url() + path
                return LOOPBACK.get(url, headers=headers).text

            cluster.until(
                lambda: all(n in shown(VIEWER_TOKEN) for n in ("neighbour", "of-another-team")),
                "who may read the path sees both",
            )
            text = shown(STRANGER_TOKEN)
            assert "neighbour" in text
            assert "of-another-team" not in text
    finally:
        cluster.plane.call("DELETE", f"{DEFAULT_PODS}/of-another-team", {"gracePeriodSeconds": 0})
    assert status(cluster, "/v1/snapshot", VIEWER_TOKEN) == 403
    assert status(cluster, "/v1/snapshot?redact=true", VIEWER_TOKEN) == 200
    assert status(cluster, "/v1/snapshot", ADMIN_TOKEN) == 200
