"""Reads an exposition of dcgm-exporter, and compares its memory figures with NVML's. Pure.

The exporter may repeat a device's series for each pod that shares it (KUBERNETES_VIRTUAL_GPUS), and
some of these contain figures of single pods. So series of one device are never added up. A series
without a pod label is the device's. If all series have one, the largest value counts.

MIG series have the UUID of the whole GPU and the number of the GPU instance. The label Hostname
(hostname since 4.8.3) is not used, because the UUID identifies the device.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import chain
from typing import TYPE_CHECKING, Any

from agent.probes.readings import ActivityReading, DeviceReading
from agent.probes.sm_activity import ratio
from contract.dcgm import (
    FREE_BYTES,
    FREE_MIB,
    SM_ACTIVITY,
    USED_BYTES,
    USED_MIB,
    Key,
    key_of_series,
    label,
)
from contract.quantity import MAX_DEVICE_BYTES

if TYPE_CHECKING:
    from prometheus_client.samples import Sample

_MIB = 1 << 20
#: Values that DCGM uses for a missing figure: the blank of 32-bit integers and of doubles, each
#: with three variants for the reason, and that of 64-bit integers. Exporters before 2.4 export
#: them. A real figure never has such a value.
_BLANKS = {*(0x7FFFFFF0 + why for why in range(4)), *(2.0**47 + why for why in range(4)), 2.0**63}
_MOST_XID = 1 << 16
#: Errors that the parser raises for a malformed exposition.
_NOT_READ = (ValueError, LookupError, OverflowError)
#: Maximum age of DCGM's figures: its collection interval, our scrape interval, and a margin.
_WINDOW_S = 60.0
#: Largest difference that rounding three figures to MiB and the time between two calls can cause.
_TOLERANCE_BYTES = 64 << 20
#: Consecutive scrapes that must disagree: a peak between two of our samples is no disagreement.
_IN_A_ROW = 3


@dataclass(frozen=True, slots=True)
class DcgmReading:
    """Figures of one GPU or GPU instance; None if missing or invalid."""

    uuid: str
    #: Number of the GPU instance; None for the whole GPU.
    gpu_instance: int | None
    sm_ratio: float | None = None
    occupancy_ratio: float | None = None
    engine_ratio: float | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    total_bytes: int | None = None
    #: The last XID; the exporter keeps it until it restarts.
    xid: int | None = None

    @property
    def key(self) -> Key:
        return self.uuid, self.gpu_instance


def _bytes(figure: float, unit_bytes: int = 1) -> int | None:
    """Convert a figure to bytes; None if it is invalid."""
    if not math.isfinite(figure) or not 0 <= figure * unit_bytes <= MAX_DEVICE_BYTES:
        return None
    return round(figure) * unit_bytes


def _mebibytes(figure: float) -> int | None:
    """Convert MiB to bytes; None if the figure is invalid."""
    return _bytes(figure, _MIB)


def _xid(number: float) -> int | None:
    """Return the number of an XID; None if it is invalid."""
    whole = math.isfinite(number) and 0 <= number < _MOST_XID and number == int(number)
    return int(number) if whole else None


#: Metric -> field of ``DcgmReading``, and the conversion to its unit. The second half has the names
#: since 4.9.0.
_METRICS: Mapping[str, tuple[str, Callable[[float], float | int | None]]] = {
    SM_ACTIVITY[0]: ("sm_ratio", ratio),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("occupancy_ratio", ratio),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("engine_ratio", ratio),
    USED_MIB: ("used_bytes", _mebibytes),
    FREE_MIB: ("free_bytes", _mebibytes),
    "DCGM_FI_DEV_FB_RESERVED": ("reserved_bytes", _mebibytes),
    "DCGM_FI_DEV_FB_TOTAL": ("total_bytes", _mebibytes),
    "DCGM_FI_DEV_XID_ERRORS": ("xid", _xid),
    SM_ACTIVITY[1]: ("sm_ratio", ratio),
    "DCGM_FI_PROF_SM_OCCUPANCY_RATIO": ("occupancy_ratio", ratio),
    "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": ("engine_ratio", ratio),
    USED_BYTES: ("used_bytes", _bytes),
    FREE_BYTES: ("free_bytes", _bytes),
    "DCGM_FI_DEV_FB_RESERVED_BYTES": ("reserved_bytes", _bytes),
    "DCGM_FI_DEV_FB_CAPACITY_BYTES": ("total_bytes", _bytes),
    "DCGM_FI_DEV_XID_ERROR": ("xid", _xid),
}
#: Label names that exporters and relabelling rules use for the pod.
_PODS = ("pod", "pod_name", "exported_pod")


def parse(text: str) -> tuple[list[DcgmReading], int]:
    """Return the figures of every device, and the number of lines that could not be used.

    Values that DCGM uses for a missing figure are ignored and not counted.
    """
    lines = [line for line in text.splitlines() if line.partition("{")[0].strip() in _METRICS]
    samples, bad = _samples(lines)
    #: device -> field -> (whether the series has no pod, value) of each series
    found: dict[Key, dict[str, list[tuple[bool, float]]]] = {}
    for sample in samples:
        try:
            blank = float(sample.value) in _BLANKS
        except OverflowError:  # the parser returns integers of any size
            bad += 1
            continue
        if blank:
            continue
        key = key_of_series(sample.labels)
        field, convert = _METRICS[sample.name]
        value = convert(sample.value)
        if key is None or value is None:
            bad += 1
            continue
        alone = not label(sample.labels, _PODS)
        found.setdefault(key, {}).setdefault(field, []).append((alone, value))
    readings = []
    for (uuid, instance), series in found.items():
        # max prefers a series without a pod, then the largest value.
        figures: dict[str, Any] = {name: max(values)[1] for name, values in series.items()}
        readings.append(DcgmReading(uuid, instance, **figures))
    return readings, bad


def _samples(lines: list[str]) -> tuple[list["Sample"], int]:
    """Return the samples of all valid lines, and the number of malformed lines."""
    try:
        return _parsed(lines), 0
    except _NOT_READ:
        pass
    # A malformed line must not hide the others.
    good: list[Sample] = []
    bad = 0
    for line in lines:
        try:
            good += _parsed([line])
        except _NOT_READ:
            bad += 1
    return good, bad


def _parsed(lines: Iterable[str]) -> list["Sample"]:
    # Without an exporter, an agent need not import the parser.
    from prometheus_client.parser import text_string_to_metric_families

    families = text_string_to_metric_families("\n".join(lines) + "\n")
    return [s for s in chain.from_iterable(f.samples for f in families) if s.name in _METRICS]


@dataclass(slots=True)
class CrossCheck:
    """Compares DCGM's memory figures with NVML's."""

    #: (GPU, instance) -> (time last seen, bytes used with the driver's reserve) of NVML's figures
    #: within ``_WINDOW_S``.
    _used: dict[Key, deque[tuple[float, int]]] = field(default_factory=dict)
    #: (GPU, instance) -> consecutive scrapes that disagreed about used memory.
    _doubts: dict[Key, int] = field(default_factory=dict)
    #: ``scrapes`` of the last comparison.
    _compared: int = 0

    def compare(
        self,
        now_s: float,
        scrapes: int,
        devices: Iterable[DeviceReading],
        readings: Iterable[DcgmReading],
    ) -> list[str]:
        """Return the contradictions, without repetitions.

        ``scrapes`` is the number of expositions read so far: if it is unchanged, the exposition was
        compared before, and does not count as another disagreement. ``devices`` are NVML's,
        ``readings`` are DCGM's.
        """
        known = {_key_of(device): device for device in devices}
        for key, device in known.items():
            if device.memory is not None:
                used_bytes = device.memory.total_bytes - device.memory.free_bytes
                series = self._used.setdefault(key, deque())
                if series and series[-1][1] == used_bytes:
                    series.pop()
                series.append((now_s, used_bytes))
        for key in [key for key in self._used if key not in known]:
            del self._used[key]
        for series in self._used.values():
            while series and now_s - series[0][0] > _WINDOW_S:
                series.popleft()
        again, self._compared = scrapes == self._compared, scrapes
        wrong: list[str] = []
        parents = {uuid for uuid, _ in known}
        for reading in readings:
            key = reading.key
            if reading.uuid not in parents:
                wrong.append("it exports metrics of devices that this node does not have")
            elif key in known:
                wrong += self._differences(key, known[key], reading, again)
        return list(dict.fromkeys(wrong))

    def _differences(
        self, key: Key, device: DeviceReading, reading: DcgmReading, again: bool
    ) -> list[str]:
        """Return the differences of one device. ``again``: the reading was compared before.

        A difference of used memory is returned only after ``_IN_A_ROW`` scrapes.
        """
        memory = device.memory
        series = self._used.get(key)
        if memory is None or not series:
            return []
        wrong: list[str] = []
        slack_bytes = max(_TOLERANCE_BYTES, memory.total_bytes // 100)
        parts = (reading.used_bytes, reading.free_bytes, reading.reserved_bytes)
        total_bytes = reading.total_bytes
        if total_bytes is None:
            known = [part for part in parts if part is not None]
            total_bytes = sum(known) if len(known) == len(parts) else None
        if total_bytes is not None and abs(total_bytes - memory.total_bytes) > slack_bytes:
            wrong.append(f"{device.uuid}: its memory is not what NVML reports")
        if reading.used_bytes is not None and not again:
            # Some exporter versions count the driver's reserve as used, some do not.
            least = min(used for _, used in series) - (memory.reserved_bytes or 0) - slack_bytes
            most = max(used for _, used in series) + slack_bytes
            fits = least <= reading.used_bytes <= most
            self._doubts[key] = 0 if fits else self._doubts.get(key, 0) + 1
        if self._doubts.get(key, 0) >= _IN_A_ROW:
            wrong.append(f"{device.uuid}: its used memory is not what NVML reports")
        return wrong


def activity_of(
    readings: Iterable[DcgmReading], devices: Iterable[DeviceReading]
) -> list[ActivityReading]:
    """Return DCGM's figures of the node's devices."""
    by_key = {reading.key: reading for reading in readings}
    found: list[ActivityReading] = []
    for device in devices:
        if (reading := by_key.get(_key_of(device))) is not None:
            sm_ratio, occupancy_ratio = reading.sm_ratio, reading.occupancy_ratio
            found.append(ActivityReading("dcgm", device.uuid, sm_ratio, occupancy_ratio))
            # Utilisation: any kernel keeps the engine active. NVML's figure has priority, but NVML
            # has none for MIG instances.
            engine = reading.engine_ratio
            found.append(ActivityReading("dcgm-engine", device.uuid, utilization_ratio=engine))
    return found


def last_xids(readings: Iterable[DcgmReading], present: Iterable[str]) -> dict[str, int]:
    """Return the gauges of the last XID of the present GPUs, as in ``HealthSample.gauges``."""
    known = set(present)
    found: dict[str, int] = {}
    for reading in readings:
        if reading.xid is not None and reading.uuid in known:
            instance = "" if reading.gpu_instance is None else f"/{reading.gpu_instance}"
            found[reading.uuid + instance] = reading.xid
    return found


def _key_of(device: DeviceReading) -> Key:
    return device.parent or device.uuid, device.gpu_instance
