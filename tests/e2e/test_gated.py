"""Checks on real nodes that gated pods never start on a GPU without enough memory.

The simulated driver's memory table shows whether the requests on a device ever exceeded its memory.
The tests' container runtime runs the real gate command. The real ReplicaSet controller replaces
evicted pods, and the real scheduler places them. One node passes devices as environment variables,
and the other node passes them as CDI devices.
"""

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headroom.contract.gate import GATE
from headroom.contract.reasons import Reason
from tests.controlplane import SCHEDULER_NAME, ControlPlane
from tests.driver import GIB
from tests.e2e.cluster import JOBS, NAMESPACE, PODS, REPLICA_SETS
from tests.e2e.conftest import Tell
from tests.e2e.gated import (
    CDI,
    GATE_CONTAINER,
    LEGACY,
    assert_no_device_was_overcommitted,
    bind,
    ever_ran,
    evictions,
    gated_cluster,
    pod_of,
    running,
)
from tests.e2e.real import RealCluster
from tests.kubelet.node import Node


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, binaries: None) -> Iterator[RealCluster]:
    """A cluster that all tests in this file share."""
    with gated_cluster(plane) as real:
        yield real


@pytest.fixture(autouse=True)
def _empty(cluster: RealCluster) -> Iterator[None]:
    """Uncordon and empty both nodes after each test, even if it fails."""
    yield
    for name in cluster.names:
        cluster.cordon(name, False)
    for path in (REPLICA_SETS, JOBS):
        cluster.plane.call("DELETE", path, {"propagationPolicy": "Background"})
    cluster.empty()


@pytest.mark.parametrize("strategy", [LEGACY, CDI])
def test_an_evicted_pod_never_starts_and_its_replacement_runs_on_another_node(
    cluster: RealCluster, strategy: str, tell: Tell
) -> None:
    """While device A holds two more pods than B, the next pod can only get B. Another scheduler's
    pod is bound later but admitted first, and takes B's memory. Then both pods get B, on which the
    second pod does not fit.
    """
    number = (LEGACY, CDI).index(strategy)
    here, elsewhere = cluster.names[number], cluster.names[1 - number]
    machine = cluster.machines[here]
    assert machine.device_lists == strategy
    evicted_before = evictions(cluster)
    small(cluster, [f"s{i}" for i in range(6)], here)
    (full,) = {held.device for held in machine.held("s0")}
    for held in machine.held():
        if held.device != full:
            cluster.plane.call("DELETE", f"{PODS}/{held.pod}")
    cluster.until(lambda: len(cluster.gpunode(here).spec.reservations) == 3, "three are left")
    cluster.until(lambda: len(machine.held()) == 3, "the replicas of the others are free")
    # The kubelet writes its checkpoint when it admits this pod. A restarted kubelet counts the
    # content of the checkpoint.
    small(cluster, ["s6"], here)

    cluster.cordon(elsewhere, True)
    with machine.kubelet_restarts():
        create(cluster, "bypass", 20)
        replica_set(cluster, "victim", 10)
        cluster.until(lambda: bool(node_of(cluster, "victim")), "the victim is bound")
        assert node_of(cluster, "victim") == [here]
        (victim,) = of_set(cluster, "victim")
        bind(cluster, "bypass", here)
        cluster.cordon(elsewhere, False)
    began_s = time.monotonic()

    def successor_runs() -> bool:
        return any(name.startswith("victim-") for name in running(cluster.machines[elsewhere]))

    cluster.until(successor_runs, "the successor of the victim runs on the other node")
    tell(f"{strategy}: {time.monotonic() - began_s:.1f} s from the surprise to the successor's run")
    cluster.until(lambda: "bypass" in running(machine), "the pod without a gate runs as well")
    name = victim["metadata"]["name"]
    assert name not in ever_ran(machine)
    events = f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.name={name}"

    def shown() -> set[str]:
        return {event["reason"] for event in cluster.plane.call("GET", events)["items"]}

    cluster.until(lambda: "InsufficientGPUMemory" in shown(), "its user gets the reason")
    cluster.until(lambda: evictions(cluster) - evicted_before == 1, "the eviction is counted")
    assert_no_device_was_overcommitted(cluster)


def test_a_pod_without_a_controller_waits_at_its_gate_until_memory_is_free(
    cluster: RealCluster,
) -> None:
    here, elsewhere = cluster.names
    machine = cluster.machines[here]
    # Create one pod on each device, so that the checkpoint contains no other pod when the kubelet
    # restarts.
    small(cluster, ["s0", "s1"], here)
    cluster.cordon(elsewhere, True)
    with machine.kubelet_restarts():
        create(cluster, "bypass-1", 20)
        create(cluster, "bypass-2", 20)
        cluster.ask("alone", 10, initContainers=[GATE_CONTAINER])
        cluster.until(lambda: cluster.node_of("alone") == here, "it is bound")
        bind(cluster, "bypass-1", here)
        bind(cluster, "bypass-2", here)
    events = f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.name=alone"

    def shown() -> str:
        items = cluster.plane.call("GET", events)["items"]
        return " ".join(
            each["message"] for each in items if each["reason"] == "InsufficientGPUMemory"
        )

    cluster.until(lambda: "waits at its gate" in shown(), "its user gets a suggestion")
    assert "alone" not in running(machine)
    assert "deletionTimestamp" not in cluster.pod("alone")["metadata"]
    no = "no: the device of this pod does not have enough free memory"
    cluster.until(
        lambda: any(no in gate.output for gate in gates(machine, "alone")),
        "its gate prints why it waits",
    )
    (device,) = {held.device for held in machine.held("alone")}
    there = {held.pod for held in machine.held() if held.device == device}
    (beside,) = there & {"bypass-1", "bypass-2"}
    cluster.plane.call("DELETE", f"{PODS}/{beside}")
    cluster.until(lambda: "alone" in running(machine), "it starts when its neighbour has gone")
    assert_no_device_was_overcommitted(cluster)


def test_a_pod_that_starts_alone_waits_at_its_gate_for_another_pod_on_its_device(
    cluster: RealCluster,
) -> None:
    """Another scheduler binds the other pod later, but it is admitted first. One device holds two
    more pods than the other device, so both pods get the other device.
    """
    here, elsewhere = cluster.names
    machine = cluster.machines[here]
    small(cluster, [f"s{i}" for i in range(6)], here)
    (full,) = {held.device for held in machine.held("s0")}
    for held in machine.held():
        if held.device != full:
            cluster.plane.call("DELETE", f"{PODS}/{held.pod}")
    cluster.until(lambda: len(machine.held()) == 3, "the replicas of the others are free")
    cluster.until(lambda: len(cluster.gpunode(here).spec.reservations) == 3, "three are left")
    small(cluster, ["s6"], here)
    cluster.cordon(elsewhere, True)
    with machine.kubelet_restarts():
        created_s = int(time.time())
        create(cluster, "first", 8, alone=True)
        # Wait, because a kubelet admits pods by age in whole seconds.
        cluster.until(lambda: time.time() >= created_s + 2, "the second pod is younger")
        create(cluster, "second", 8, alone=True, gated=True)
        cluster.until(lambda: cluster.node_of("second") == here, "it is bound")
        bind(cluster, "first", here)
        cluster.until(lambda: "first" in starting(cluster, here), "its start is in the ledger")
    waits = "another pod that starts alone is starting on the same device"
    cluster.until(
        lambda: any(waits in gate.output for gate in gates(machine, "second")),
        "its gate prints why it waits",
    )
    assert machine.held("first")[0].device == machine.held("second")[0].device != full
    cluster.until(lambda: "first" in running(machine), "the first one runs")
    assert "second" not in running(machine)
    assert starting(cluster, here) >= {"first", "second"}
    cluster.plane.call("DELETE", f"{PODS}/first")
    cluster.until(lambda: "second" in running(machine), "it starts when the first one has gone")
    assert_no_device_was_overcommitted(cluster)


def starting(cluster: RealCluster, node: str) -> set[str]:
    """Return the pods that are starting alone according to their reservations."""
    reservations = cluster.gpunode(node).spec.reservations.values()
    return {each.name for each in reservations if each.phase == "starting"}


def test_a_pod_without_a_gate_is_rejected_by_gated_nodes_with_their_reason(
    cluster: RealCluster,
) -> None:
    cluster.ask("plain", 1)
    # Wait, because kube-scheduler may not have received yet that both nodes are uncordoned.
    message = f"0/2 nodes are available: 2 {Reason.NO_GATE.sentence}."
    cluster.until(lambda: message in cluster.rejection("plain"), "it is rejected")


def test_the_gate_delays_a_pod_only_briefly_without_a_surprise(
    cluster: RealCluster, tell: Tell
) -> None:
    """Measure the time from the start of the gate's container to its end."""
    before, machines = evictions(cluster), cluster.machines.values()
    for name, count, at_once in (("alone", 5, 1), ("burst", 20, 20)):
        began_s = time.monotonic()
        for i in range(0, count, at_once):
            names = [f"{name}-{j}" for j in range(i, i + at_once)]
            for each in names:
                cluster.ask(each, 1, initContainers=[GATE_CONTAINER])

            def all_run(names: list[str] = names) -> bool:
                return set(names) <= {pod for machine in machines for pod in running(machine)}

            cluster.until(all_run, "they run")
        took_s = sorted(
            (gate.finished_ns - gate.started_ns) / 1e9
            for machine in machines
            for i in range(count)
            for gate in gates(machine, f"{name}-{i}")
        )
        assert len(took_s) == count  # No container was started twice.
        p50_s, p99_s = statistics.median(took_s), took_s[-1]
        tell(f"gate of {count} pods, {at_once} at a time: p50 {p50_s:.2f} s, most {p99_s:.2f} s")
        tell(f"... which all ran {time.monotonic() - began_s:.1f} s after the first was created")
    assert evictions(cluster) == before
    assert_no_device_was_overcommitted(cluster)


def small(cluster: RealCluster, names: list[str], node: str) -> None:
    """Create small pods, and wait until they run."""
    for name in names:
        selector = {"kubernetes.io/hostname": node}
        cluster.ask(name, 1, initContainers=[GATE_CONTAINER], nodeSelector=selector)
    machine = cluster.machines[node]
    cluster.until(lambda: set(names) <= running(machine), "small pods run")


def create(
    cluster: RealCluster, name: str, gib: int, alone: bool = False, gated: bool = False
) -> None:
    """Create a pod. If ``gated`` is true, it has a gate and uses Headroom's scheduler."""
    pod = pod_of(name, gib)
    if alone:
        pod["metadata"]["annotations"]["headroom.gpu/startup"] = "alone"
    if gated:
        pod["spec"] |= {"schedulerName": SCHEDULER_NAME, "initContainers": [GATE_CONTAINER]}
    cluster.plane.call("POST", PODS, pod)
    cluster.asked_bytes[name] = gib * GIB
    time.sleep(1.1)  # A restarted kubelet admits pods by age in whole seconds.


def replica_set(cluster: RealCluster, name: str, gib: int) -> None:
    """Create a ReplicaSet with a gated pod."""
    template = pod_of(name, gib)
    del template["metadata"]["name"]
    labels = {"set": name}
    template["metadata"]["labels"] = labels
    template["spec"] |= {"schedulerName": SCHEDULER_NAME, "initContainers": [GATE_CONTAINER]}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    cluster.plane.call("POST", REPLICA_SETS, {"metadata": {"name": name}, "spec": spec})


def of_set(cluster: RealCluster, name: str) -> list[dict[str, Any]]:
    return [p for p in cluster.pods() if p["metadata"].get("labels", {}).get("set") == name]


def node_of(cluster: RealCluster, name: str) -> list[str]:
    nodes = (each["spec"].get("nodeName") for each in of_set(cluster, name))
    return [node for node in nodes if node]


def gates(machine: Node, pod: str) -> list[Any]:
    with machine.runtime.lock:
        found = list(machine.runtime.containers.values())
    return [each for each in found if each.name == GATE and each.pod == pod]
