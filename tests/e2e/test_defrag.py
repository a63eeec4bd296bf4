"""Runs `kubectl headroom defrag` on a real API server, as in docs/how-to/defrag.md."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Event, Thread

import pytest

from headroom.kubectl import defrag
from headroom.kubectl.eviction import Clock
from tests.e2e.cluster import NAMESPACE, PlayedCluster
from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.nodes import Shape
from tests.e2e.test_cordoning import plugin
from tests.e2e.test_evictions import cordoned, deleted, end, of_set, replica_set, run
from tests.waiting import PATIENCE_S

SETS = ("chat", "embed", "rerank")


@contextmanager
def kubelets(cluster: PlayedCluster) -> Iterator[None]:
    """Act as the kubelets and agents during the context: end terminating pods and report the other
    pods.
    """
    stop = Event()

    def work() -> None:
        while not stop.wait(0.2):
            end(cluster, deleted(cluster))
            cluster.nodes.observe(cluster.pods())

    thread = Thread(target=work)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def test_moving_one_pod_lets_the_pending_pod_be_bound(
    new_cluster: NewCluster, tell: Tell, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = new_cluster(3, Shape(gpus=1))
    cluster.bring_up()
    cluster.start_controller_manager()
    for name, node in zip(SETS, cluster.names, strict=True):
        others = [each for each in cluster.names if each != node]
        with cordoned(cluster, others):
            replica_set(cluster, name, 6, cluster.names)
            cluster.until(lambda n=name, at=node: is_on(cluster, n, at), f"{name} is on {node}")
        (pod,) = of_set(cluster, name)
        run(cluster, pod)
        cluster.nodes.observe(cluster.pods())
    cluster.create_pod("trainer", "20Gi")
    cluster.until(lambda: "insufficient GPU memory" in cluster.rejection("trainer"), "it waits")
    asked = "defrag", "trainer", "-n", NAMESPACE
    pattern = (
        r"pod e2e/trainer: fits on node (?P<node>\S+) after 1 pod is moved\n"
        r"  1\. move e2e/(?P<pod>\S+) of ReplicaSet \w+, 6\.0 GiB: it fits on 2 other nodes: "
        r"(?P<one>\S+), (?P<two>\S+)\n"
        r"  the pod gets 20\.0 GiB on GPU-(?P=node)-0\n"
        r"  to move it: kubectl headroom defrag e2e/trainer --apply\n"
        r"not checked: CPU, memory and other resources\n"
    )
    advice = ""

    def is_complete() -> bool:
        """Return whether the advice is complete. Before all reports have arrived, the pod can fit
        on fewer nodes.
        """
        nonlocal advice
        advice = plugin(cluster, *asked).stdout
        return re.fullmatch(pattern, advice) is not None

    cluster.until(is_complete, "the reports have arrived")
    tell(advice)
    moved, node, one, two = found(pattern, advice)
    assert {node, one, two} == {*cluster.names}
    sleep = lambda seconds: time.sleep(min(seconds, 0.2))  # noqa: E731
    monkeypatch.setattr(defrag, "CLOCK", Clock(time.monotonic, sleep))
    with kubelets(cluster):
        applied = plugin(cluster, *asked, "--apply", "--timeout", f"{PATIENCE_S:.0f}s")
    tell(applied.stdout)
    assert (applied.returncode, applied.stderr) == (0, "")
    assert [line for line in applied.stdout.splitlines() if re.match("node|pod e2e", line)][1:] == [
        f"node {node}: cordoned, so that no pod comes back",
        f"pod e2e/{moved}: evicted from node {node}",
        f"pod e2e/{moved}: its successor e2e/{successor(cluster, moved)} is bound to node "
        f"{node_of(cluster, moved.rpartition('-')[0])}, one of 2 simulated nodes",
        f"node {node}: uncordoned",
        f"pod e2e/trainer: bound to node {node}",
    ]
    assert cluster.node_of("trainer") == node
    assert not cluster.plane.call("GET", f"/api/v1/nodes/{node}")["spec"].get("unschedulable")


def node_of(cluster: PlayedCluster, name: str) -> str:
    """Return the node of a ReplicaSet's only pod, or an empty string if the pod is not bound."""
    bound = [pod["spec"].get("nodeName", "") for pod in of_set(cluster, name)]
    return bound[0] if len(bound) == 1 else ""


def is_on(cluster: PlayedCluster, name: str, node: str) -> bool:
    """Return whether the only pod of a ReplicaSet is on the node.

    Delete the pod if it was bound to another node before kube-scheduler received the cordon.
    """
    bound = node_of(cluster, name)
    if bound and bound != node:
        for pod in of_set(cluster, name):
            cluster.delete_pod(pod["metadata"]["name"])
    return bound == node


def successor(cluster: PlayedCluster, moved: str) -> str:
    (pod,) = of_set(cluster, moved.rpartition("-")[0])
    name: str = pod["metadata"]["name"]
    return name


def found(pattern: str, text: str) -> tuple[str, str, str, str]:
    match = re.fullmatch(pattern, text)
    assert match, text
    return match["pod"], match["node"], match["one"], match["two"]
