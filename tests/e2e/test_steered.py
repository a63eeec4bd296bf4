"""Tests all components on nodes whose agents steer, with real kubelets and plugins.

Without steering, the stock plugin would give every second pod another device, because it counts
replicas.
"""

import random
from collections.abc import Iterator

import pytest

from headroom.contract.annotations import DEVICE_CHOICE
from headroom.contract.gpunode import GPUNode
from tests.controlplane import ControlPlane
from tests.e2e.cluster import PODS
from tests.e2e.conftest import Tell
from tests.e2e.nodes import GIB, RESOURCE
from tests.e2e.real import Outcome, RealCluster
from tests.e2e.watching import Watch
from tests.kubelet.conftest import STEERED_KUBELET
from tests.kubelet.node import Node
from tests.loopback import LOOPBACK

NODES = 2
GPUS = 2


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, binaries: None) -> Iterator[RealCluster]:
    """A cluster of two nodes with two 24 GiB GPUs each. Four pods can share a GPU."""
    real = RealCluster(plane, NODES, GPUS, 4, kubelet=STEERED_KUBELET)
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
    """Empty the nodes after each test, even if it fails."""
    yield
    cluster.empty()


def test_pods_of_two_sizes_fill_every_device_completely(cluster: RealCluster, tell: Tell) -> None:
    for i in range(NODES * GPUS):
        for size in (20, 4):
            name = f"p{i}-{size}"
            cluster.ask(name, size)
            cluster.until(lambda name=name: at_home(cluster, name), f"{name} is where it belongs")
    outcome = cluster.outcome()
    tell(f"{outcome.bound} pods of 20 and 4 GiB hold {outcome.asked_ratio:.0%} of the memory")
    assert (outcome.bound, outcome.asked_ratio) == (2 * NODES * GPUS, 1.0)
    assert (outcome.overcommitted, outcome.overdrawn, outcome.turned_away) == (0, 0, 0)


def test_a_burst_of_mixed_sizes_gets_the_devices_chosen_in_the_ledger(
    cluster: RealCluster, tell: Tell
) -> None:
    chance = random.Random(3)
    for i in range(24):
        cluster.ask(f"q{i}", chance.choice((2, 3, 4, 6, 8, 12)))
    outcome = final_outcome(cluster)
    tell(f"{outcome.bound} of {outcome.pods} bound, {outcome.asked_ratio:.0%} of the memory asked")
    late = cluster.late_answers()
    assert cluster.turned_away() == late
    assert (outcome.overcommitted, outcome.overdrawn) == (0, 0)
    assert outcome.bound >= 8
    rejected = {message.partition(":")[0] for message in late}
    for name in {pod["metadata"]["name"] for pod in cluster.bound()} - rejected:
        assert at_home(cluster, name)


def test_pods_with_a_part_of_a_gpu_a_whole_gpu_and_several_gpus_share_nodes(
    cluster: RealCluster, tell: Tell
) -> None:
    def devices(name: str) -> set[str]:
        machine = cluster.machines[cluster.node_of(name) or ""]
        return {held.device for held in machine.held(name)}

    cluster.ask("small", 4)
    cluster.ask("wide", 8, gpus=2)
    cluster.ask("whole", 24, vram="100%")
    for name in ("small", "wide", "whole"):
        cluster.until(lambda name=name: at_home(cluster, name), f"{name} is where it belongs")
    assert len(devices("wide")) == 2
    for i in range(12):
        cluster.ask(f"tiny{i}", 1)
    outcome = final_outcome(cluster)
    tell(f"{outcome.bound} of {outcome.pods} bound, {outcome.asked_ratio:.0%} of the memory asked")
    # Each GPU has 4 replicas. Three replicas stay free beside the pod with a whole GPU, and the
    # other GPUs hold the first two pods.
    late = cluster.late_answers()
    assert cluster.turned_away() == late
    # Another pod is bound for each pod that the kubelet rejected.
    fit = 3 + 3 * 4 - 3
    assert fit <= outcome.bound <= fit + len(late)
    assert (outcome.overcommitted, outcome.overdrawn) == (0, 0)
    others = {pod["metadata"]["name"] for pod in cluster.bound()} - {"whole"}
    assert all(devices("whole").isdisjoint(devices(name)) for name in others)
    # Two whole GPUs of one node are free only after its other pods have ended.
    cluster.ask("training", 24, gpus=2, vram="100%")
    cluster.until(lambda: cluster.outcome().undecided == 0, "it waits")
    home = cluster.node_of("whole")
    # Delete pending pods first, because they would otherwise take the freed GPUs one by one.
    ended = sorted(cluster.pods(), key=lambda pod: "nodeName" in pod["spec"])
    for pod in ended:
        name = pod["metadata"]["name"]
        if name != "training" and pod["spec"].get("nodeName", home) == home:
            cluster.plane.call("DELETE", f"{PODS}/{name}", {})
    cluster.until(lambda: at_home(cluster, "training"), "it has both GPUs of the node")
    assert len(devices("training")) == 2
    assert cluster.outcome().overcommitted == 0


def test_an_annotation_of_the_node_turns_steering_off_and_on(
    cluster: RealCluster, tell: Tell
) -> None:
    """New pods keep arriving during the change. The other node does not change."""
    first, second = cluster.machines
    cluster.ask("before", 20)
    cluster.until(lambda: at_home(cluster, "before"), "a pod where the ledger chose")
    choose(cluster, first, "predicted")
    for i in range(4):
        cluster.ask(f"off{i}", 4)
    cluster.until(lambda: modes(cluster)[first] == ("predicted", False), "it is steered no more")
    machine = cluster.machines[first]
    cluster.until(lambda: is_returned(machine), "the plugin has its place again")
    cluster.until(lambda: machine.allocatable() == 4 * GPUS, "every replica")
    cluster.until(lambda: not list(machine.root.glob("device-plugins/headroom-*")), "no trace")
    assert modes(cluster)[second] == ("steered", True)
    choose(cluster, first, "steered")
    for i in range(4):
        cluster.ask(f"on{i}", 4)
    cluster.until(lambda: modes(cluster)[first] == ("steered", True), "it is steered again")
    # Wait, because a rejection is not final while the node changes.
    cluster.until(lambda: cluster.outcome().bound == 9, "every pod is bound")
    cluster.until(cluster.decided, "what is bound runs")
    outcome = cluster.outcome()
    # A kubelet rejects pods that arrive while neither the agent nor the plugin is registered. On a
    # busy machine, this takes longer.
    tell(f"{outcome.turned_away} of {outcome.bound} pods arrived without a registered plugin")
    assert (outcome.overcommitted, outcome.overdrawn) == (0, 0)
    choose(cluster, first, None)
    cluster.until(lambda: modes(cluster)[first] == ("", False), "the agent's default")
    choose(cluster, first, "steered")
    cluster.until(lambda: modes(cluster)[first] == ("steered", True), "it is steered again")


def test_following_the_suggestion_to_steer_a_node_binds_the_pod(cluster: RealCluster) -> None:
    for name in cluster.machines:
        choose(cluster, name, "predicted")
    cluster.until(lambda: set(modes(cluster).values()) == {("predicted", False)}, "none is steered")
    for machine in cluster.machines.values():
        cluster.until(lambda m=machine: is_returned(m), "the plugin has its place again")
        cluster.until(lambda m=machine: m.allocatable() == 4 * GPUS, "every replica")
    # Create one pod on each GPU of each node, so that the plugin may next choose the GPU with 4 GiB
    # free.
    for node in cluster.machines:
        for gib in (20, 4):
            name = f"{node}-{gib}"
            cluster.ask(name, gib, nodeSelector={"kubernetes.io/hostname": node})
            cluster.until(lambda name=name: runs(cluster, name), f"{name} runs")
    cluster.ask("waits", 16)
    steer = None

    def suggested() -> bool:
        nonlocal steer
        url = f"{cluster.debug_url()}/v1/explain?pod=e2e/waits"
        answer = LOOPBACK.get(url)
        advice = answer.json()["advice"] if answer.status_code == 200 else []
        steer = next((each for each in advice if each["kind"] == "steer"), None)
        return steer is not None and steer["nodes"] == NODES

    cluster.until(suggested, "steering is suggested")
    assert steer is not None
    command = f"kubectl annotate --overwrite node {steer['node']} {DEVICE_CHOICE}=steered"
    assert steer["sentence"].endswith(f"; {command}")

    def gain() -> tuple[int, int]:
        """Return the pods that steering would place, and their bytes.

        Only the pods from the watch count. ``explain`` also uses the filter call for the pod, which
        may arrive before the watch event.
        """
        body = LOOPBACK.get(f"{cluster.debug_url()}/v1/pending?steering=true").json()
        found = body["steering"] or {"placed_pods": 0, "placed_bytes": 0}
        return found["placed_pods"], found["placed_bytes"]

    cluster.until(lambda: gain() == (1, 16 * GIB), "the list of pending pods has the same gain")
    cluster.plane.kubectl(*command.split()[1:])
    cluster.until(lambda: at_home(cluster, "waits"), "the pod is where the ledger chose")
    assert cluster.node_of("waits") == steer["node"]
    head, row = cluster.plane.kubectl("get", "gn", steer["node"], "-o", "wide").splitlines()
    assert row[head.index("DEVICE-CHOICE") :].startswith("steered ")
    assert row[head.index("STEERED") :].startswith(f'["{RESOURCE}"]')
    assert row[head.index("OBSTACLE") :].strip() == ""
    for name in cluster.machines:
        choose(cluster, name, "steered")
    cluster.until(lambda: all(steered(node) for node in cluster.gpunodes()), "all are steered")


def is_returned(machine: Node) -> bool:
    """Return whether the agent has registered the plugin again after it ended steering.

    The agent's log is used, because the Node may not show that it has no replicas in between.
    """
    log = machine.log("agent")
    return log.rfind("plugin_brought_back") > log.rfind("steering_registered")


def final_outcome(cluster: RealCluster) -> Outcome:
    """Wait until the burst is over. Return its outcome.

    The first rejections are not final, because only one set of devices is reserved at a time.
    """
    cluster.until(lambda: cluster.outcome().undecided == 0, "every pod is bound or rejected")
    cluster.until(cluster.decided, "bound pods run, or were rejected by the kubelet")
    with Watch(cluster.plane, PODS) as pods:
        cluster.until(lambda: pods.quiet_s() > 5, "nothing changes any more")
    return cluster.outcome()


def runs(cluster: RealCluster, name: str) -> bool:
    """Return whether the agent reports the pod on a device."""
    uid = cluster.pod(name)["metadata"]["uid"]
    statuses = [node.status for node in cluster.gpunodes() if node.status is not None]
    return any(use.uid == uid for status in statuses for use in status.pods)


def modes(cluster: RealCluster) -> dict[str, tuple[str, bool]]:
    """Return the device choice in each node's GPUNode, and whether the node is steered."""
    return {node.name: (node.spec.device_choice, steered(node)) for node in cluster.gpunodes()}


def steered(node: GPUNode) -> bool:
    return node.status is not None and node.status.plugin.steered == [RESOURCE]


def at_home(cluster: RealCluster, name: str) -> bool:
    """Return whether the kubelet gave the pod exactly the devices in its annotation."""
    pod = cluster.pod(name)
    node = pod["spec"].get("nodeName")
    if not node:
        return False
    message = pod["metadata"]["annotations"]["headroom.gpu/devices.0"]
    held = [held.device for held in cluster.machines[node].held(name)]
    return sorted(held) == sorted(message.split(","))


def choose(cluster: RealCluster, node: str, choice: str | None) -> None:
    """Set or remove the Node's annotation as an administrator does."""
    patch = {"metadata": {"annotations": {DEVICE_CHOICE: choice}}}
    cluster.plane.call("PATCH", f"/api/v1/nodes/{node}", patch, "application/merge-patch+json")
