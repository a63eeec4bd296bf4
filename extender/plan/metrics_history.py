"""Builds a history from metrics of kube-state-metrics, dcgm-exporter and Headroom.

Pods, their GPUs, nodes and times are from kube-state-metrics. Peaks and SM activity are from
Headroom's agent if it has them, else from dcgm-exporter. GPU utilization is from dcgm-exporter. It
labels a GPU with the pod that holds it, so the GPU's figures are the pod's if GPUs are not shared.
The history lists the assumptions that replace missing metrics.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from contract.dcgm import (
    FREE_BYTES,
    FREE_MIB,
    SM_ACTIVITY,
    USED_BYTES,
    USED_MIB,
    UTILIZATION_PERCENT,
)
from extender.errors import BadSettings
from extender.plan.wording import plural
from extender.plan.workload import History, Life, Machine, workload_name

_REQUESTS = 'kube_pod_container_resource_requests{resource="nvidia_com_gpu"}'
#: The pods whose other metrics matter: those that requested a GPU on that day.
_OF_GPU_PODS = f" and on (namespace, pod) max_over_time({_REQUESTS}[1d])"
MIB = 1 << 20
#: Queries over one day before the time at which they are evaluated.
EACH_DAY: Mapping[str, str] = {
    "gpus": f"max_over_time({_REQUESTS}[1d])",
    "first": f"min_over_time(timestamp({_REQUESTS})[1d:1m])",
    "last": f"max_over_time(timestamp({_REQUESTS})[1d:1m])",
    **{
        name: f"max_over_time({metric}[1d]){_OF_GPU_PODS}"
        for name, metric in (
            ("created", "kube_pod_created"),
            ("started", "kube_pod_start_time"),
            ("completed", "kube_pod_completion_time"),
            ("owner", "kube_pod_owner"),
            ("cpu", 'kube_pod_container_resource_requests{resource="cpu"}'),
            ("memory", 'kube_pod_container_resource_requests{resource="memory"}'),
        )
    },
    "fb_used": f"max_over_time({USED_MIB}[1d])",
    "fb_used_bytes": f"max_over_time({USED_BYTES}[1d])",
    **{f"sm {metric}": f"avg_over_time({metric}[1d])" for metric in SM_ACTIVITY},
    "utilization": f"avg_over_time({UTILIZATION_PERCENT}[1d]) / 100",
    "pod_used": "max_over_time(headroom_pod_used_bytes[1d])",
    "pod_sm": "avg_over_time(headroom_pod_sm_activity_ratio[1d])",
}
#: Queries that are evaluated at the end of the window.
AT_END: Mapping[str, str] = {
    "node": 'kube_node_status_allocatable{resource=~"nvidia_com_gpu|cpu|memory"}',
    "node_labels": "kube_node_labels",
    "fb_total": f"{USED_MIB} + {FREE_MIB}",
    "fb_total_bytes": f"{USED_BYTES} + {FREE_BYTES}",
}
#: A pod whose last sample is older than this has ended.
_GONE_AFTER_S = 300.0
_SHORTEST_S = 1.0
#: Labels that can have the name of the node.
_HOSTS = ("Hostname", "hostname", "node")


@dataclass(frozen=True, slots=True)
class Sample:
    labels: Mapping[str, str]
    value: float


Answers = dict[str, list[Sample]]
#: Namespace, name and, if there is one, uid of a pod.
_Pod = tuple[str, str, str]


def history_of(
    answers: Answers, start_s: float, end_s: float, labels: Mapping[str, str]
) -> History:
    """Build the history between two Unix times.

    ``labels``: those that a node must have. Raises ``BadSettings`` if there are no GPU pods or no
    GPUs.
    """
    notes: list[str] = []
    machines, shared_nodes = _machines(answers, labels, notes)
    lives = list(_Lives(answers, start_s, end_s, {m.name for m in machines}, shared_nodes, notes))
    if not lives:
        raise BadSettings(
            "Prometheus has no pod that requests nvidia.com/gpu in the window: the metric "
            "kube_pod_container_resource_requests of kube-state-metrics is needed. If it exists, "
            "choose a longer window. Example: --window 30d"
        )
    lives.sort(key=lambda life: (life.created_s, life.name))
    first_s = lives[0].created_s
    lives = [replace(life, created_s=life.created_s - first_s) for life in lives]
    return History(tuple(machines), tuple(lives), tuple(notes))


def _machines(
    answers: Answers, labels: Mapping[str, str], notes: list[str]
) -> tuple[list[Machine], set[str]]:
    """Return the nodes with GPUs, and the names of those whose GPUs are shared already."""
    amounts: dict[str, dict[str, float]] = defaultdict(dict)
    for sample in answers["node"]:
        amounts[_label(sample, "node")][sample.labels.get("resource", "")] = sample.value
    gpus: dict[str, dict[str, tuple[str, int]]] = defaultdict(dict)
    for name, unit_bytes in (("fb_total", MIB), ("fb_total_bytes", 1)):
        for sample in answers[name]:
            if not math.isfinite(sample.value):
                continue
            # Since 4.8.3 the exporter's label is in lower case.
            host = next(filter(None, (_label(sample, key) for key in _HOSTS)), "")
            uuid = _label(sample, "UUID")
            model = sample.labels.get("modelName", "GPU")
            gpus[host][uuid] = model, int(sample.value) * unit_bytes
    wanted = {
        sample.labels.get("node", "")
        for sample in answers["node_labels"]
        if all(sample.labels.get(key) == value for key, value in labels.items())
    }
    found: list[Machine] = []
    shared: set[str] = set()
    without = 0
    for name, resources in sorted(amounts.items()):
        count = int(resources.get("nvidia_com_gpu", 0))
        if not count or (labels and name not in wanted):
            continue
        devices = gpus.get(name)
        if not devices:
            without += 1
            continue
        if count > len(devices):
            shared.add(name)
            count = len(devices)
        models = sorted(devices.values())
        cpu, memory = resources.get("cpu"), resources.get("memory")
        found.append(
            Machine(
                name,
                models[0][0],
                count,
                min(size for _, size in models),
                None if cpu is None else round(cpu * 1000),
                None if memory is None else int(memory),
            )
        )
    if without:
        notes.append(
            f"Left out: {plural(without, 'node')} with GPUs but without metrics of dcgm-exporter."
        )
    if not found:
        selected = f" with {_selector(labels)}" if labels else ""
        how = (
            " For --nodes, kube-state-metrics must export node labels: "
            "--metric-labels-allowlist=nodes=[*]"
        )
        raise BadSettings(
            f"Prometheus has no node{selected} with both kube_node_status_allocatable of "
            f"kube-state-metrics and {USED_MIB} or {USED_BYTES} of dcgm-exporter."
            f"{how if labels else ''}"
        )
    return found, shared


class _Lives:
    """Iterates over the lives of pods with a GPU."""

    def __init__(
        self,
        answers: Answers,
        start_s: float,
        end_s: float,
        nodes: set[str],
        shared: set[str],
        notes: list[str],
    ) -> None:
        self._start_s, self._end_s, self._notes = start_s, end_s, notes
        self._nodes, self._shared = nodes, shared
        self._gpus: dict[_Pod, dict[str, int]] = defaultdict(dict)
        self._node: dict[_Pod, str] = {}
        for sample in answers["gpus"]:
            pod = _pod(sample)
            containers = self._gpus[pod]
            name = sample.labels.get("container", "")
            containers[name] = max(containers.get(name, 0), int(sample.value))
            if node := _label(sample, "node"):
                self._node[pod] = node
        self._first = _extreme(answers["first"], min)
        self._last = _extreme(answers["last"], max)
        self._created = _extreme(answers["created"], max)
        self._started = _extreme(answers["started"], max)
        self._completed = _extreme(answers["completed"], max)
        self._owner = {_pod(sample): sample for sample in answers["owner"]}
        self._cpu = _summed(answers["cpu"])
        self._memory = _summed(answers["memory"])
        self._dcgm_used = _most(
            _by_name(answers["fb_used"], MIB), _by_name(answers["fb_used_bytes"], 1)
        )
        self._own_used = _by_name(answers["pod_used"], 1)
        dcgm_sm = [sample for metric in SM_ACTIVITY for sample in answers[f"sm {metric}"]]
        self._utilization = _means(answers["utilization"])
        self._sm = _means(dcgm_sm) | _means(answers["pod_sm"])

    def __iter__(self) -> Iterator[Life]:
        counts: dict[str, int] = defaultdict(int)
        for pod in sorted(self._gpus):
            if pod not in self._node:
                counts["never"] += 1
            elif self._node[pod] not in self._nodes:
                counts["elsewhere"] += 1
            else:
                counts["lives"] += 1
                yield self._life(pod, counts)
        self._notes += _notes(counts)

    def _owner_name(self, pod: _Pod) -> str:
        """Return the name of the pod's controller, else its own."""
        owner = self._owner.get(pod)
        name = owner.labels.get("owner_name", "") if owner else ""
        return pod[1] if name in ("", "<none>") else name

    def _life(self, pod: _Pod, counts: dict[str, int]) -> Life:
        namespace, name, _ = pod
        created_s = self._created.get(pod)
        if created_s is None:
            created_s = self._first.get(pod, self._start_s)
            counts["no creation"] += 1
        started_s = max(created_s, self._started.get(pod, created_s))
        ended_s = self._completed.get(pod)
        last_s = self._last.get(pod, self._end_s)
        if ended_s is None:
            ended_s = last_s
            counts["running"] += last_s > self._end_s - _GONE_AFTER_S
        if created_s < self._start_s:
            counts["before"] += 1
            created_s = self._start_s
            started_s = max(started_s, created_s)
        node = self._node[pod]
        used_bytes = self._own_used.get((namespace, name))
        if used_bytes is None and node not in self._shared:
            used_bytes = self._dcgm_used.get((namespace, name))
        counts["no peak"] += used_bytes is None
        counts["on shared"] += used_bytes is None and node in self._shared
        return Life(
            name=f"{namespace}/{name}",
            workload=workload_name(namespace, self._owner_name(pod)),
            created_s=created_s,
            run_s=max(_SHORTEST_S, ended_s - started_s),
            gpus=max(1, sum(self._gpus[pod].values())),
            request_bytes=None,
            peak_bytes=used_bytes,
            sm_ratio=self._sm.get((namespace, name)),
            utilization_ratio=(
                None if node in self._shared else self._utilization.get((namespace, name))
            ),
            cpu_milli=round(1000 * self._cpu.get(pod, 0.0)),
            host_bytes=int(self._memory.get(pod, 0.0)),
        )


def _notes(counts: Mapping[str, int]) -> Iterator[str]:
    lives = counts["lives"]
    if counts["never"]:
        yield f"Left out: {plural(counts['never'], 'pod')} with a GPU, never bound."
    if counts["elsewhere"]:
        yield (
            f"Left out: {plural(counts['elsewhere'], 'pod')} on nodes that are not selected, are "
            "gone or have no metrics of GPUs."
        )
    if counts["no creation"]:
        yield f"{counts['no creation']:,} pods have no creation time: their first sample counts."
    if counts["before"]:
        yield (
            f"{plural(counts['before'], 'pod')} began before the window, and only the time in it "
            "counts."
        )
    if counts["running"]:
        yield (
            f"{plural(counts['running'], 'pod')} still ran at the end of the window, which counts "
            "as the end."
        )
    if counts["no peak"]:
        shared = ""
        if counts["on shared"]:
            shared = (
                f" {counts['on shared']:,} of them ran on GPUs that are shared already, where "
                "dcgm-exporter has no memory of single pods; Headroom's agent has."
            )
        yield (
            f"{counts['no peak']:,} of {lives:,} pods have no measured peak, and keep whole GPUs."
            f"{shared}"
        )


def _pod(sample: Sample) -> _Pod:
    labels = sample.labels
    return labels.get("namespace", ""), labels.get("pod", ""), labels.get("uid", "")


def _label(sample: Sample, name: str) -> str:
    """Return a label of the exporter, which Prometheus renames if the target has it too."""
    return sample.labels.get(f"exported_{name}") or sample.labels.get(name, "")


def _extreme(samples: Iterable[Sample], best: Callable[[float, float], float]) -> dict[_Pod, float]:
    found: dict[_Pod, float] = {}
    for sample in samples:
        pod, value = _pod(sample), sample.value
        if math.isfinite(value) and value > 0:
            found[pod] = best(found.get(pod, value), value)
    return found


def _summed(samples: Iterable[Sample]) -> dict[_Pod, float]:
    """Return the sum over the containers of each pod."""
    most: dict[_Pod, dict[str, float]] = defaultdict(dict)
    for sample in samples:
        containers, name = most[_pod(sample)], sample.labels.get("container", "")
        containers[name] = max(containers.get(name, 0.0), sample.value)
    return {pod: sum(containers.values()) for pod, containers in most.items()}


def _by_name(samples: Iterable[Sample], unit_bytes: int) -> dict[tuple[str, str], int]:
    """Return the largest value of each pod, in bytes; samples without a pod are left out."""
    found: dict[tuple[str, str], int] = {}
    for sample in samples:
        key = _label(sample, "namespace"), _label(sample, "pod")
        if key[1] and math.isfinite(sample.value) and sample.value >= 0:
            found[key] = max(found.get(key, 0), int(sample.value * unit_bytes))
    return found


def _most(*found: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """Return the largest value of each pod."""
    return {key: max(each.get(key, 0) for each in found) for key in {*chain(*found)}}


def _means(samples: Iterable[Sample]) -> dict[tuple[str, str], float]:
    """Return the mean ratio of each pod over its days and GPUs."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in samples:
        key = _label(sample, "namespace"), _label(sample, "pod")
        if key[1] and 0 <= sample.value <= 1:
            found[key].append(sample.value)
    return {key: sum(values) / len(values) for key, values in found.items()}


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())
