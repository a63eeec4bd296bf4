"""Runs short jobs on gated nodes, and checks that pods do not start on a GPU without enough memory.

As in the tests of the gate, the simulated driver's memory table shows whether memory was enough.
"""

import contextlib
import os
import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

from headroom.contract.gate import GATE
from tests.controlplane import SCHEDULER_NAME, ApiRefused, ControlPlane
from tests.driver import GIB
from tests.e2e.cluster import JOBS, NAMESPACE, PODS
from tests.e2e.conftest import Tell
from tests.e2e.gated import (
    GATE_CONTAINER,
    REPLICAS,
    assert_no_device_was_overcommitted,
    bind,
    containers,
    ever_ran,
    evictions,
    gated_cluster,
    pod_of,
)
from tests.e2e.real import RealCluster
from tests.kubelet.cri_objects import Container

#: Memory request of the pods that another scheduler binds.
LARGE_GIB = 20
MISSES = 'headroom_prediction_misses_total{{overcommitted="{1}",surprise="{0}"}}'


@pytest.fixture
def cluster(plane: ControlPlane, binaries: None) -> Iterator[RealCluster]:
    with gated_cluster(plane) as real:
        yield real


def test_no_gated_pod_starts_on_a_full_device_while_short_jobs_end(
    cluster: RealCluster, tell: Tell
) -> None:
    """Jobs that run for a few seconds request twice the memory of the nodes.

    A job usually ends between the binding and the admission of another pod. On each node:

    * Another scheduler binds a gated pod that does not fit on the node. No memory is freed until
      the gate has rejected the start of this pod.
    * The plugin restarts with another number of replicas, and at the end one GPU fails.

    Two pods are deleted as soon as they are bound.
    """
    count, chance = int(os.environ.get("TEST_CHURN_JOBS", "18")), random.Random(7)
    jobs = [f"job-{i}" for i in range(count)]
    before = evictions(cluster)
    ends_at_s: dict[str, float] = {}
    ran_on: dict[str, set[str]] = {}
    gates: dict[str, Container] = {}
    bound: dict[str, str] = {}
    broken: set[str] = set()
    #: Pods that another scheduler has bound to nodes on which they do not fit.
    doomed: set[str] = set()
    to_delete = {jobs[3], jobs[9]}
    sizes = {name: chance.choice((3, 4, 6, 8, 12, 16, 20)) for name in jobs}
    #: Maps the jobs whose first pods another scheduler binds to the nodes.
    bypass = dict(zip((jobs[5], jobs[11]), cluster.names, strict=True))
    sizes |= dict.fromkeys(bypass, LARGE_GIB)

    def most_gib(node: str) -> int:
        """Return the free memory on the emptiest healthy device of the node."""
        machine = cluster.machines[node]
        left = {gpu.uuid: gpu.memory_bytes // GIB for gpu in machine.driver.gpus}
        for each in machine.held():
            left[each.device] -= sizes[job_of(each.pod)]
        return max(gib for uuid, gib in left.items() if uuid not in broken)

    def waits_on(node: str, pod: dict[str, Any]) -> bool:
        """Return whether the pod waits on the node and its gate must still block its start."""
        if pod["spec"].get("nodeName") != node or pod["status"]["phase"] != "Pending":
            return False
        received = "".join(g.output for g in gates.values() if g.pod == pod["metadata"]["name"])
        going = "deletionTimestamp" in pod["metadata"]
        return not going and "gate: no: " not in received

    def churn() -> int:
        """End pods that have run long enough. Return the number of finished jobs."""
        listed = cluster.pods()
        # The nodes become full at some time, because the jobs request twice their memory.
        others_to_come = bool(bypass) and done() < count - len(bypass)
        leaving = {
            pod["spec"].get("nodeName") for pod in listed if "deletionTimestamp" in pod["metadata"]
        }
        if to_delete:  # A pod may be ending at this moment.
            leaving.update(cluster.names)
        for pod in listed:
            name, job = pod["metadata"]["name"], pod["metadata"]["labels"]["job"]
            with contextlib.suppress(ApiRefused):  # The pod was deleted meanwhile.
                if "nodeName" in pod["spec"]:
                    bound[name] = pod["spec"]["nodeName"]
                    if job in to_delete:
                        to_delete.remove(job)
                        cluster.plane.call("DELETE", f"{PODS}/{name}")
                elif pod["spec"]["schedulerName"] == "another":
                    node = bypass.get(job)
                    if (
                        node is None or not others_to_come
                    ):  # Bind the pod to a node on which it fits.
                        bind(cluster, name, max(cluster.names, key=most_gib))
                    elif most_gib(node) < LARGE_GIB and node not in leaving:
                        doomed.add(name)
                        bind(cluster, name, node)
                        del bypass[job]
        listed = cluster.pods() if doomed else []
        held = [pod for pod in listed if pod["metadata"]["name"] in doomed]
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
    assert_no_device_was_overcommitted(cluster)
    assert ran_on.keys() == {*jobs}
    listed = cluster.plane.call("GET", f"/api/v1/namespaces/{NAMESPACE}/events")["items"]
    shown = {
        each["involvedObject"]["name"]
        for each in listed
        if each["reason"] == "InsufficientGPUMemory"
    }
    sent_from = {name: node for name, node in bound.items() if name in shown}
    told_no = {gate.pod for gate in gates.values() if "gate: no: " in gate.output}
    # Either the gate or the evicting replica reports a pod first, and memory may be freed in
    # between.
    assert doomed & (told_no | shown)
    # A pod may start although its eviction was decided, because memory can become free in between.
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


def job(cluster: RealCluster, name: str, gib: int, bypasses: bool) -> None:
    """Create a Job with one gated pod. If ``bypasses`` is true, another scheduler binds the pod."""
    template = pod_of("", gib)
    del template["metadata"]["name"]
    template["metadata"]["labels"] = {"job": name}
    template["spec"] |= {"initContainers": [GATE_CONTAINER], "restartPolicy": "Never"}
    if not bypasses:
        template["spec"]["schedulerName"] = SCHEDULER_NAME
    spec = {"template": template, "backoffLimit": 100}
    cluster.plane.call("POST", JOBS, {"metadata": {"name": name}, "spec": spec})


def job_of(pod: str) -> str:
    return pod.rpartition("-")[0]
