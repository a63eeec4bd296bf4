"""The metrics of a simulated cluster, as kube-state-metrics and dcgm-exporter export them.

Pods get the first free GPUs of the first node that has enough of them, unshared. A pod that finds
none waits. The lines are OpenMetrics with timestamps, for `promtool tsdb create-blocks-from
openmetrics`.
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from benchmarks.plan.generated import GPU_MIB, GPUS_OF_NODE, MODEL, Row
from headroom.contract.dcgm import (
    FREE_BYTES,
    FREE_MIB,
    SM_ACTIVITY,
    USED_BYTES,
    USED_MIB,
    UTILIZATION_PERCENT,
)

#: Interval of the samples.
EVERY_S = 60
#: Nodes and idle GPUs have samples for this time, as a plan reads them at its end.
SHOWN_S = 600
_KSM = 'job="kube-state-metrics",instance="10.0.0.1:8080"'
_IDLE_MIB = 3
#: Kernels seldom use all SMs, so the time with kernels is longer than the SM activity.
_UTILIZATION_OF_SM = 1.5
NAMESPACE = "ml"


@dataclass(frozen=True, slots=True)
class Ran:
    """One pod on its node. Times are in seconds of the history."""

    row: Row
    node: int
    gpus: tuple[int, ...]
    started_s: int

    @property
    def ended_s(self) -> int:
        return self.started_s + self.row.ended_s - self.row.created_s


def play(rows: Sequence[Row], nodes: int) -> list[Ran]:
    """Run the pods unshared, first come, first served. The result is in the order of their starts.

    Raises ``ValueError`` if a pod has more GPUs than a node.
    """
    free = [list(range(GPUS_OF_NODE)) for _ in range(nodes)]
    ends: list[tuple[int, int]] = []
    found: list[Ran] = []
    now_s = 0
    for row in rows:
        now_s = max(now_s, row.created_s)
        if row.gpus > GPUS_OF_NODE:
            raise ValueError(f"{row.name} has more GPUs than a node")
        while True:
            while ends and ends[0][0] <= now_s:
                ended = found[heapq.heappop(ends)[1]]
                free[ended.node] = sorted([*free[ended.node], *ended.gpus])
            node = next((n for n, gpus in enumerate(free) if len(gpus) >= row.gpus), None)
            if node is not None:
                break
            now_s = ends[0][0]
        gpus, free[node] = tuple(free[node][: row.gpus]), free[node][row.gpus :]
        found.append(Ran(row, node, gpus, now_s))
        heapq.heappush(ends, (found[-1].ended_s, len(found) - 1))
    return found


def lines(
    ran: Sequence[Ran], nodes: int, start_s: float, end_s: float, longer_s: float = 0.0
) -> Iterator[str]:
    """Yield all samples between two Unix times. Second 0 of the history is ``start_s``.

    Nodes and idle GPUs have samples from ten minutes before ``end_s`` to ``longer_s`` after it.
    """
    for number in range(nodes):
        for line in node_series(number):
            yield from repeated(line, end_s - SHOWN_S, end_s + longer_s)
    for each in ran:
        for line in pod_series(each, start_s):
            yield from repeated(line, *life(each, start_s, end_s))
    yield from dcgm_lines(ran, nodes, start_s, end_s, longer_s)


def dcgm_lines(
    ran: Sequence[Ran], nodes: int, start_s: float, end_s: float, longer_s: float = 0.0
) -> Iterator[str]:
    """Yield only the samples of dcgm-exporter."""
    for number in range(nodes):
        for gpu in range(GPUS_OF_NODE):
            labels = dcgm(number, gpu)
            ends = (r.ended_s for r in ran if r.node == number and gpu in r.gpus)
            busy_s = (min(start_s + end, end_s) + EVERY_S for end in ends)
            since_s, until_s = max([end_s - SHOWN_S, *busy_s]), end_s + longer_s
            free = GPU_MIB - _IDLE_MIB
            used, unused, unit, _ = _names(number)
            yield from _series(used, labels, _IDLE_MIB * unit, since_s, until_s)
            yield from _series(unused, labels, free * unit, since_s, until_s)
    for each in ran:
        yield from _dcgm_of_pod(each, *life(each, start_s, end_s))


def life(ran: Ran, start_s: float, end_s: float) -> tuple[float, float]:
    """Return when the samples of a pod begin and end."""
    return start_s + ran.started_s, min(start_s + ran.ended_s, end_s)


def repeated(line: str, since_s: float, until_s: float) -> Iterator[str]:
    """Yield the samples of a line of kube-state-metrics, ``name{labels} value``, as Prometheus
    stores them."""
    series, _, value = line.rpartition(" ")
    series = f"{series.removesuffix('}')},{_KSM}}}"
    for at_s in _times(since_s, until_s):
        yield f"{series} {value} {at_s:.3f}"


def node_series(number: int) -> Iterator[str]:
    """Yield the lines of kube-state-metrics for a node, ``name{labels} value``."""
    name = node_name(number)
    for resource, value in (("nvidia_com_gpu", GPUS_OF_NODE), ("cpu", 64), ("memory", 512 << 30)):
        yield f'kube_node_status_allocatable{{node="{name}",resource="{resource}"}} {value}'
    yield f'kube_node_labels{{node="{name}",label_pool="{"a" if number % 2 == 0 else "b"}"}} 1'


def pod_series(ran: Ran, start_s: float) -> Iterator[str]:
    """Yield the lines of kube-state-metrics for a pod, ``name{labels} value``."""
    row = ran.row
    pod = f'namespace="{NAMESPACE}",pod="{row.name}",uid="{row.name}"'
    own = f'{pod},container="main",node="{node_name(ran.node)}"'
    amounts = {"nvidia_com_gpu": 1, "cpu": 4, "memory": 16 << 30}
    for resource, each in amounts.items():
        labels = f'{own},resource="{resource}"'
        yield f"kube_pod_container_resource_requests{{{labels}}} {each * row.gpus}"
    yield f"kube_pod_created{{{pod}}} {round(start_s + row.created_s)}"
    yield f"kube_pod_start_time{{{pod}}} {round(start_s + ran.started_s)}"
    owner = f'{pod},owner_kind="ReplicaSet",owner_name="{row.workload}-6d4b75cb6d"'
    yield f"kube_pod_owner{{{owner}}} 1"


def _dcgm_of_pod(ran: Ran, since_s: float, until_s: float) -> Iterator[str]:
    row, times = ran.row, list(_times(since_s, until_s))
    for gpu in ran.gpus:
        labels = f'{dcgm(ran.node, gpu)},exported_namespace="{NAMESPACE}",exported_pod="{row.name}"'
        # The pod reaches its peak once, in the middle of its life.
        used, unused, unit, sm = _names(ran.node)
        for name, low, high in (
            (used, row.peak_mib * 6 // 10, row.peak_mib),
            (unused, GPU_MIB - row.peak_mib * 6 // 10, GPU_MIB - row.peak_mib),
        ):
            for number, at_s in enumerate(times):
                value = high if number == len(times) // 2 else low
                yield f"{name}{{{labels}}} {value * unit} {at_s:.3f}"
        yield from _series(sm, labels, row.sm_ratio, since_s, until_s)
        percent = min(100.0, 100 * row.sm_ratio * _UTILIZATION_OF_SM)
        yield from _series(UTILIZATION_PERCENT, labels, percent, since_s, until_s)


def _names(node: int) -> tuple[str, str, int, str]:
    """Return the metrics of used and free memory, their unit, and the metric of SM activity.

    Every second node runs dcgm-exporter 4.9.0.
    """
    if node % 2:
        return USED_BYTES, FREE_BYTES, 1 << 20, SM_ACTIVITY[1]
    return USED_MIB, FREE_MIB, 1, SM_ACTIVITY[0]


def node_name(number: int) -> str:
    return f"node-{number:02d}"


def dcgm(node: int, gpu: int) -> str:
    """Return the labels of a GPU and of the exporter that reports it."""
    name, host = node_name(node), "hostname" if node % 2 else "Hostname"
    return (
        f'gpu="{gpu}",UUID="GPU-{name}-{gpu}",modelName="{MODEL}",{host}="{name}",'
        f'namespace="gpu-operator",pod="dcgm-exporter-{node}",job="dcgm"'
    )


def _times(since_s: float, until_s: float) -> Iterator[float]:
    at_s = since_s
    while at_s <= until_s:
        yield at_s
        at_s += EVERY_S


def _series(name: str, labels: str, value: float, since_s: float, until_s: float) -> Iterator[str]:
    for at_s in _times(since_s, until_s):
        yield f"{name}{{{labels}}} {value} {at_s:.3f}"
