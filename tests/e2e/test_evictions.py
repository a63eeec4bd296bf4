"""Checks the evictions of several extender replicas on a real API server.

The nodes are only objects. The test chooses the device instead of the kubelet, so that rare
behavior of a stock plugin occurs. The API server counts the granted evictions, and the pod objects
show which pods were deleted.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from typing import Any

import pytest
import urllib3

from headroom.contract.reasons import Reason
from tests.controlplane import ADMIN_TOKEN, ControlPlane
from tests.e2e.cluster import (
    NAMESPACE,
    PODS,
    REPLICA_SETS,
    PlayedCluster,
    placement,
    pod_manifest,
)
from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.nodes import GIB, Shape
from tests.loopback import LOOPBACK
from tests.reverse_proxy import round_robin

FIRST_S = 10.0

TWO_GPUS = Shape(gpus=2)
REPLICAS = ("extender-a", "extender-b")
BUDGETS = f"/apis/policy/v1/namespaces/{NAMESPACE}/poddisruptionbudgets"
MERGE = "application/merge-patch+json"
GATE = {"name": "headroom-gate", "image": "headroom-agent"}
GATED = {"initContainers": [GATE]}
#: Fields of a container status that are always the same.
_SEEN = {"image": "", "imageID": "", "ready": True, "restartCount": 0}
EVICTED = 'headroom_evictions_total{outcome="evicted"}'
HOSTNAME = "kubernetes.io/hostname"

Pod = dict[str, Any]


def test_two_replicas_evict_each_misplaced_pod_once(new_cluster: NewCluster, tell: Tell) -> None:
    """On each of four nodes, a large pod holds GPU 0, and a small pod waits at its gate on GPU 0.
    The next pod is predicted on GPU 1 but gets GPU 0, on which it does not fit.
    """
    cluster = new_cluster(6, TWO_GPUS)
    bad, good = cluster.names[:4], cluster.names[4:]
    with round_robin(cluster.start_replicas(*REPLICAS)) as url:
        cluster.start_scheduler(url)
        cluster.start_controller_manager()
        cluster.settle()
        before = granted(cluster.plane)
        innocent = sit(cluster, bad, waits=True)
        with cordoned(cluster, good):
            for node in bad:
                replica_set(cluster, f"v-{node}", 10, [node, *good], **GATED)
            cluster.until(lambda: all(nodes_of(cluster, f"v-{node}") for node in bad), "bound")
        victims = [pod for node in bad for pod in of_set(cluster, f"v-{node}")]
        assert [pod["spec"]["nodeName"] for pod in victims] == [*bad]
        for victim in victims:
            assert_foretold(victim, 1)
            cluster.nodes.give(victim, 0)
        cluster.nodes.report(bad)  # Both replicas receive the report at the same time.
        gone = {uid_of(pod) for pod in victims}
        closed: set[tuple[str, str]] = set()

        def all_sent_away() -> bool:
            closed.update((r, n) for r in REPLICAS for n in closed_lately(cluster, r))
            return deleted(cluster) >= gone and closed >= {(r, n) for r in REPLICAS for n in bad}

        cluster.until(all_sent_away, "they are evicted, and both replicas back off their nodes")
        assert {node for _, node in closed} == {*bad}
        evicted_at = {
            pod["spec"]["nodeName"]: when(pod["metadata"]["deletionTimestamp"])
            - pod["metadata"]["deletionGracePeriodSeconds"]
            for pod in cluster.pods()
            if uid_of(pod) in gone
        }
        # Each of these nodes has enough memory for another pod.
        for node in bad:
            cluster.create_pod(f"next-{node}", "1Gi", nodeSelector={HOSTNAME: node}, **GATED)
        end(cluster, gone)
        for node in bad:
            cluster.until(lambda n=node: bool(nodes_of(cluster, f"v-{n}")), "made anew")  # type: ignore[misc]
            for pod in of_set(cluster, f"v-{node}"):
                # After this time, the node may take the pod again.
                if scheduled(pod) - evicted_at[node] < FIRST_S - 2:
                    assert pod["spec"]["nodeName"] in good
        cluster.until(
            lambda: all(cluster.node_of(f"next-{node}") for node in bad), "they take pods again"
        )
        closed_s = [scheduled(cluster.pod(f"next-{node}")) - evicted_at[node] for node in bad]
        tell(f"4 pods evicted, once each; their nodes took the next after {closed_s} s")
        assert (
            min(closed_s) >= FIRST_S - 2
        )  # The back-off starts at the mark. Timestamps have whole seconds.

        answers = granted(cluster.plane)
        answers.subtract(before)
        assert answers["201"] == len(victims), answers

        def shown() -> Counter[str]:
            told = told_of(cluster, "InsufficientGPUMemory")
            return Counter(uid for uid in told if uid in gone | innocent)

        cluster.until(lambda: shown() == dict.fromkeys(gone, 1), "each has one Event")
        assert innocent <= {uid_of(pod) for pod in cluster.pods()} - deleted(cluster)

        def counted() -> float:
            return sum(cluster.metric(EVICTED, replica) for replica in REPLICAS)

        cluster.until(lambda: counted() == len(victims), "all evictions are counted")

        def marked() -> bool:
            gpunodes = map(cluster.gpunode, bad)
            return any(each.flags for node in gpunodes for each in node.spec.reservations.values())

        cluster.until(lambda: not marked(), "the marks are deleted with the pods")


@pytest.mark.parametrize("on_miss", ["report", "evict"])
def test_a_pod_without_a_gate_is_evicted_only_if_enabled_and_if_no_work_is_lost(
    new_cluster: NewCluster, on_miss: str
) -> None:
    """On each node, a pod gets GPU 0, on which it does not fit. One pod has a controller and uses
    no memory yet, another has no controller, another uses memory, and another is protected by a
    disruption budget.
    """
    cluster = new_cluster(6, TWO_GPUS)
    new, bare, busy, held = bad = cluster.names[:4]
    elsewhere = cluster.names[4:]
    cluster.start_scheduler(cluster.start_extender(settings={"on_miss": on_miss}))
    cluster.start_controller_manager()
    cluster.settle()
    before = granted(cluster.plane)
    innocent = sit(cluster, bad, waits=False)
    with cordoned(cluster, elsewhere):
        for node in (new, busy, held):
            replica_set(cluster, f"v-{node}", 10, [node, *elsewhere])
        cluster.create_pod(f"v-{bare}", "10Gi", nodeSelector={HOSTNAME: bare})
        cluster.until(lambda: all(node in victims_of(cluster) for node in bad), "all are bound")
    if on_miss == "evict":
        budget = {"maxUnavailable": 0, "selector": {"matchLabels": {"set": f"v-{held}"}}}
        cluster.plane.call("POST", BUDGETS, {"metadata": {"name": "none"}, "spec": budget})
    victims = victims_of(cluster)
    for node, victim in victims.items():
        assert_foretold(victim, 1)
        run(cluster, victim)
        cluster.nodes.give(victim, 0, used_bytes=GIB if node == busy else 0)
    cluster.nodes.report(bad)
    missed = 'headroom_prediction_misses_total{overcommitted="yes",surprise="unknown"}'
    cluster.until(lambda: cluster.metric(missed) == len(bad), "all are known to be misplaced")

    uids = {node: uid_of(victim) for node, victim in victims.items()}
    if on_miss == "evict":
        cluster.until(lambda: deleted(cluster) >= {uids[new]}, "the one that loses nothing goes")
        rejected = 'headroom_evictions_total{outcome="rejected"}'
        cluster.until(lambda: cluster.metric(rejected) >= 1, "the budget rejects it")
        assert deleted(cluster) == {uids[new]}
        cluster.plane.call("DELETE", f"{BUDGETS}/none")
        cluster.until(lambda: deleted(cluster) >= {uids[held]}, "then the budget lets it go")
    # Wait for an Event, because Events are written after all pods that must be evicted were
    # checked.
    cluster.create_pod("theirs", "30Gi", nodeName=bare)  # No device has this much memory.
    theirs = uid_of(cluster.pod("theirs"))
    cluster.until(lambda: theirs in told_of(cluster, "Overcommitted"), "a round has ended")
    leave = {uids[new], uids[held]} if on_miss == "evict" else set()
    assert deleted(cluster) == leave
    assert innocent <= {uid_of(pod) for pod in cluster.pods()}
    answers = granted(cluster.plane)
    answers.subtract(before)
    assert answers["201"] == len(leave)
    cluster.until(lambda: cluster.metric(EVICTED) == len(leave), "all evictions are counted")
    if leave:
        end(cluster, leave)
        for node in (new, held):
            cluster.until(lambda n=node: bool(nodes_of(cluster, f"v-{n}")), "made anew")  # type: ignore[misc]


def sit(cluster: PlayedCluster, nodes: Sequence[str], waits: bool) -> set[str]:
    """Use 20 of the 24 GiB on GPU 0 of each node. Reserve 2 GiB for a pod that waits at its gate or
    runs. Return the UIDs of these pods.
    """
    for node in nodes:
        cluster.create_pod(f"large-{node}", "20Gi", nodeSelector={HOSTNAME: node}, **GATED)
    cluster.until(lambda: len(cluster.bound()) == len(nodes), "the large ones are bound")
    for pod in cluster.bound():
        run(cluster, pod)
        cluster.nodes.give(pod, 0, used_bytes=20 * GIB)
    cluster.nodes.report(nodes)
    for node in nodes:
        replica_set(cluster, f"small-{node}", 2, [node], **GATED)
    cluster.until(lambda: len(cluster.bound()) == 2 * len(nodes), "the small ones are bound")
    for node in nodes:
        (small,) = of_set(cluster, f"small-{node}")
        if not waits:
            run(cluster, small)
        cluster.nodes.give(small, 0, used_bytes=0 if waits else 2 * GIB)
    cluster.nodes.report(nodes)
    return {uid_of(pod) for pod in cluster.bound()}


def replica_set(
    cluster: PlayedCluster, name: str, gib: int, nodes: Sequence[str], **spec: Any
) -> None:
    """Create a ReplicaSet with a pod that can run on these nodes."""
    labels = {"set": name}
    where = {"key": HOSTNAME, "operator": "In", "values": [*nodes]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [where]}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}
    template = pod_manifest(f"{gib}Gi")
    template["metadata"]["labels"] = labels
    template["spec"] |= {"affinity": affinity, **spec}
    wanted = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    cluster.plane.call("POST", REPLICA_SETS, {"metadata": {"name": name}, "spec": wanted})


def of_set(cluster: PlayedCluster, name: str) -> list[Pod]:
    """Return the pods of the ReplicaSet that are not being deleted."""
    return [
        pod
        for pod in cluster.pods()
        if pod["metadata"].get("labels", {}).get("set") == name
        and "deletionTimestamp" not in pod["metadata"]
    ]


def nodes_of(cluster: PlayedCluster, name: str) -> list[str]:
    nodes = (pod["spec"].get("nodeName") for pod in of_set(cluster, name))
    return [node for node in nodes if node]


def victims_of(cluster: PlayedCluster) -> dict[str, Pod]:
    """Return the pod on each node that got a different device than the predicted device."""
    return {
        pod["spec"]["nodeName"]: pod
        for pod in cluster.bound()
        if pod["metadata"]["name"].startswith("v-")
    }


def run(cluster: PlayedCluster, pod: Pod) -> None:
    """Set the status of a running pod as its kubelet would."""
    ready = {"type": "Ready", "status": "True"}
    ended = {"name": GATE["name"], "state": {"terminated": {"exitCode": 0}}, **_SEEN}
    gate = [ended] if "initContainers" in pod["spec"] else []
    status = {"phase": "Running", "conditions": [ready], "initContainerStatuses": gate}
    path = f"{PODS}/{pod['metadata']['name']}/status"
    cluster.plane.call("PATCH", path, {"status": status}, MERGE)


def end(cluster: PlayedCluster, uids: set[str]) -> None:
    """Remove the pods as their kubelets would, and report the nodes."""
    for pod in cluster.pods():
        if uid_of(pod) in uids:
            cluster.delete_pod(pod["metadata"]["name"])
    cluster.nodes.report(sorted(cluster.nodes.take_back({uid_of(pod) for pod in cluster.pods()})))


def assert_foretold(pod: Pod, index: int) -> None:
    node = pod["spec"]["nodeName"]
    assert [*placement(pod)["containers"]["main"]["bytes"]] == [f"GPU-{node}-{index}"]


@contextmanager
def cordoned(cluster: PlayedCluster, nodes: Sequence[str]) -> Iterator[None]:
    for node in nodes:
        cluster.cordon(node, True)
    yield
    for node in nodes:
        cluster.cordon(node, False)


def uid_of(pod: Pod) -> str:
    uid: str = pod["metadata"]["uid"]
    return uid


def deleted(cluster: PlayedCluster) -> set[str]:
    return {uid_of(pod) for pod in cluster.pods() if "deletionTimestamp" in pod["metadata"]}


def told_of(cluster: PlayedCluster, reason: str) -> list[str]:
    """Return the UID of the pod of each Event with this reason."""
    listed = cluster.plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
    found = (each for each in listed if each["source"].get("component") == "headroom")
    return [each["involvedObject"]["uid"] for each in found if each["reason"] == reason]


def closed_lately(cluster: PlayedCluster, replica: str) -> set[str]:
    """Return the nodes that take no pods because of this replica's back-off."""
    nodes = LOOPBACK.get(f"{cluster.debug_url(replica)}/v1/nodes").json()["nodes"]
    return {node["name"] for node in nodes if node["reason"] == Reason.EVICTED_RECENTLY.code}


def when(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def scheduled(pod: Pod) -> float:
    (condition,) = (c for c in pod["status"]["conditions"] if c["type"] == "PodScheduled")
    assert condition["status"] == "True"
    return when(condition["lastTransitionTime"])


def granted(plane: ControlPlane) -> Counter[str]:
    """Return how many eviction requests the API server has answered, by response code."""
    http = urllib3.PoolManager(ca_certs=str(plane.ca_file), retries=False)
    headers = {"Authorization": f"Bearer {ADMIN_TOKEN}"}
    text = http.request("GET", f"{plane.url}/metrics", headers=headers).data.decode()
    answers = Counter[str]()
    for line in text.splitlines():
        if line.startswith("apiserver_request_total{") and 'subresource="eviction"' in line:
            labels, _, count = line.rpartition(" ")
            answers[labels.partition('code="')[2].partition('"')[0]] += int(float(count))
    return answers
