"""Reads an exposition of dcgm-exporter. Pure.

The exporter may repeat the series of a device for each pod that shares it
(KUBERNETES_VIRTUAL_GPUS), and some of these series contain figures of single pods. So the series of
one device are never added up. A series without a pod label describes the device. If all series have
a pod label, the largest value counts.

MIG series have the UUID of the whole GPU and the number of the GPU instance. The label Hostname
(hostname since 4.8.3) is ignored, because the UUID identifies the device.
"""

import hashlib
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from agent.probes.readings import ActivityReading, DeviceReading
from agent.probes.sm_activity import ratio
from headroom.contract.dcgm import (
    SM_ACTIVITY,
    Key,
    key_of_series,
    label,
)

#: Values that DCGM uses for a missing figure: the blanks of 32-bit integers and of doubles, each
#: with three variants for the reason, and the blank of 64-bit integers. Exporters before 2.4 export
#: them. A real figure never has such a value.
_BLANKS = {*(0x7FFFFFF0 + why for why in range(4)), *(2.0**47 + why for why in range(4)), 2.0**63}
_MOST_XID = 1 << 16


@dataclass(frozen=True, slots=True)
class DcgmReading:
    """Figures of one GPU or GPU instance, or None if missing or invalid."""

    uuid: str
    #: Number of the GPU instance, or None for the whole GPU.
    gpu_instance: int | None
    sm_ratio: float | None = None
    occupancy_ratio: float | None = None
    engine_ratio: float | None = None
    #: The last XID, which the exporter keeps until it restarts.
    xid: int | None = None

    @property
    def key(self) -> Key:
        return self.uuid, self.gpu_instance


def _xid(number: float) -> int | None:
    """Return the number of an XID, or None if it is invalid."""
    whole = math.isfinite(number) and 0 <= number < _MOST_XID and number == int(number)
    return int(number) if whole else None


#: Maps each metric to the field of ``DcgmReading`` and the conversion to its unit. The second half
#: contains the names since 4.9.0.
_METRICS: Mapping[str, tuple[str, Callable[[float], float | int | None]]] = {
    SM_ACTIVITY[0]: ("sm_ratio", ratio),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("occupancy_ratio", ratio),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("engine_ratio", ratio),
    "DCGM_FI_DEV_XID_ERRORS": ("xid", _xid),
    SM_ACTIVITY[1]: ("sm_ratio", ratio),
    "DCGM_FI_PROF_SM_OCCUPANCY_RATIO": ("occupancy_ratio", ratio),
    "DCGM_FI_PROF_GR_ENGINE_UTIL_RATIO": ("engine_ratio", ratio),
    "DCGM_FI_DEV_XID_ERROR": ("xid", _xid),
}
#: Label names that exporters and relabelling rules use for the pod.
_PODS = ("pod", "pod_name", "exported_pod")
_PREFIX = b"DCGM_FI_"
#: The beginning of a line with labels, and the rest of the line.
_LINE = re.compile(rb"^[ \t]*(DCGM_FI_[A-Z0-9_]+)[ \t]*\{(.*)$", re.MULTILINE)
_LABEL = re.compile(r'\s*([a-zA-Z_][a-zA-Z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*(?:,|$)')
#: Maximum length of a line in bytes. A line with all labels of a pod is shorter than 2 KiB.
_MOST_LINE_BYTES = 16 << 10
#: Maximum number of devices, and maximum length of a UUID. A node has a few hundred devices, but an
#: endpoint can export the devices of a whole cluster.
_MOST_DEVICES = 16 << 10
_MOST_UUID_CHARS = 128


@dataclass(frozen=True, slots=True)
class Scraped:
    """The content of one exposition."""

    readings: tuple[DcgmReading, ...]
    #: Number of lines about devices that could not be used.
    bad_lines: int
    #: Hash of the exposition, to detect changes.
    digest: bytes


class Exposition:
    """Reads an exposition in parts. It keeps only figures of devices, never the text.

    Lines that cannot be used are counted. Values that DCGM uses for a missing figure are skipped
    and not counted.
    """

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)
        #: The beginning of a line whose end has not arrived yet, or None if the line is too long.
        self._rest: bytes | None = b""
        self._bad_lines = 0
        #: For each device and field, whether the series has no pod, and its value. A series without
        #: a pod is preferred, otherwise the largest value is kept.
        self._found: dict[Key, dict[str, tuple[bool, float]]] = {}

    def feed(self, part: bytes) -> None:
        """Read the next bytes."""
        self._hash.update(part)
        begun, newline, rest = part.rpartition(b"\n")
        if newline:
            self._end_lines(begun)
        self._rest = None if self._rest is None else self._rest + rest
        if self._rest is not None and len(self._rest) > _MOST_LINE_BYTES:
            self._rest = None

    def end(self) -> Scraped:
        """Return what was read. Call this method after the last part."""
        self._end_lines(b"")
        readings = []
        for (uuid, instance), series in self._found.items():
            figures: dict[str, Any] = {name: figure for name, (_, figure) in series.items()}
            readings.append(DcgmReading(uuid, instance, **figures))
        return Scraped(tuple(readings), self._bad_lines, self._hash.digest())

    def _end_lines(self, text: bytes) -> None:
        """Read lines. The first line continues the rest of the previous part."""
        if self._rest is None:
            self._bad_lines += 1
            text = text.partition(b"\n")[2]
        else:
            text = self._rest + text
        self._rest = b""
        # Searching for the prefix first is much faster than searching for lines.
        for line in _LINE.finditer(text) if _PREFIX in text else ():
            name = line[1].decode()
            if name in _METRICS:
                try:
                    self._add(name, line[2])
                except ValueError:
                    self._bad_lines += 1

    def _add(self, name: str, series: bytes) -> None:
        """Read the labels and the value of a line of the metric ``name``. Raises ``ValueError``."""
        labels, number = _parsed(series)
        if number in _BLANKS:
            return
        key = key_of_series(labels)
        field, convert = _METRICS[name]
        figure = convert(number)
        if key is None or figure is None or len(key[0]) > _MOST_UUID_CHARS:
            raise ValueError("not a value of a device")
        if key not in self._found and len(self._found) >= _MOST_DEVICES:
            raise ValueError("too many devices")
        found = (not label(labels, _PODS), figure)
        figures = self._found.setdefault(key, {})
        figures[field] = max(figures.get(field, found), found)


def _parsed(series: bytes) -> tuple[dict[str, str], float]:
    """Parse a line after its opening brace into labels and value. Raises ``ValueError``."""
    if len(series) > _MOST_LINE_BYTES:
        raise ValueError("too long")
    text, brace, tail = series.decode("utf-8", "replace").rpartition("}")
    values = tail.split()
    if not brace or len(values) not in (1, 2) or "_" in values[0]:
        raise ValueError("not a series with labels and a value")
    if len(values) > 1 and abs(int(values[1])) >= 1 << 63:
        raise ValueError("not a time in milliseconds")
    labels: dict[str, str] = {}
    at = 0
    while at < len(text):
        found = _LABEL.match(text, at)
        if found is None:
            raise ValueError("not a label")
        labels[found[1]] = found[2]
        at = found.end()
    return labels, float(values[0])


def is_foreign(readings: Iterable[DcgmReading], devices: Iterable[DeviceReading]) -> bool:
    """Return whether a reading belongs to a device that this node does not have."""
    parents = {device.parent or device.uuid for device in devices}
    return any(reading.uuid not in parents for reading in readings)


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
            # This figure is only utilisation, because any kernel keeps the engine active. NVML's
            # value takes priority, but does not exist for MIG instances.
            engine = reading.engine_ratio
            found.append(ActivityReading("dcgm-engine", device.uuid, utilization_ratio=engine))
    return found


def last_xids(readings: Iterable[DcgmReading], present: Iterable[str]) -> dict[str, int]:
    """Return the last XID of each present GPU, in the format of ``HealthSample.gauges``."""
    known = set(present)
    found: dict[str, int] = {}
    for reading in readings:
        if reading.xid is not None and reading.uuid in known:
            instance = "" if reading.gpu_instance is None else f"/{reading.gpu_instance}"
            found[reading.uuid + instance] = reading.xid
    return found


def _key_of(device: DeviceReading) -> Key:
    return device.parent or device.uuid, device.gpu_instance
