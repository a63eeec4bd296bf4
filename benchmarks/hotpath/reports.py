"""Measures the cost of one report by fleet size. The cost should not depend on the size."""

import itertools
import statistics
import time

import msgspec
import numpy as np

from benchmarks.hotpath.fleet import GIB, MIB, Fleet
from headroom.contract.kube import Node, ObjectMeta, Pod
from headroom.contract.watched import GPUNodeSeen, Relisted
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.policy import Rules

_REPORTS = 300


class Report(msgspec.Struct):
    """The cost in this process, in which nothing else runs."""

    nodes: int
    #: Time to apply a report, which weighs the node.
    weighed_p50_us: float
    #: Time for the snapshot after it.
    snapshot_p50_us: float
    snapshot_p99_us: float


def cost_of_reports(nodes: int, pods_per_device: int = 2) -> Report:
    fleet = Fleet(nodes, pods_per_device)
    state = ClusterWriter(Rules(), 1e9, time.time() - time.monotonic())
    pods = tuple(pod for name in fleet.names for pod in fleet.kube_pods(name))
    state.apply([Relisted(Node, tuple(map(fleet.kube_node, fleet.names)), 0.0)])
    state.apply([Relisted(Pod, pods, 0.0)])
    state.apply([GPUNodeSeen(fleet.gpunode(name), 0.0) for name in fleet.names])
    state.cluster.snapshot()
    weighed, shown = list[int](), list[int]()
    versions = itertools.count(1)
    for number in range(_REPORTS):
        grows_bytes = 64 * MIB * (number % 8 + 1)
        for more_bytes in (grows_bytes, 2 * GIB, 0):
            event = _report(fleet, number, next(versions), more_bytes)
            began = time.perf_counter_ns()
            state.apply([event])
            applied = time.perf_counter_ns()
            state.cluster.snapshot()
            weighed.append(applied - began)
            shown.append(time.perf_counter_ns() - applied)
    return Report(
        nodes=nodes,
        weighed_p50_us=round(statistics.median(weighed) / 1e3, 1),
        snapshot_p50_us=round(statistics.median(shown) / 1e3, 1),
        snapshot_p99_us=round(float(np.percentile(shown, 99)) / 1e3, 1),
    )


def _report(fleet: Fleet, number: int, version: int, more_bytes: int) -> Event:
    name = fleet.names[number * 7919 % len(fleet.names)]
    gpunode = fleet.gpunode(name)
    metadata = ObjectMeta(name=name, uid=gpunode.metadata.uid, resource_version=str(version))
    status = fleet.status(name, more_bytes)
    return GPUNodeSeen(msgspec.structs.replace(gpunode, metadata=metadata, status=status), 0.0)
