"""Who reads the debug API of a real extender, by a real API server with the shipped roles."""

import httpx
import pytest

from tests.controlplane import ADMIN_TOKEN, STRANGER_TOKEN
from tests.e2e.cluster import RBAC, Cluster
from tests.e2e.conftest import NewCluster
from tests.e2e.wire import wire_to

VIEWER_TOKEN = "viewer-of-the-tests"
NAMESPACE = f"{RBAC}/namespaces/e2e"
OF_A_POD = ("/v1/explain/pods/e2e/p", "/v1/decisions?pod=e2e/p")
OF_ALL = ("/v1/nodes", "/metrics", "/v1/decisions", "/v1/explain/pods/other/p")


def status(cluster: Cluster, path: str, token: str | None) -> int:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    answer = httpx.get(cluster.debug_url() + path, headers=headers, timeout=30, trust_env=False)
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
def may_get_pods(new_cluster: NewCluster) -> Cluster:
    """A cluster in which the stranger may read the pods of one namespace, and nothing else."""
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
    return cluster


def test_a_view_is_for_whom_the_api_server_would_show_the_same(may_get_pods: Cluster) -> None:
    cluster = may_get_pods
    with wire_to(cluster.plane.port) as wire:
        cluster.start_extender(guarded=True, api_port=wire.port)
        cluster.until(lambda: is_ready(cluster), "the extender is ready")
        for path in (*OF_ALL, *OF_A_POD):
            assert status(cluster, path, None) == 401, path
            assert status(cluster, path, "nobody-s") == 401, path
            for token in (ADMIN_TOKEN, VIEWER_TOKEN):
                assert status(cluster, path, token) in (200, 404), path
        for path in OF_ALL:
            assert status(cluster, path, STRANGER_TOKEN) == 403, path
        for path in OF_A_POD:
            assert status(cluster, path, STRANGER_TOKEN) in (200, 404), path
        wire.stall()
        assert status(cluster, "/v1/nodes", "agent-of-the-tests") == 503
        assert status(cluster, "/healthz", None) == 200
