"""Gated pods on real nodes: whatever surprises, none starts on a GPU without room for it.

Judged by the driver's own memory: no device was ever asked for more than it has. The gate is the
real command, run by the container runtime of the tests; what is evicted is made anew by the real
ReplicaSet controller and placed by the real scheduler. One of the two nodes gives its devices out
as variables, the other one as CDI devices.
"""

import contextlib
import os
import random
import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest

from contract.gate import GATE
from contract.reasons import Reason
from extender.admission.mutation import gate_container
from tests.controlplane import SCHEDULER_NAME, ApiRefused, ControlPlane
from tests.driver import GIB
from tests.e2e.cluster import JOBS, NAMESPACE, PODS, REPLICA_SETS
from tests.e2e.conftest import Tell
from tests.e2e.nodes import RESOURCE
from tests.e2e.real import RealCluster
from tests.kubelet.node import Node
from tests.kubelet.runtime import Container

REPLICAS = 8
LEGACY, CDI = "envvar", "cdi-annotations,cdi-cri"
#: What pods take that another scheduler binds.
LARGE_GIB = 20
MISSES = 'headroom_prediction_misses_total{{overcommitted="{1}",surprise="{0}"}}'
MERGE = "application/merge-patch+json"
#: As the webhook puts it into pods.
GATE_CONTAINER = gate_container("headroom-agent")


@pytest.fixture(scope="module")
def cluster(plane: ControlPlane, binaries: None) -> Iterator[RealCluster]:
    """Two nodes of two GPUs, each of 24 GiB and shared by eight; started once for this file."""
    real = RealCluster(plane, 2, gpus=2, replicas=REPLICAS, device_lists=(LEGACY, CDI))
    try:
        real.create()
        for name in real.names:
            gated = {"metadata": {"annotations": {"headroom.gpu/device-choice": "gated"}}}
            plane.call("PATCH", f"/api/v1/nodes/{name}", gated, MERGE)
        real.bring_up()
        real.start_controller_manager()
        yield real
    finally:
        real.close()


@pytest.fixture(autouse=True)
def _empty(cluster: RealCluster) -> Iterator[None]:
    """However a test ends, the next one finds both nodes open and empty."""
    yield
    for name in cluster.names:
        cordon(cluster, name, False)
    for path in (REPLICA_SETS, JOBS):
        cluster.plane.call("DELETE", path, {"propagationPolicy": "Background"})
    cluster.empty()


@pytest.mark.parametrize("strategy", [LEGACY, CDI])
def test_beside_a_pod_that_bypassed_us_nobody_starts_and_its_successor_runs_elsewhere(
    cluster: RealCluster, strategy: str, tell: Tell
) -> None:
    """Of the devices A and B of a node only B can be the next pod's, as long as A holds two more.
    A pod that another scheduler binds after it is admitted before it, and takes B's memory; then
    both are given B, which has no room for the second one."""
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
    # With it the kubelet writes its checkpoint anew: at its restart it counts what is in there.
    small(cluster, ["s6"], here)

    cordon(cluster, elsewhere, True)
    with machine.kubelet_restarts():
        create(cluster, "bypass", 20)
        replica_set(cluster, "victim", 10)
        cluster.until(lambda: bool(node_of(cluster, "victim")), "the victim is bound")
        assert node_of(cluster, "victim") == [here]
        (victim,) = of_set(cluster, "victim")
        bind(cluster, "bypass", here)
        cordon(cluster, elsewhere, False)
    began_s = time.monotonic()

    def successor_runs() -> bool:
        return any(name.startswith("victim-") for name in running(cluster.machines[elsewhere]))

    cluster.until(successor_runs, "the successor of the victim runs on the other node")
    tell(f"{strategy}: {time.monotonic() - began_s:.1f} s from the surprise to the successor's run")
    cluster.until(lambda: "bypass" in running(machine), "the one that nobody gates runs as well")
    name = victim["metadata"]["name"]
    assert name not in ever_ran(machine)
    events = f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.name={name}"
    told = {event["reason"] for event in cluster.plane.call("GET", events)["items"]}
    assert "NoRoomOnGPU" in told
    assert evictions(cluster) - evicted_before == 1
    assert_nobody_took_what_was_not_there(cluster)


def test_a_pod_that_no_controller_makes_again_waits_and_starts_when_there_is_room(
    cluster: RealCluster,
) -> None:
    here, elsewhere = cluster.names
    machine = cluster.machines[here]
    # One on each device, and a checkpoint of which the restarted kubelet counts nobody else.
    small(cluster, ["s0", "s1"], here)
    cordon(cluster, elsewhere, True)
    with machine.kubelet_restarts():
        create(cluster, "bypass-1", 20)
        create(cluster, "bypass-2", 20)
        cluster.ask("alone", 10, initContainers=[GATE_CONTAINER])
        cluster.until(lambda: cluster.node_of("alone") == here, "it is bound")
        bind(cluster, "bypass-1", here)
        bind(cluster, "bypass-2", here)
    events = f"/api/v1/namespaces/{NAMESPACE}/events?fieldSelector=involvedObject.name=alone"

    def told() -> str:
        items = cluster.plane.call("GET", events)["items"]
        return " ".join(each["message"] for each in items if each["reason"] == "NoRoomOnGPU")

    cluster.until(lambda: "waits at its gate" in told(), "its user is told what to do")
    assert "alone" not in running(machine)
    assert "deletionTimestamp" not in cluster.pod("alone")["metadata"]
    no = "no: the device that this pod got has no room for it"
    cluster.until(
        lambda: any(no in gate.output for gate in gates(machine, "alone")),
        "its gate says why it waits",
    )
    (device,) = {held.device for held in machine.held("alone")}
    there = {held.pod for held in machine.held() if held.device == device}
    (beside,) = there & {"bypass-1", "bypass-2"}
    cluster.plane.call("DELETE", f"{PODS}/{beside}")
    cluster.until(lambda: "alone" in running(machine), "it starts when its neighbour has gone")
    assert_nobody_took_what_was_not_there(cluster)


def test_a_pod_without_a_gate_is_told_why_no_gated_node_takes_it(cluster: RealCluster) -> None:
    cluster.ask("plain", 1)
    cluster.until(lambda: bool(cluster.refusal("plain")), "it is refused")
    assert f"0/2 nodes are available: 2 {Reason.NO_GATE.sentence}." in cluster.refusal("plain")


def test_without_a_surprise_the_gate_costs_a_moment(cluster: RealCluster, tell: Tell) -> None:
    """Measured from the start of the gate's container to its end."""
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
        assert len(took_s) == count  # none was started twice
        p50_s, p99_s = statistics.median(took_s), took_s[-1]
        tell(f"gate of {count} pods, {at_once} at a time: p50 {p50_s:.2f} s, most {p99_s:.2f} s")
        tell(f"... which all ran {time.monotonic() - began_s:.1f} s after the first was created")
    assert evictions(cluster) == before
    assert_nobody_took_what_was_not_there(cluster)


def test_whatever_surprises_while_short_jobs_end_all_the_time_none_starts_without_room(
    cluster: RealCluster, tell: Tell
) -> None:
    """The last one of this file: it breaks two GPUs.

    Twice as much as fits, of jobs that run for a few seconds: nearly always another one ends
    between a binding and its admission. To either node another scheduler binds a pod, gated like
    the others, while it has no room for it, and nobody makes room until its gate was told no; two
    pods are deleted as soon as they are bound.
    On either node the plugin is restarted with another number of replicas, and at last a GPU fails.
    """
    count, chance = int(os.environ.get("TEST_CHURN_JOBS", "18")), random.Random(7)
    jobs = [f"job-{i}" for i in range(count)]
    before = evictions(cluster)
    ends_at_s: dict[str, float] = {}
    ran_on: dict[str, set[str]] = {}
    gates: dict[str, Container] = {}
    bound: dict[str, str] = {}
    broken: set[str] = set()
    #: Pods that another scheduler bound to where there was no room.
    doomed: set[str] = set()
    to_delete = {jobs[3], jobs[9]}
    sizes = {name: chance.choice((3, 4, 6, 8, 12, 16, 20)) for name in jobs}
    #: Where the first pods of these jobs go, that another scheduler binds.
    bypass = dict(zip((jobs[5], jobs[11]), cluster.names, strict=True))
    sizes |= dict.fromkeys(bypass, LARGE_GIB)

    def most_gib(node: str) -> int:
        """What those that were given devices leave on the emptiest one of the node that works."""
        machine = cluster.machines[node]
        left = {gpu.uuid: gpu.memory_bytes // GIB for gpu in machine.driver.gpus}
        for each in machine.held():
            left[each.device] -= sizes[job_of(each.pod)]
        return max(gib for uuid, gib in left.items() if uuid not in broken)

    def waits_on(node: str, pod: dict[str, Any]) -> bool:
        """Whether it is to be told no there, and was not yet."""
        if pod["spec"].get("nodeName") != node or pod["status"]["phase"] != "Pending":
            return False
        heard = "".join(g.output for g in gates.values() if g.pod == pod["metadata"]["name"])
        going = "deletionTimestamp" in pod["metadata"]
        return not going and "gate: no: " not in heard

    def churn() -> int:
        """Let pods end that have run for long enough; how many jobs are done."""
        listed = cluster.pods()
        # Until then the nodes are crowded at some time: twice as much as fits has to go through.
        others_to_come = done() < count - len(bypass)
        leaving = {
            pod["spec"].get("nodeName") for pod in listed if "deletionTimestamp" in pod["metadata"]
        }
        if to_delete:  # one of these may leave this very moment
            leaving.update(cluster.names)
        for pod in listed:
            name, job = pod["metadata"]["name"], pod["metadata"]["labels"]["job"]
            with contextlib.suppress(ApiRefused):  # it went meanwhile
                if "nodeName" in pod["spec"]:
                    bound[name] = pod["spec"]["nodeName"]
                    if job in to_delete:
                        to_delete.remove(job)
                        cluster.plane.call("DELETE", f"{PODS}/{name}")
                elif pod["spec"]["schedulerName"] == "another":
                    node = bypass.get(job)
                    if node is None or not others_to_come:  # they go where there is room
                        bind(cluster, name, max(cluster.names, key=most_gib))
                    elif most_gib(node) < LARGE_GIB and node not in leaving:
                        doomed.add(name)
                        bind(cluster, name, node)
                        del bypass[job]
        held = [pod for pod in cluster.pods() if pod["metadata"]["name"] in doomed]
        for node, machine in cluster.machines.items():
            gates.update({each.id: each for each in containers(machine, GATE)})
            for own in containers(machine, "main"):
                ran_on.setdefault(job_of(own.pod), set()).add(node)
                now_s = time.monotonic()
                due = ends_at_s.setdefault(own.id, now_s + chance.uniform(1.0, 4.0)) <= now_s
                if due and not any(waits_on(node, pod) for pod in held):
                    machine.runtime.exit(own, 0)
        return done()

    def done() -> int:
        listed = cluster.plane.call("GET", JOBS)["items"]
        return sum(each["status"].get("succeeded", 0) for each in listed)

    for name, gib in sizes.items():
        job(cluster, name, gib, bypasses=name in bypass)
    cluster.until(lambda: churn() >= count // 3, "a third is done", patience_s=300.0)
    for machine in cluster.machines.values():
        machine.replace_plugin(REPLICAS - 2)
    cluster.until(lambda: churn() >= 2 * count // 3, "the next third", patience_s=300.0)
    for machine in cluster.machines.values():
        broken.add(machine.driver.gpus[1].uuid)
        machine.driver.fail(machine.driver.gpus[1].uuid, 79)
    cluster.until(lambda: churn() == count, "every job is done", patience_s=300.0)
    assert_nobody_took_what_was_not_there(cluster)
    assert ran_on.keys() == {*jobs}
    listed = cluster.plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
    told = {each["involvedObject"]["name"] for each in listed if each["reason"] == "NoRoomOnGPU"}
    sent_from = {name: node for name, node in bound.items() if name in told}
    told_no = {gate.pod for gate in gates.values() if "gate: no: " in gate.output}
    # Whoever sees it first tells: the gate, or who evicts. One may find room meanwhile.
    assert doomed & (told_no | told)
    # Room can come between the look that sends a pod away and the answer that lets it start.
    begun = len(sent_from.keys() & set().union(*map(ever_ran, cluster.machines.values())))
    elsewhere = sum(node not in ran_on[job_of(pod)] for pod, node in sent_from.items())
    missed = {
        surprise: cluster.metric(MISSES.format(surprise, "no"))
        + cluster.metric(MISSES.format(surprise, "yes"))
        for surprise in ("released", "health", "bypass", "configuration", "several", "unknown")
    }
    tell(
        f"{count} jobs, {len(gates)} gates: {len(told_no)} said no, "
        f"{evictions(cluster) - before:.0f} pods evicted, "
        f"{begun} of these had just begun, {elsewhere} then ran on the other node; predictions "
        f"missed: {', '.join(f'{s} {n:.0f}' for s, n in missed.items() if n) or 'none'}"
    )


def small(cluster: RealCluster, names: list[str], node: str) -> None:
    """Returns when they run."""
    for name in names:
        selector = {"kubernetes.io/hostname": node}
        cluster.ask(name, 1, initContainers=[GATE_CONTAINER], nodeSelector=selector)
    machine = cluster.machines[node]
    cluster.until(lambda: set(names) <= running(machine), "small pods run")


def pod(name: str, gib: int) -> dict[str, Any]:
    """One that nobody gates, and that another scheduler is to place."""
    container = {
        "name": "main",
        "image": "none",
        "env": [{"name": "TAKES_VRAM", "value": str(gib * GIB)}],
        "resources": {"limits": {RESOURCE: "1"}},
    }
    metadata = {"name": name, "annotations": {"headroom.gpu/vram": f"{gib}Gi"}}
    spec = {
        "schedulerName": "another",
        "containers": [container],
        "terminationGracePeriodSeconds": 1,
    }
    return {"metadata": metadata, "spec": spec}


def create(cluster: RealCluster, name: str, gib: int) -> None:
    cluster.plane.call("POST", PODS, pod(name, gib))
    cluster.asked_bytes[name] = gib * GIB
    time.sleep(1.1)  # a kubelet that starts admits the oldest first, by the second


def bind(cluster: RealCluster, name: str, node: str) -> None:
    """As another scheduler does."""
    target = {"apiVersion": "v1", "kind": "Node", "name": node}
    body = {"metadata": {"name": name}, "target": target}
    cluster.plane.call("POST", f"{PODS}/{name}/binding", body)


def replica_set(cluster: RealCluster, name: str, gib: int) -> None:
    """Of one gated pod."""
    template = pod(name, gib)
    del template["metadata"]["name"]
    labels = {"set": name}
    template["metadata"]["labels"] = labels
    template["spec"] |= {"schedulerName": SCHEDULER_NAME, "initContainers": [GATE_CONTAINER]}
    spec = {"replicas": 1, "selector": {"matchLabels": labels}, "template": template}
    cluster.plane.call("POST", REPLICA_SETS, {"metadata": {"name": name}, "spec": spec})


def job(cluster: RealCluster, name: str, gib: int, bypasses: bool) -> None:
    """Of one gated pod, which ends when it is ended; if it bypasses us, somebody else binds it."""
    template = pod("", gib)
    del template["metadata"]["name"]
    template["metadata"]["labels"] = {"job": name}
    template["spec"] |= {"initContainers": [GATE_CONTAINER], "restartPolicy": "Never"}
    if not bypasses:
        template["spec"]["schedulerName"] = SCHEDULER_NAME
    spec = {"template": template, "backoffLimit": 100}
    cluster.plane.call("POST", JOBS, {"metadata": {"name": name}, "spec": spec})


def of_set(cluster: RealCluster, name: str) -> list[dict[str, Any]]:
    return [p for p in cluster.pods() if p["metadata"].get("labels", {}).get("set") == name]


def node_of(cluster: RealCluster, name: str) -> list[str]:
    nodes = (each["spec"].get("nodeName") for each in of_set(cluster, name))
    return [node for node in nodes if node]


def cordon(cluster: RealCluster, node: str, closed: bool) -> None:
    body = {"spec": {"unschedulable": closed}}
    cluster.plane.call("PATCH", f"/api/v1/nodes/{node}", body, MERGE)


def running(machine: Node) -> set[str]:
    """Pods whose own container runs."""
    with machine.runtime.lock:
        found = list(machine.runtime.containers.values())
    return {each.pod for each in found if each.name == "main" and each.pid}


def containers(machine: Node, name: str) -> list[Container]:
    """Those of that name that run."""
    with machine.runtime.lock:
        found = list(machine.runtime.containers.values())
    return [each for each in found if each.name == name and each.pid]


def job_of(pod: str) -> str:
    return pod.rpartition("-")[0]


def ever_ran(machine: Node) -> set[str]:
    return machine.runtime.ever_ran


def gates(machine: Node, pod: str) -> list[Any]:
    with machine.runtime.lock:
        found = list(machine.runtime.containers.values())
    return [each for each in found if each.name == GATE and each.pod == pod]


def evictions(cluster: RealCluster) -> float:
    return cluster.metric('headroom_evictions_total{outcome="evicted"}')


def assert_nobody_took_what_was_not_there(cluster: RealCluster) -> None:
    for machine in cluster.machines.values():
        assert all(least >= 0 for least in machine.driver.least_free_bytes.values())
