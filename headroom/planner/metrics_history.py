"""Builds a history from metrics of kube-state-metrics, dcgm-exporter and Headroom.

Pods, their GPUs, nodes and times come from kube-state-metrics. Peaks and SM activity come from
Headroom's agent if it has them, otherwise from dcgm-exporter. GPU utilization comes from
dcgm-exporter, which labels a GPU with the pod that holds it, or repeats its figures for each pod.
So these figures belong to the pod only if GPUs are not shared. The history lists the assumptions
that replace missing metrics."""

import math
import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain

from headroom.contract.dcgm import SM_ACTIVITY, USED_BYTES, USED_MIB, Key, key_of_series
from headroom.errors import BadSettings
from headroom.planner.wording import plural, skipped
from headroom.planner.workload import DAY_S, History, Life, Machine, workload_name
from headroom.runtime.metric_history import Answers, Asked, Reading, Sample, measurements, read_days
from headroom.runtime.promql import HOSTS, MIB, MODELS, MOST_RATIO, TOTALS, Queries, own_label

#: A pod counts as ended if its last sample is older than this.
_GONE_AFTER_S = 300.0
_SHORTEST_S = 1.0
#: Resources of nodes that are not GPUs.
_OF_HOSTS = {"cpu", "memory"}
#: The profile of a MIG resource, as kube-state-metrics names it.
_MIG = re.compile(r"_mig_(?:\dc_)?\dg_(?P<gib>\d+)gb")
#: (namespace, name, uid) of a pod. The uid is "" if there is none.
_Pod = tuple[str, str, str]


def reading(
    queries: Queries, days: int, end_s: float, labels: Mapping[str, str]
) -> Reading[History]:
    """Return the history of ``days`` days before a Unix time. See ``history_of``."""
    totals = queries.totals(days)
    answers = yield from read_days(totals, queries.lives, queries.use, days, end_s)
    for name, promql in queries.nodes.items():
        answers[name] = measurements((yield Asked(promql, end_s)))
    return history_of(answers, end_s - days * DAY_S, end_s, labels)


def history_of(
    answers: Answers, start_s: float, end_s: float, labels: Mapping[str, str]
) -> History:
    """Build the history between two Unix times.

    ``labels`` are the labels that a node must have. Raises ``BadSettings`` if there are no GPU pods
    or no GPUs.
    """
    notes: list[str] = []
    machines, shared_nodes = _machines(answers, labels, notes)
    found = _Lives(answers, start_s, end_s, {m.name for m in machines}, shared_nodes, notes)
    lives = list(found)
    if not lives:
        raise BadSettings(
            "Prometheus has no pod that requests a GPU in the window: the metric "
            "kube_pod_container_resource_requests of kube-state-metrics is needed. If it exists, "
            "choose a longer window, or name the resource if yours has another name. Example: "
            "--window 30d --resource nvidia.com/a100"
        )
    lives.sort(key=lambda life: (life.created_s, life.name))
    first_s = lives[0].created_s
    lives = [replace(life, created_s=life.created_s - first_s) for life in lives]
    return History(tuple(machines), tuple(lives), tuple(notes), skipped=found.skipped)


def _machines(
    answers: Answers, labels: Mapping[str, str], notes: list[str]
) -> tuple[list[Machine], set[str]]:
    """Return the nodes with GPUs, and the names of nodes whose GPUs are shared already."""
    amounts: dict[str, dict[str, float]] = defaultdict(dict)
    for sample in answers["node"]:
        resource = sample.labels.get("resource", "")
        amounts[own_label(sample.labels, "node")][resource] = sample.value
    gpus = _gpus(answers, amounts.keys())
    wanted = {
        own_label(sample.labels, "node")
        for sample in answers["node_labels"]
        if all(sample.labels.get(key) == value for key, value in labels.items())
    }
    found: list[Machine] = []
    shared: set[str] = set()
    without: list[str] = []
    for name, resources in sorted(amounts.items()):
        offered = {each: int(resources[each]) for each in resources.keys() - _OF_HOSTS}
        count = sum(offered.values())
        if not count or (labels and name not in wanted):
            continue
        devices = gpus.get(name)
        if not devices:
            without.append(name)
            continue
        if count > sum(gpu.devices for gpu in devices):
            shared.add(name)
        if any(amount and _MIG.search(each) for each, amount in offered.items()):
            count = len(devices)  # a MIG instance is not a GPU
        cpu, memory = resources.get("cpu"), resources.get("memory")
        found.append(
            Machine(
                name,
                min(gpu.model for gpu in devices),
                min(count, len(devices)),
                min(gpu.memory_bytes for gpu in devices),
                None if cpu is None else round(cpu * 1000),
                None if memory is None else int(memory),
            )
        )
    notes += skipped("node", "with GPUs but without metrics of dcgm-exporter", without)
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


@dataclass(slots=True)
class _Gpu:
    model: str
    #: The memory of the GPU. With MIG, this is the sum over its MIG devices.
    memory_bytes: int = 0
    #: Number of MIG devices of the GPU, or 1 without MIG.
    devices: int = 0


def _gpus(answers: Answers, nodes: Collection[str]) -> dict[str, list[_Gpu]]:
    """Return the GPUs of each node at the end of the window, with their usual memory."""
    sizes: dict[Key, int] = {}
    for name, unit_bytes in TOTALS.items():
        for sample in answers[name]:
            if (key := key_of_series(sample.labels)) is not None:
                sizes[key] = int(sample.value) * unit_bytes
    found: dict[str, dict[str, _Gpu]] = defaultdict(dict)
    seen = {key: each for each in answers["devices"] if (key := key_of_series(each.labels))}
    cut = {uuid for uuid, instance in seen if instance is not None}
    of_pods = _nodes_of_exporters(answers)
    for (uuid, instance), sample in seen.items():
        size_bytes = sizes.get((uuid, instance))
        if size_bytes is None or (instance is None and uuid in cut):
            continue
        hosts, models = _labels(sample, HOSTS), _labels(sample, MODELS)
        named = [host for host in hosts if host in nodes]
        node = next(iter(named), "") or next((of_pods[h] for h in hosts if h in of_pods), "")
        gpu = found[node].setdefault(uuid, _Gpu(next(iter(models), "GPU")))
        gpu.memory_bytes += size_bytes
        gpu.devices += 1
    return {host: list(gpus.values()) for host, gpus in found.items()}


def _nodes_of_exporters(answers: Answers) -> dict[str, str]:
    """Map each host in the samples of an exporter to the node of all pods that use its GPUs.

    The host is the name of the exporter's pod if its environment lacks NODE_NAME.
    """
    nodes_of: dict[tuple[str, str], set[str]] = defaultdict(set)
    for sample in answers["gpus"]:
        if node := own_label(sample.labels, "node"):
            nodes_of[_name(sample)].add(node)
    found: dict[str, set[str]] = defaultdict(set)
    for sample in chain(answers["fb_used"], answers["fb_used_bytes"]):
        nodes = nodes_of.get(_name(sample), ())
        for host in _labels(sample, HOSTS) if len(nodes) == 1 else ():
            found[host].update(nodes)
    return {host: next(iter(nodes)) for host, nodes in found.items() if len(nodes) == 1}


def _labels(sample: Sample, names: Iterable[str]) -> list[str]:
    """Return the values of the labels with these names that the sample has."""
    return [text for name in names if (text := own_label(sample.labels, name))]


class _Lives:
    """Yields the lives of pods with a GPU."""

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
        #: Sentences about the pods that were left out, after the iteration.
        self.skipped: tuple[str, ...] = ()
        self._nodes, self._shared = nodes, shared
        self._gpus: dict[_Pod, dict[str, int]] = defaultdict(dict)
        self._node: dict[_Pod, str] = {}
        self._instance_bytes: dict[_Pod, int] = {}
        for sample in answers["gpus"]:
            pod = _pod(sample)
            containers = self._gpus[pod]
            name = own_label(sample.labels, "container")
            containers[name] = max(containers.get(name, 0), int(sample.value))
            if node := own_label(sample.labels, "node"):
                self._node[pod] = node
            if profile := _MIG.search(sample.labels.get("resource", "")):
                self._instance_bytes[pod] = int(profile["gib"]) << 30
        nodes_of: dict[tuple[str, str], set[str]] = defaultdict(set)
        for (namespace, name, _), node in self._node.items():
            nodes_of[namespace, name].add(node)
        self._first = _extreme(answers["first"], min)
        self._last = _extreme(answers["last"], max)
        self._created = _extreme(answers["created"], max)
        self._started = _extreme(answers["started"], max)
        self._completed = _extreme(answers["completed"], max)
        self._owner = {_pod(sample): sample for sample in answers["owner"]}
        self._cpu = _summed(answers["cpu"])
        self._memory = _summed(answers["memory"])
        alone = {
            name: [each for each in answers[name] if not own_label(each.labels, "vgpu")]
            for name in (
                "fb_used",
                "fb_used_bytes",
                "utilization",
                *map("sm {}".format, SM_ACTIVITY),
            )
        }
        self._dcgm_used = _most(
            _by_name(alone["fb_used"], MIB), _by_name(alone["fb_used_bytes"], 1)
        )
        self._dcgm_sm = _means(chain(*(alone[f"sm {metric}"] for metric in SM_ACTIVITY)))
        self._utilization = _means(alone["utilization"], unit=100)
        own_used, own_sm = (
            [each for each in answers[name] if _may_be_on(each, nodes_of.get(_name(each), ()))]
            for name in ("pod_used", "pod_sm")
        )
        self._own_used, self._own_sm = _by_name(own_used, 1), _means(own_sm)

    def __iter__(self) -> Iterator[Life]:
        counts: dict[str, int] = defaultdict(int)
        never: list[str] = []
        elsewhere: list[str] = []
        for pod in sorted(self._gpus):
            namespace, name, _ = pod
            if pod not in self._node:
                never.append(f"{namespace}/{name}")
            elif self._node[pod] not in self._nodes:
                elsewhere.append(f"{namespace}/{name} on {self._node[pod]}")
            else:
                counts["lives"] += 1
                yield self._life(pod, counts)
        self._notes += _notes(counts)
        gone = "on nodes that are not selected, are gone or have no metrics of GPUs"
        self.skipped = (
            *skipped("pod", "with a GPU that never started", never),
            *skipped("pod", gone, elsewhere),
        )

    def _owner_name(self, pod: _Pod) -> str:
        """Return the name of the pod's controller, or the pod's own name if it has none."""
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
        key, is_shared = (namespace, name), node in self._shared
        used_bytes, sm_ratio = self._own_used.get(key), self._own_sm.get(key)
        if not is_shared:
            used_bytes = self._dcgm_used.get(key) if used_bytes is None else used_bytes
            sm_ratio = self._dcgm_sm.get(key) if sm_ratio is None else sm_ratio
        counts["no peak"] += used_bytes is None
        counts["on shared"] += used_bytes is None and is_shared
        return Life(
            name=f"{namespace}/{name}",
            workload=workload_name(namespace, self._owner_name(pod)),
            created_s=created_s,
            run_s=max(_SHORTEST_S, ended_s - started_s),
            gpus=max(1, sum(self._gpus[pod].values())),
            request_bytes=self._instance_bytes.get(pod),
            peak_bytes=used_bytes,
            sm_ratio=sm_ratio,
            utilization_ratio=None if is_shared else self._utilization.get(key),
            cpu_milli=round(1000 * self._cpu.get(pod, 0.0)),
            host_bytes=int(self._memory.get(pod, 0.0)),
        )


def _notes(counts: Mapping[str, int]) -> Iterator[str]:
    lives = counts["lives"]
    if counts["no creation"]:
        yield (
            f"{counts['no creation']:,} pods have no creation time, so the time of their first "
            "sample counts."
        )
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
    return (*_name(sample), own_label(sample.labels, "uid"))


def _may_be_on(sample: Sample, nodes: Collection[str]) -> bool:
    """Return whether the target's own label ``node``, if it has one, is a node of the pod.

    Without this check, a node could report the use of pods on other nodes.
    """
    node = sample.labels.get("node")
    return not node or node in nodes


def _name(sample: Sample) -> tuple[str, str]:
    return own_label(sample.labels, "namespace"), own_label(sample.labels, "pod")


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
        containers, name = most[_pod(sample)], own_label(sample.labels, "container")
        containers[name] = max(containers.get(name, 0.0), sample.value)
    return {pod: sum(containers.values()) for pod, containers in most.items()}


def _by_name(samples: Iterable[Sample], unit_bytes: int) -> dict[tuple[str, str], int]:
    """Return the largest value of each pod in bytes. Samples without a pod are left out."""
    found: dict[tuple[str, str], int] = {}
    for sample in samples:
        key = _name(sample)
        if key[1] and math.isfinite(sample.value) and sample.value >= 0:
            found[key] = max(found.get(key, 0), int(sample.value * unit_bytes))
    return found


def _most(*found: Mapping[tuple[str, str], int]) -> dict[tuple[str, str], int]:
    """Return the largest value of each pod."""
    return {key: max(each.get(key, 0) for each in found) for key in {*chain(*found)}}


def _means(samples: Iterable[Sample], unit: float = 1) -> dict[tuple[str, str], float]:
    """Return the mean ratio of each pod over its days and GPUs. Samples are divided by ``unit``."""
    found: dict[tuple[str, str], list[float]] = defaultdict(list)
    for sample in samples:
        key, ratio = _name(sample), sample.value / unit
        if key[1] and 0 <= ratio <= MOST_RATIO:
            found[key].append(min(ratio, 1.0))
    return {key: sum(values) / len(values) for key, values in found.items()}


def _selector(labels: Mapping[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in labels.items())
