"""Checks how kube-scheduler combines our scores with the users' own preferences."""

import pytest

from tests.e2e.cluster import EVENTS, PODS, Cluster, pod_manifest
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import RESOURCE, Shape, node_manifest, node_status


@pytest.mark.parametrize("best_only", [True, False])
def test_the_shipped_scheduler_ranks_all_nodes_by_users_then_headroom_then_balance(
    new_cluster: NewCluster, best_only: bool
) -> None:
    cluster = new_cluster(2)
    cluster.start_scheduler(cluster.start_extender(settings={"filter_best_only": best_only}))
    cluster.settle()
    prioritized = 'headroom_verb_duration_seconds_count{verb="prioritize"}'
    # By default, kube-scheduler examines about 100 nodes and offers them. The other nodes have no
    # reports.
    silent = [f"silent-{i:03}" for i in range(150)]
    cluster.names += tuple(silent)  # ``close`` also deletes these nodes.
    for name in silent:
        cluster.plane.call("POST", "/api/v1/nodes", node_manifest(name) | node_status(Shape()))
    # Each pod requests a ninth of a node. The other node is empty.
    amounts = {"cpu": "14", "memory": "110Gi", RESOURCE: "1"}
    container = {"name": "main", "image": "none", "resources": {"limits": amounts}}
    anywhere = {"tolerations": [{"operator": "Exists"}], "containers": [container]}
    nodes = set()
    for i in range(6):
        cluster.create_pod(f"p{i}", "1Gi", **anywhere)
        cluster.until(lambda i=i: bool(cluster.node_of(f"p{i}")), "it is bound")
        nodes.add(cluster.node_of(f"p{i}"))
    events = cluster.plane.call("GET", f"{EVENTS}?fieldSelector=reason=FailedScheduling")
    assert events["items"] == []
    assert len(nodes) == 1
    # Wait, because the metric is updated after the response is sent.
    calls = 0 if best_only else 6
    cluster.until(lambda: cluster.metric(prioritized) == calls, "the calls are counted")
    (other,) = {"gpu-1", "gpu-2"} - nodes
    # Fill the other node. The preference of the pod outweighs both Headroom's score and the balance
    # of resources.
    filler = pod_manifest(None, gpus=0)
    filler["metadata"]["name"] = "filler"
    limits = {"cpu": "110", "memory": "880Gi"}
    filler["spec"]["containers"] = [{**container, "resources": {"limits": limits}}]
    filler["spec"]["nodeName"] = other
    cluster.plane.call("POST", PODS, filler)
    there = {"key": "kubernetes.io/hostname", "operator": "In", "values": [other]}
    preferred = {"weight": 1, "preference": {"matchExpressions": [there]}}
    kind = {"preferredDuringSchedulingIgnoredDuringExecution": [preferred]}
    cluster.create_pod("choosy", "1Gi", affinity={"nodeAffinity": kind})
    cluster.until(lambda: cluster.node_of("choosy") == other, "it is bound where it likes to be")
    cluster.until(lambda: cluster.metric(prioritized) == calls + 1, "one more call is counted")


def test_preferences_of_users_outweigh_headrooms_score(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(2)
    cluster.bring_up()
    cluster.create_pod("first", "1Gi")
    cluster.until(lambda: bool(cluster.node_of("first")), "the first pod is bound")
    ours = cluster.node_of("first")
    (other,) = set(cluster.names) - {ours}
    node = f"/api/v1/nodes/{ours}"
    cluster.create_pod("second", "1Gi")
    cluster.until(lambda: cluster.node_of("second") == ours, "we fill the node that was begun")

    def lands(wanted: str, name: str, **labels: str) -> bool:
        """Return whether a new pod with these labels is bound to ``wanted``. Delete it otherwise,
        so that the caller can retry.

        A retry is needed because kube-scheduler can bind a pod before it has received objects that
        were written earlier.
        """
        pod = pod_manifest("1Gi")
        pod["metadata"] |= {"name": name, "labels": labels}
        cluster.plane.call("POST", PODS, pod)
        cluster.until(lambda: bool(cluster.node_of(name)), f"{name} is bound")
        if cluster.node_of(name) == wanted:
            return True
        cluster.delete_pod(name)
        return False

    # Test a PreferNoSchedule taint, and a pod with a preferred anti-affinity.
    taint = {"key": "spot", "effect": "PreferNoSchedule"}
    cluster.plane.call("PATCH", node, {"spec": {"taints": [taint]}})
    cluster.until(lambda: lands(other, "avoiding"), "it is bound elsewhere")
    cluster.plane.call("PATCH", node, {"spec": {"taints": None}})
    cluster.delete_pod("avoiding")
    cluster.until(lambda: lands(ours, "back"), "the node without the taint is filled again")

    loner = pod_manifest(None, gpus=0)
    loner["metadata"]["name"] = "loner"
    term = {
        "topologyKey": "kubernetes.io/hostname",
        "labelSelector": {"matchLabels": {"noise": "loud"}},
    }
    apart = {"weight": 1, "podAffinityTerm": term}
    loner["spec"]["affinity"] = {
        "podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [apart]}
    }
    loner["spec"]["nodeName"] = ours
    cluster.plane.call("POST", PODS, loner)
    cluster.until(lambda: lands(other, "loud", noise="loud"), "it is bound away from the loner")
    assert lands(ours, "quiet")  # A pod without a GPU is unaffected.


def test_a_pod_without_a_gpu_is_kept_off_nodes_with_free_gpus(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(2)
    # The timeout is long enough for a busy machine, and short enough for the test to wait for it.
    cluster.start_scheduler(cluster.start_extender(), timeout_s=10.0)
    cluster.settle()
    # Each pod requests a ninth of a node. Without Headroom, kube-scheduler would alternate between
    # the nodes.
    limits = {"cpu": "14", "memory": "110Gi"}

    def place(name: str, vram: str | None = None) -> str:
        gpu = {RESOURCE: "1"} if vram else {}
        container = {"name": "main", "image": "none", "resources": {"limits": limits | gpu}}
        cluster.create_pod(name, vram, containers=[container])
        cluster.until(lambda: bool(cluster.node_of(name)), f"{name} is bound")
        return cluster.node_of(name)

    used = place("first", "20Gi")
    assert {place(f"plain-{i}") for i in range(3)} == {used}
    (other,) = {"gpu-1", "gpu-2"} - {used}
    # Pods without a GPU prefer a node without GPUs.
    cluster.names += ("plain",)
    cluster.plane.call("POST", "/api/v1/nodes", node_manifest("plain"))
    amounts = {"cpu": "32", "memory": "256Gi", "pods": "9"}
    status = {"status": {"capacity": amounts, "allocatable": amounts}}
    cluster.plane.call("PATCH", "/api/v1/nodes/plain", {"spec": {"taints": None}})
    cluster.plane.call("PATCH", "/api/v1/nodes/plain/status", status)
    cluster.until(lambda: place_of_next(cluster) == "plain", "the node is known")
    # With one entry, Headroom places GPU pods as before, and kube-scheduler places all other pods.
    cluster.kill("kube-scheduler")
    url = f"http://127.0.0.1:{cluster.port}"
    cluster.start_scheduler(url, one_entry=True)
    assert place("small", "2Gi") == used
    assert place("anywhere") == other


def place_of_next(cluster: Cluster) -> str:
    """Return the node of a new pod without a GPU and with tiny requests."""
    name = f"next-{len(cluster.pods())}"
    cluster.create_pod(name, None, gpus=0)
    cluster.until(lambda: bool(cluster.node_of(name)), f"{name} is bound")
    return cluster.node_of(name)
