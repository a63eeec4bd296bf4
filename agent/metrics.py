"""Metrics of the newest sample and of the agent itself, for /metrics.

Labels have the same names as in dcgm-exporter, except ``model_name``, which dcgm-exporter calls
``modelName`` against Prometheus' conventions. Values are bytes and ratios 0..1. Metrics of devices
are called ``headroom_device_*`` and metrics of pods ``headroom_pod_*``, so no sum counts both. With
MIG, as in dcgm-exporter, ``UUID`` and ``model_name`` belong to the physical GPU, and ``GPU_I_ID``
and ``GPU_I_PROFILE`` identify the GPU instance. Compute instances that share the memory of a GPU
instance are one series.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import get_args

import msgspec
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily, Metric
from prometheus_client.registry import Collector

from headroom.contract.gpunode import (
    Device,
    GPUNodeStatus,
    HealthCode,
    PodUse,
    SmActivity,
)

DEVICE_LABELS = ("gpu", "UUID", "Hostname", "model_name", "GPU_I_ID", "GPU_I_PROFILE")
POD_LABELS = ("namespace", "pod", "container", "pod_uid")
#: Value of a label of ``POD_LABELS`` that is unknown. Prometheus would replace an empty value by
#: the label of the agent's own pod.
_UNKNOWN = "(unknown)"

#: Matches names such as "NVIDIA H100 80GB HBM3 MIG 1g.10gb" and "... MIG 1c.2g.20gb". "1c" in the
#: second name stands for one of two compute slices.
_MIG_NAME = re.compile(r"(?P<model>.*) MIG (?:\d+c\.)?(?P<profile>\d+g\.\d+gb\S*)")

#: The label values and the figure of each series of a metric. A figure that is None or negative is
#: unknown.
_Series = Iterable[tuple[Sequence[str], float | None]]


@dataclass(frozen=True, slots=True)
class Sample:
    """The newest sample."""

    node: str
    status: GPUNodeStatus
    age_s: float
    #: Share of SM time by (pod uid, device), if the driver measures processes.
    pod_sm: Mapping[tuple[str, str], float] = field(default_factory=dict)


class SampleCollector(Collector):
    """Collects the metrics that stay the same until the next sample.

    ``shown`` returns the newest sample, or None before the first sample.
    """

    def __init__(self, shown: Callable[[], Sample | None]) -> None:
        self._shown = shown

    def collect(self) -> Iterator[Metric]:
        if (shown := self._shown()) is not None:
            yield from _agent(shown)
            yield from _devices(shown)
            yield from _pods(shown)


class AgentCollector(Collector):
    """Collects the metrics that can change at any time.

    ``shown`` returns the newest sample, or None before the first sample. ``writes`` counts the
    writes to the API server by (kind, outcome). ``answers`` counts the containers for which the
    kubelet asked for a preferred allocation, by (resource, result), and is None if the agent cannot
    steer.
    """

    def __init__(
        self,
        shown: Callable[[], Sample | None],
        writes: Mapping[tuple[str, str], int],
        answers: Mapping[tuple[str, str], int] | None = None,
    ) -> None:
        self._shown = shown
        self._writes = writes
        self._answers = answers

    def collect(self) -> Iterator[Metric]:
        writes = product(("report", "heartbeat"), ("accepted", "failed"))
        yield _counter(
            "headroom_agent_writes",
            "Reports and heartbeats sent to the API server, by outcome: accepted or failed",
            ("kind", "outcome"),
            ((labels, self._writes.get(labels, 0)) for labels in writes),
        )
        if self._answers is not None:
            yield _counter(
                "headroom_agent_steered",
                "Containers for which the kubelet asked the agent for a preferred allocation, by"
                " result",
                ("resource", "result"),
                sorted(dict(self._answers).items()),
            )
        if (shown := self._shown()) is not None:
            yield _gauge(
                "headroom_agent_sample_age_seconds",
                "Age of the newest sample",
                (),
                [((), shown.age_s)],
            )


def _counter(name: str, text: str, labels: Sequence[str], series: _Series) -> Metric:
    return _filled(CounterMetricFamily(name, text, labels=labels), series)


def _gauge(name: str, text: str, labels: Sequence[str], series: _Series) -> Metric:
    return _filled(GaugeMetricFamily(name, text, labels=labels), series)


def _filled(family: CounterMetricFamily | GaugeMetricFamily, series: _Series) -> Metric:
    """Add the series to a metric, except series with unknown figures."""
    for values, figure in series:
        if figure is not None and figure >= 0:
            family.add_metric(values, figure)
    return family


def _agent(shown: Sample) -> Iterator[Metric]:
    status = shown.status
    versions = {
        "version": status.agent_version,
        "driver_version": status.driver_version,
        "cuda_version": status.cuda_version,
    }
    yield InfoMetricFamily(
        "headroom_agent_build", "Versions of the agent and of the driver", value=versions
    )
    yield _gauge(
        "headroom_agent_source_state",
        "1 for the current state of a source of the report, 0 for the other states",
        ("source", "state"),
        [
            ((source.name, state), source.state == state)
            for source in status.sources
            for state in ("ok", "degraded", "absent")
        ],
    )


#: Metric of a device -> the field of ``Device`` that it shows, and its description.
_DEVICE_FIGURES = {
    "memory_bytes": (
        "memory_bytes",
        "Physical memory of the device, including the driver's reserve",
    ),
    "driver_reserve_bytes": ("reserved_bytes", "Memory of the device that the driver reserves"),
    "used_bytes": ("used_bytes", "Used memory of the device: memory - free - driver reserve"),
    "sm_occupancy_ratio": ("sm_occupancy_ratio", "Share of the SMs' warp slots in use"),
    "utilization_ratio": (
        "utilization_ratio",
        "Share of time in which any kernel ran, which is not SM activity",
    ),
}


def _devices(shown: Sample) -> Iterator[Metric]:
    by_labels: dict[tuple[str, ...], list[Device]] = {}
    for device in shown.status.devices:
        by_labels.setdefault(_labels(shown.node, device), []).append(device)

    def gauge(
        name: str, text: str, series: Callable[[list[Device]], _Series], more: Sequence[str] = ()
    ) -> Metric:
        """Return a metric whose series are computed from the devices of each memory."""
        found = [
            ((*labels, *values), figure)
            for labels, devices in by_labels.items()
            for values, figure in series(devices)
        ]
        return _gauge(f"headroom_device_{name}", text, (*DEVICE_LABELS, *more), found)

    def of_first(field: str) -> Callable[[list[Device]], _Series]:
        return lambda devices: [((), getattr(devices[0], field))]

    for name, (attribute, text) in _DEVICE_FIGURES.items():
        yield gauge(name, text, of_first(attribute))
    yield gauge(
        "unattributed_bytes",
        "Used memory that belongs to no known pod; absent if it cannot be attributed",
        lambda devices: [((), _total(d.unattributed_bytes for d in devices))],
    )
    yield gauge(
        "sm_activity_ratio",
        "Share of SM cycles with a warp assigned, by source of the measurement",
        lambda devices: [((sm.source,), sm.ratio) for sm in _activity(devices)],
        ["source"],
    )
    yield gauge(
        "replicas",
        "Replicas of the device that the plugin advertises, by state: free, allocated or unhealthy;"
        " 1 if it is not shared",
        lambda devices: _replicas(devices).items(),
        ["resource", "sharing", "state"],
    )
    yield gauge(
        "healthy",
        "1 if the device is healthy, so that pods may be placed on it; otherwise 0",
        lambda devices: [((), all(d.healthy for d in devices))],
    )
    yield gauge(
        "unhealthy_reason",
        f"1 for each reason why the device is unhealthy: {', '.join(get_args(HealthCode))}",
        lambda devices: [
            ([code], 1.0) for code in dict.fromkeys(c for d in devices for c in d.health_codes)
        ],
        ["reason"],
    )


def _activity(devices: Sequence[Device]) -> list[SmActivity]:
    sm = devices[0].sm_activity
    return [] if sm is None else [sm]


def _total(figures: Iterable[int | None]) -> int | None:
    """Return the sum of the known figures, or None if no figure is known."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) if known else None


def _replicas(devices: Sequence[Device]) -> Mapping[tuple[str, ...], float]:
    """Return the number of replicas by (resource, sharing, state) on the devices of one memory.

    The plugin advertises the compute instances of one GPU instance separately. Their replicas are
    added up here.
    """
    counts = Counter[tuple[str, ...]]()
    for device in devices:
        if device.resource:  # false if the resource of the device is unknown
            for state, count in msgspec.structs.asdict(device.replicas).items():
                counts[device.resource, device.sharing, state] += count
    return counts


def _pods(shown: Sample) -> Iterator[Metric]:
    devices = {device.uuid: device for device in shown.status.devices}
    labels = (*DEVICE_LABELS, *POD_LABELS)
    used: dict[tuple[str, ...], list[int | None]] = {}
    #: Labels of the pod's first row on a device, by (pod uid, device).
    first: dict[tuple[str, str], tuple[str, ...]] = {}
    #: The first row of each container, by the container's labels. Only this row has peaks.
    first_row: dict[tuple[str, ...], PodUse] = {}
    for row in shown.status.pods:
        if row.device not in devices:
            continue
        pod_labels = _pod_labels(row)
        key = (*_labels(shown.node, devices[row.device]), *pod_labels)
        used.setdefault(key, []).append(row.used_bytes)
        first.setdefault((row.uid, row.device), key)
        first_row.setdefault(key, row)
    yield _gauge(
        "headroom_pod_used_bytes",
        "Device memory that a pod uses, by container. If names of containers cannot be read, the"
        " series of the pod's first container on the device has the sum",
        labels,
        [(key, None if None in figures else _total(figures)) for key, figures in used.items()],
    )
    yield _gauge(
        "headroom_pod_peak_bytes",
        "Maximum memory of a device that a container used since it started, by source of the"
        " measurement",
        (*labels, "source"),
        [
            ((*key, row.peak_source), row.peak_bytes)
            for key, row in first_row.items()
            if row.started_at
        ],
    )
    yield _gauge(
        "headroom_pod_sm_activity_ratio",
        "Share of a device's SM time that the processes of a pod used",
        (*labels, "source"),
        [
            ((*first[pod_device], "nvml-process"), ratio)
            for pod_device, ratio in shown.pod_sm.items()
            if pod_device in first
        ],
    )


def _pod_labels(row: PodUse) -> tuple[str, ...]:
    """Return the values of ``POD_LABELS``."""
    names = (row.namespace, row.name, row.container)
    return (*(name or _UNKNOWN for name in names), row.uid)


def _labels(node: str, device: Device) -> tuple[str, ...]:
    """Return the values of ``DEVICE_LABELS``, which are equal for all devices that share a
    memory."""
    match = _MIG_NAME.fullmatch(device.model) if device.kind == "mig" else None
    instance = "" if device.gpu_instance is None else str(device.gpu_instance)
    uuid = device.parent or device.uuid
    model, profile = (match["model"], match["profile"]) if match else (device.model, "")
    return str(device.index), uuid, node, model, instance, profile
