"""Measures filter calls for a group of pods while memory is held for the earlier pods of the group.

``python -m benchmarks.groups [pods ...]`` uses 1,000 nodes of 8 GPUs of 80 GiB, and a group whose
pods of 60 GiB need one GPU each. kube-scheduler calls filter for all pods in one cycle, and again
in the next cycles. Its preemption for groups (alpha) repeats the cycle once for each victim. Prints
one line of JSON for each size of the group."""

import json
import statistics
import sys
import time
from collections.abc import Iterator

import msgspec
import structlog

from headroom.contract.kube import Pod, SchedulingGroup
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules
from tests.builders import GIB, gpunode, kube_node, pod, shared
from tests.scheduler.verbs_on import verbs_on

NODES, GPUS = 1_000, 8
CYCLES = 3
NEVER_STALE_S = 1e12


def fleet() -> Iterator[Event]:
    for i in range(NODES):
        devices = [shared(f"{i}-{n}", memory_bytes=80 * GIB) for n in range(GPUS)]
        yield NodeSeen(kube_node(f"n{i}"))
        yield GPUNodeSeen(gpunode(*devices, name=f"n{i}", uid=f"n{i}"), 0.0)


def member(index: int) -> Pod:
    made = pod("60Gi", uid=f"p{index}", name=f"p{index}")
    spec = msgspec.structs.replace(
        made.spec, scheduling_group=SchedulingGroup(pod_group_name="group")
    )
    return msgspec.structs.replace(made, spec=spec)


def measure(pods: int) -> dict[str, object]:
    state = ClusterWriter(Rules(), NEVER_STALE_S, 0.0)
    state.apply(list(fleet()))
    verbs = verbs_on(state, time.monotonic, best_only=True)
    names = [f"n{i}" for i in range(NODES)]
    bodies = [
        msgspec.json.encode({"Pod": msgspec.to_builtins(member(i)), "NodeNames": names})
        for i in range(pods)
    ]
    cycles: list[list[float]] = []
    chosen: list[str] = []
    for _ in range(CYCLES):
        cycles.append([])
        chosen = []
        for body in bodies:
            began_s = time.perf_counter()
            answer = verbs.filter(body)
            cycles[-1].append(1000 * (time.perf_counter() - began_s))
            chosen += json.loads(answer)["NodeNames"]
    return {
        "pods": pods,
        "nodes": NODES,
        "chosen": len(chosen),
        "cycle_ms": [round(sum(each)) for each in cycles],
        "median_ms": [round(statistics.median(each), 2) for each in cycles],
        "slowest_ms": [round(max(each), 2) for each in cycles],
    }


if __name__ == "__main__":
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(50))
    for size in map(int, sys.argv[1:] or ("16", "128", "512")):
        print(json.dumps(measure(size)), flush=True)  # noqa: T201
