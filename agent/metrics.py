"""Metrics of the newest sample and of the agent itself, for /metrics.

Label names are those of dcgm-exporter. Values are bytes and ratios 0..1. Devices have
``headroom_device_*`` and pods ``headroom_pod_*``, so no sum counts both. With MIG, as in
dcgm-exporter, ``UUID`` and ``modelName`` are the physical GPU's, and ``GPU_I_ID`` and
``GPU_I_PROFILE`` identify the GPU instance. Compute instances that share its memory are one series.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from contract.gpunode import Device, GPUNodeStatus

DEVICE_LABELS = ("gpu", "UUID", "Hostname", "modelName", "GPU_I_ID", "GPU_I_PROFILE")
POD_LABELS = ("namespace", "pod", "container", "pod_uid")

#: "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "... MIG 1c.2g.20gb": the last is one compute slice of two.
_MIG_NAME = re.compile(r"(?P<model>.*) MIG (?:\d+c\.)?(?P<profile>\d+g\.\d+gb\S*)")

#: (Part of a reason, its code). A reason may have several codes.
_CODES = (
    ("XID ", "xid"),
    ("GPU is lost", "lost"),
    ("requires restart", "reset_required"),
    ("driver asks for", "recovery"),
    ("ECC", "ecc"),
    ("row remap", "remap"),
    ("page retirement", "retirement"),
    ("hangs", "hang"),
    ("takes too long", "hang"),
    ("the driver does not answer", "driver"),
    ("memory", "memory"),
    ("UUID", "identity"),
    ("(NVML ", "nvml"),
)


@dataclass(frozen=True, slots=True)
class Shown:
    """The newest sample."""

    node: str
    status: GPUNodeStatus
    age_s: float
    #: (pod uid, device) -> share of SM time, if the driver measures processes.
    pod_sm: Mapping[tuple[str, str], float] = field(default_factory=dict)


class AgentCollector(Collector):
    """Collects the metrics.

    ``shown`` returns None before the first sample. ``writes`` counts (kind, outcome). ``answers``
    counts (resource, result), and is None if the agent cannot steer.
    """

    def __init__(
        self,
        shown: Callable[[], Shown | None],
        writes: Mapping[tuple[str, str], int],
        answers: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        self._shown = shown
        self._writes = writes
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        yield _writes(self._writes)
        if self._answers is not None:
            yield _steered(self._answers)
        shown = self._shown()
        if shown is None:
            return
        yield GaugeMetricFamily(
            "headroom_agent_sample_age_seconds", "Age of the newest sample", value=shown.age_s
        )
        yield from _agent(shown.status)
        yield from _devices(shown)
        yield from _pods(shown)
        yield from _limits(shown)


def reason_codes(reason: str) -> list[str]:
    """Return the stable codes of a health reason; "other" if no code matches."""
    if not reason:
        return []
    found = [
        next((code for text, code in _CODES if text in part), "") for part in reason.split(";")
    ]
    return list(dict.fromkeys(filter(None, found))) or ["other"]


def profile_of(device: Device) -> str:
    """Return the MIG profile of the GPU instance, such as 1g.10gb; empty for a whole GPU."""
    match = _MIG_NAME.fullmatch(device.model) if device.kind == "mig" else None
    return match["profile"] if match else ""


def _steered(counts: Mapping[tuple[str, str], int]) -> Metric:
    family = CounterMetricFamily(
        "headroom_agent_steered",
        "Containers for which the kubelet asked the agent for a preferred allocation, by result",
        labels=["resource", "result"],
    )
    for (resource, result), count in sorted(dict(counts).items()):
        family.add_metric([resource, result], count)
    return family


def _writes(counts: Mapping[tuple[str, str], int]) -> Metric:
    family = CounterMetricFamily(
        "headroom_agent_writes",
        "Reports and heartbeats sent to the API server, by outcome",
        labels=["kind", "outcome"],
    )
    for kind in ("report", "heartbeat"):
        for outcome in ("accepted", "failed"):
            family.add_metric([kind, outcome], counts.get((kind, outcome), 0))
    return family


def _agent(status: GPUNodeStatus) -> Iterator[Metric]:
    info = InfoMetricFamily("headroom_agent_build", "Versions of the agent and of the driver")
    info.add_metric(
        [],
        {
            "version": status.agent_version,
            "driver_version": status.driver_version,
            "cuda_version": status.cuda_version,
        },
    )
    yield info
    state = GaugeMetricFamily(
        "headroom_agent_source_state",
        "1 for the current state of a source of the report, 0 for the other states",
        labels=["source", "state"],
    )
    for source in status.sources:
        for each in ("ok", "degraded", "absent"):
            state.add_metric([source.name, each], source.state == each)
    yield state


def _devices(shown: Shown) -> Iterator[Metric]:
    by_labels: dict[tuple[str, ...], list[Device]] = {}
    for device in shown.status.devices:
        by_labels.setdefault(_labels(shown.node, device), []).append(device)

    def family(
        name: str,
        text: str,
        figures: Callable[[Sequence[Device]], Iterable[tuple[Sequence[str], float | None]]],
        *more: str,
    ) -> Metric:
        built = GaugeMetricFamily(name, text, labels=[*DEVICE_LABELS, *more])
        for labels, devices in by_labels.items():
            for values, figure in figures(devices):
                if figure is not None and figure >= 0:
                    built.add_metric([*labels, *values], figure)
        return built

    def of_first(
        figure: Callable[[Device], float | None],
    ) -> Callable[[Sequence[Device]], Iterable[tuple[Sequence[str], float | None]]]:
        return lambda devices: [((), figure(devices[0]))]

    yield family(
        "headroom_device_memory_bytes",
        "Physical memory, including the driver's reserve",
        of_first(lambda d: d.memory_bytes),
    )
    yield family(
        "headroom_device_reserved_bytes",
        "Memory reserved by the driver",
        of_first(lambda d: d.reserved_bytes),
    )
    yield family(
        "headroom_device_used_bytes",
        "Used memory: memory - free - reserved",
        of_first(lambda d: d.used_bytes),
    )
    yield family(
        "headroom_device_unattributed_bytes",
        "Used memory that belongs to no known pod; absent if it cannot be attributed",
        lambda devices: [((), _total(d.unattributed_bytes for d in devices))],
    )
    yield family(
        "headroom_device_sm_activity_ratio",
        "Share of SM cycles with a warp assigned, by source of the measurement",
        lambda devices: [
            ([d.sm_activity.source], d.sm_activity.ratio) for d in devices[:1] if d.sm_activity
        ],
        "source",
    )
    yield family(
        "headroom_device_sm_activity_smoothed_ratio",
        "Share of SM cycles with a warp assigned, as an exponential average over about a minute",
        lambda devices: [
            ([d.sm_activity.source], d.sm_activity.smoothed_ratio)
            for d in devices[:1]
            if d.sm_activity
        ],
        "source",
    )
    yield family(
        "headroom_device_sm_occupancy_ratio",
        "Share of the SMs' warp slots in use",
        of_first(lambda d: d.sm_occupancy_ratio),
    )
    yield family(
        "headroom_device_utilization_ratio",
        "Share of time in which any kernel ran, which is not SM activity",
        of_first(lambda d: d.utilization_ratio),
    )
    yield family(
        "headroom_device_replicas",
        "Replicas of the device that the plugin advertises; 1 if it is not shared",
        _replicas,
        *("resource", "sharing", "state"),
    )
    yield family(
        "headroom_device_healthy",
        "1 if the device is healthy, 0 if not",
        lambda devices: [((), all(d.healthy for d in devices))],
    )
    yield family(
        "headroom_device_unhealthy_reason",
        "1 for each reason why the device is unhealthy",
        lambda devices: [
            ([code], 1.0)
            for code in dict.fromkeys(c for d in devices for c in reason_codes(d.health_reason))
        ],
        "reason",
    )


def _replicas(devices: Sequence[Device]) -> Iterable[tuple[Sequence[str], float]]:
    """Yield the replicas by resource, sharing and state. Compute instances of one GPU instance are
    advertised separately, and added up here."""
    counts = Counter[tuple[str, str, str]]()
    for device in devices:
        if not device.resource:  # its resource is not known
            continue
        for state, count in msgspec.structs.asdict(device.replicas).items():
            counts[device.resource, device.sharing, state] += count
    return [(list(labels), float(count)) for labels, count in counts.items()]


def _pods(shown: Shown) -> Iterator[Metric]:
    devices = {device.uuid: device for device in shown.status.devices}
    labels = [*DEVICE_LABELS, *POD_LABELS]
    used: dict[tuple[str, ...], int | None] = {}
    held = Counter[tuple[str, ...]]()
    #: (pod uid, device) -> the labels of the pod's first row there.
    first: dict[tuple[str, str], tuple[str, ...]] = {}
    for row in shown.status.pods:
        if row.device not in devices:
            continue
        pod_labels = (row.namespace, row.name, row.container, row.uid)
        key = (*_labels(shown.node, devices[row.device]), *pod_labels)
        used[key] = _sum(used.get(key, 0), row.used_bytes)
        held[key] += bool(row.replica)
        first.setdefault((row.uid, row.device), key)
    memory = GaugeMetricFamily(
        "headroom_pod_used_bytes",
        "Memory of a device that a pod uses: one series for each pod and device, with the pod's"
        " first container there",
        labels=labels,
    )
    for key, figure in used.items():
        if figure is not None:
            memory.add_metric(key, figure)
    yield memory
    replicas = GaugeMetricFamily(
        "headroom_pod_replicas", "Replicas of a device that a container holds", labels=labels
    )
    for key, count in held.items():
        replicas.add_metric(key, count)
    yield replicas
    sm = GaugeMetricFamily(
        "headroom_pod_sm_activity_ratio",
        "Share of a device's SM time that the processes of a pod used",
        labels=[*labels, "source"],
    )
    for pod_device, ratio in shown.pod_sm.items():
        if pod_device in first:
            sm.add_metric([*first[pod_device], "nvml-process"], ratio)
    yield sm


def _limits(shown: Shown) -> Iterator[Metric]:
    devices = {device.uuid: device for device in shown.status.devices}
    labels = [*DEVICE_LABELS, *POD_LABELS, "container_id"]
    used = GaugeMetricFamily(
        "headroom_container_used_bytes",
        "Memory of a device that a container uses, as counted by the driver (r615 and newer)",
        labels=labels,
    )
    limited = GaugeMetricFamily(
        "headroom_container_limit_bytes",
        "The driver's limits of a container on a device: above soft its memory may be evicted,"
        " allocations beyond hard fail",
        labels=[*labels, "limit"],
    )
    for row in shown.status.limits:
        if row.device not in devices:
            continue
        pod_labels = (row.namespace, row.name, row.container, row.uid, row.container_id)
        key = (*_labels(shown.node, devices[row.device]), *pod_labels)
        used.add_metric(key, row.used_bytes)
        for kind, figure in (("soft", row.soft_bytes), ("hard", row.hard_bytes)):
            if figure is not None:
                limited.add_metric([*key, kind], figure)
    yield used
    yield limited


def _labels(node: str, device: Device) -> tuple[str, ...]:
    match = _MIG_NAME.fullmatch(device.model) if device.kind == "mig" else None
    instance = "" if device.gpu_instance is None else str(device.gpu_instance)
    model = match["model"] if match else device.model
    uuid = device.parent or device.uuid
    return str(device.index), uuid, node, model, instance, profile_of(device)


def _total(figures: Iterable[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other
