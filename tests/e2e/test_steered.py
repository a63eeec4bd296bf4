"""The whole stack on nodes whose agents steer: real kubelets and plugins, judged as the others are.

The stock plugin counts replicas, so it would give every second of these pods another device.
"""

import random
from collections.abc import Iterator

import pytest

from contract.annotations import DEVICE_CHOICE
from contract.gpunode import GPUNode
from tests.controlplane import ControlPlane
from tests.e2e.cluster import PODS
from tests.e2e.conftest import Tell
from tests.e2e.nodes import RESOURCE
from tests.e2e.real import RealCluster
from tests.e2e.watching import Watch

NODES = 2
GPUS = 2


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, binaries: None) -> Iterator[RealCluster]:
    """Two nodes of two GPUs, each of 24 GiB and shared by four."""
    real = RealCluster(plane, NODES, GPUS, 4)
    try:
        real.create()
        real.bring_up()
        for name in real.machines:
            choose(real, name, "steered")
        real.until(lambda: all(steered(node) for node in real.gpunodes()), "all are steered")
        yield real
    finally:
        real.close()


@pytest.fixture(autouse=True)
def _empty(cluster: RealCluster) -> Iterator[None]:
    """However a test ends, the next one finds idle nodes."""
    yield
    cluster.empty()


def test_pods_of_two_sizes_fill_every_device_to_the_last_byte(
    cluster: RealCluster, tell: Tell
) -> None:
    for i in range(NODES * GPUS):
        for size in (20, 4):
            name = f"p{i}-{size}"
            cluster.ask(name, size)
            cluster.until(lambda name=name: at_home(cluster, name), f"{name} is where it belongs")
    outcome = cluster.outcome()
    tell(f"{outcome.bound} pods of 20 and 4 GiB hold {outcome.asked_ratio:.0%} of the memory")
    assert (outcome.bound, outcome.asked_ratio) == (2 * NODES * GPUS, 1.0)
    assert (outcome.overcommitted, outcome.overdrawn, outcome.turned_away) == (0, 0, 0)


def test_a_burst_of_mixed_sizes_gets_the_devices_that_the_ledger_chose(
    cluster: RealCluster, tell: Tell
) -> None:
    chance = random.Random(3)
    for i in range(24):
        cluster.ask(f"q{i}", chance.choice((2, 3, 4, 6, 8, 12)))
    cluster.until(lambda: cluster.outcome().undecided == 0, "every pod is bound or rejected")
    cluster.until(cluster.decided, "bound pods run, or were rejected by the kubelet")
    # One device at a time is given out, so the first rejections are not final.
    with Watch(cluster.plane, PODS) as pods:
        cluster.until(lambda: pods.quiet_s() > 5, "nothing changes any more")
    outcome = cluster.outcome()
    tell(f"{outcome.bound} of {outcome.pods} bound, {outcome.asked_ratio:.0%} of the memory asked")
    assert (outcome.overcommitted, outcome.overdrawn, outcome.turned_away) == (0, 0, 0)
    assert outcome.bound >= 8
    for pod in cluster.bound():
        assert at_home(cluster, pod["metadata"]["name"])


def test_an_annotation_of_the_node_turns_steering_off_and_on(cluster: RealCluster) -> None:
    """Pods keep coming meanwhile; the other node stays as it is."""
    first, second = cluster.machines
    cluster.ask("before", 20)
    cluster.until(lambda: at_home(cluster, "before"), "a pod where the ledger chose")
    choose(cluster, first, "predicted")
    for i in range(4):
        cluster.ask(f"off{i}", 4)
    cluster.until(lambda: modes(cluster)[first] == ("predicted", False), "it is steered no more")
    machine = cluster.machines[first]
    cluster.until(lambda: machine.allocatable() == 4 * GPUS, "every replica")
    cluster.until(lambda: not list(machine.root.glob("device-plugins/headroom-*")), "no trace")
    assert modes(cluster)[second] == ("steered", True)
    choose(cluster, first, "steered")
    for i in range(4):
        cluster.ask(f"on{i}", 4)
    cluster.until(lambda: modes(cluster)[first] == ("steered", True), "it is steered again")
    cluster.until(lambda: cluster.outcome().undecided == 0, "every pod is bound or rejected")
    cluster.until(cluster.decided, "what is bound runs")
    outcome = cluster.outcome()
    assert outcome.bound == 9
    assert (outcome.overcommitted, outcome.overdrawn, outcome.turned_away) == (0, 0, 0)
    choose(cluster, first, None)
    cluster.until(lambda: modes(cluster)[first] == ("", False), "the agent's default")
    choose(cluster, first, "steered")
    cluster.until(lambda: modes(cluster)[first] == ("steered", True), "it is steered again")


def modes(cluster: RealCluster) -> dict[str, tuple[str, bool]]:
    """Node -> the device choice that its GPUNode has, and whether it is steered."""
    return {node.name: (node.spec.device_choice, steered(node)) for node in cluster.gpunodes()}


def steered(node: GPUNode) -> bool:
    return node.status is not None and node.status.plugin.steered == [RESOURCE]


def at_home(cluster: RealCluster, name: str) -> bool:
    """Whether the kubelet gave the pod the one device that its annotation names."""
    pod = cluster.pod(name)
    node = pod["spec"].get("nodeName")
    if not node:
        return False
    message = pod["metadata"]["annotations"]["headroom.gpu/devices.0"]
    return [held.device for held in cluster.machines[node].held(name)] == [message]


def choose(cluster: RealCluster, node: str, choice: str | None) -> None:
    """As an administrator does: annotate the Node, or remove the annotation."""
    patch = {"metadata": {"annotations": {DEVICE_CHOICE: choice}}}
    cluster.plane.call("PATCH", f"/api/v1/nodes/{node}", patch, "application/merge-patch+json")
