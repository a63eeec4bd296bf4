"""Runs `kubectl headroom cordon` on a real API server, with an extender and kube-scheduler."""

from typing import Any

import httpx
import pytest

from headroom.contract.device_choice import STEERING_UNKNOWN
from tests.controlplane import STRANGER_TOKEN
from tests.e2e.cluster import NAMESPACE, RBAC, PlayedCluster
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import GIB, Shape
from tests.e2e.test_evictions import BUDGETS, of_set, replica_set, run, uid_of
from tests.kubectl.transcripts import Shown
from tests.kubectl.transcripts import run as run_plugin

CORDON = "headroom.gpu/cordon"
NODE = "gpu-1"
FIRST, SECOND = f"GPU-{NODE}-0", f"GPU-{NODE}-1"
PLUGIN_ROLE = {
    "apiVersion": "rbac.authorization.k8s.io/v1",
    "kind": "ClusterRole",
    "metadata": {"name": "cordons-gpus"},
    "rules": [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get", "patch"]}],
}


def plugin(cluster: PlayedCluster, *arguments: str, token: str | None = None) -> Shown:
    kubeconfig = cluster.plane.kubeconfig(token) if token else cluster.plane.kubeconfig()
    return run_plugin(cluster.debug_url(), "--kubeconfig", str(kubeconfig), *arguments)


def cordon_of(cluster: PlayedCluster) -> str | None:
    node = cluster.plane.call("GET", f"/api/v1/nodes/{NODE}")
    value: str | None = node["metadata"].get("annotations", {}).get(CORDON)
    return value


def cordoned_devices(cluster: PlayedCluster) -> set[str]:
    """Return the devices that are cordoned in the extender's state."""
    node = httpx.get(f"{cluster.debug_url()}/v1/nodes/{NODE}").json()["node"]
    return {device["uuid"] for device in node["devices"] if device["cordoned"]}


@pytest.fixture
def cluster(new_cluster: NewCluster) -> PlayedCluster:
    """A cluster with a node that has two GPUs, an extender, kube-scheduler and controllers."""
    found = new_cluster(1, Shape(gpus=2))
    assert found.names == (NODE,)
    found.bring_up()
    return found


def test_a_node_with_a_cordoned_gpu_takes_no_pods_while_the_plugin_could_choose_the_gpu(
    cluster: PlayedCluster,
) -> None:
    shown = plugin(cluster, "cordon", NODE, "0")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert shown.stdout.splitlines() == [
        f"GPU 0 of node {NODE}: {FIRST}, NVIDIA L4",
        "  no pod is on it",
        "  lost: 8 free replicas, 24.0 GiB headroom",
        f"Node {NODE} takes no pods for nvidia.com/gpu while the device plugin could choose a "
        "cordoned GPU:",
        f"  {FIRST}: the device plugin's next choice (fewest replicas in use)",
        "  also lost, on 1 other GPU: 8 free replicas, 24.0 GiB headroom",
        "To keep the other GPUs open, let Headroom choose the GPU of each pod:",
        f"  obstacle: {STEERING_UNKNOWN}",
        f"  kubectl annotate node {NODE} headroom.gpu/device-choice=steered",
        f"node {NODE}: {FIRST} (GPU 0) cordoned",
    ]
    assert cordon_of(cluster) == FIRST
    cluster.until(lambda: FIRST in cordoned_devices(cluster), "the extender sees the cordon")
    cluster.create_pod("p", "4Gi")
    cluster.until(lambda: "cordoned" in cluster.rejection("p"), "the pod is rejected")
    assert "a GPU that the pod could get is cordoned" in cluster.rejection("p")
    assert plugin(cluster, "uncordon", NODE, "0").stdout == (
        f"node {NODE}: {FIRST} (GPU 0) uncordoned\n"
    )
    cluster.until(lambda: cluster.node_of("p") == NODE, "the pod is placed")
    assert cordon_of(cluster) is None


def test_a_user_without_the_right_to_patch_nodes_gets_the_required_rule(
    cluster: PlayedCluster,
) -> None:
    shown = plugin(cluster, "cordon", NODE, "0", token=STRANGER_TOKEN)
    assert (shown.returncode, shown.stdout) == (3, "")
    assert 'cannot get resource "nodes"' in shown.stderr
    assert shown.stderr.endswith("{apiGroups: [''], resources: [nodes], verbs: [get, patch]}\n")
    binding = {
        "metadata": {"name": "cordons-gpus"},
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "ClusterRole",
            "name": "cordons-gpus",
        },
        "subjects": [{"kind": "User", "name": "stranger", "apiGroup": "rbac.authorization.k8s.io"}],
    }
    made: list[tuple[str, dict[str, Any]]] = [
        ("clusterroles", PLUGIN_ROLE),
        ("clusterrolebindings", binding),
    ]
    try:
        for kind, body in made:
            cluster.plane.call("POST", f"{RBAC}/{kind}", body)
        cluster.until(
            lambda: plugin(cluster, "cordon", NODE, "0", token=STRANGER_TOKEN).returncode == 0,
            "the rule of the message is enough",
        )
        assert cordon_of(cluster) == FIRST
    finally:
        for kind, _ in reversed(made):
            cluster.plane.call("DELETE", f"{RBAC}/{kind}/cordons-gpus")


def test_evictions_respect_a_disruption_budget(cluster: PlayedCluster) -> None:
    cluster.start_controller_manager()
    replica_set(cluster, "held", 4, [NODE])
    cluster.until(lambda: bool(cluster.bound()), "the pod is bound")
    # Cordon the node, because the replacement pod must not run on it.
    cluster.cordon(NODE, True)
    (pod,) = cluster.bound()
    run(cluster, pod)
    cluster.nodes.give(pod, 1, used_bytes=GIB)
    cluster.nodes.report([NODE])
    name = pod["metadata"]["name"]

    def dry_run() -> str:
        return plugin(cluster, "cordon", NODE, SECOND, "--dry-run", "--evict").stdout

    would = f"pod {NAMESPACE}/{name}: would be evicted\n"
    cluster.until(lambda: dry_run().endswith(would), "a report shows the pod on GPU 1")
    assert f"    {NAMESPACE}/{name}: 4.0 GiB reserved\n" in dry_run()
    budget = {"maxUnavailable": 0, "selector": {"matchLabels": {"set": "held"}}}
    made = cluster.plane.call("POST", BUDGETS, {"metadata": {"name": "none"}, "spec": budget})
    observed = {"observedGeneration": made["metadata"]["generation"], "expectedPods": 1}
    status = {"disruptionsAllowed": 0, "currentHealthy": 1, "desiredHealthy": 1, **observed}
    try:
        # Write the status, because no disruption controller runs.
        cluster.plane.call("PATCH", f"{BUDGETS}/none/status", {"status": status})
        shown = plugin(cluster, "cordon", NODE, "1", "--evict", "--timeout", "1s")
        assert shown.returncode == 1
        assert shown.stdout.splitlines()[-2:] == [
            f"node {NODE}: {SECOND} (GPU 1) cordoned",
            f"pod {NAMESPACE}/{name}: stays: The disruption budget none needs 1 healthy pods and "
            "has 1 currently",
        ]
        assert [uid_of(each) for each in of_set(cluster, "held")] == [uid_of(pod)]
        status["disruptionsAllowed"] = 1
        cluster.plane.call("PATCH", f"{BUDGETS}/none/status", {"status": status})
        shown = plugin(cluster, "cordon", NODE, "1", "--evict", "--timeout", "1s")
        # The command times out, because no kubelet ends the pod.
        assert shown.returncode == 1
        assert shown.stdout.splitlines() == [
            f"node {NODE}: {SECOND} (GPU 1) is already cordoned",
            f"pod {NAMESPACE}/{name}: evicted, but has not ended yet",
        ]
        assert "deletionTimestamp" in cluster.pod(name)["metadata"]
    finally:
        cluster.plane.call("DELETE", f"{BUDGETS}/none")
