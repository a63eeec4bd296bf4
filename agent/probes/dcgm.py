"""The DCGM probe: what the node's dcgm-exporter tells, read over HTTP and taken with care.

An exposition is a copy of DCGM's newest values, which DCGM itself refreshes every 30 s (the
exporter's default), and it carries no times. So we know of a sample only how long ago anything in
the whole exposition last changed: temperatures, clocks and energy counters move with every
collection, and one that does not move at all for minutes is no longer collected.

The exporter may repeat a device's series for each pod that shares it (KUBERNETES_VIRTUAL_GPUS), and
puts true figures of single pods in some of the copies. So series of one device are never added up:
the one without a pod is the device's; where all have one, they are copies, and the largest counts.

MIG series carry the UUID of the whole GPU and the number of the GPU instance. Nothing is decided
from Hostname (hostname since 4.6.0): a UUID says whose figures these are.
"""

import contextlib
import hashlib
import http.client
import math
import re
import socket
import time
import urllib.parse
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import chain
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from agent.deadline import Hanging, Worker
from agent.probes.sm_activity import ratio
from contract.gpunode import MAX_DEVICE_BYTES

SOURCE = "dcgm"

#: Seconds for one scrape, connection, headers and body together.
TIMEOUT_S = 3.0
#: An exposition in which nothing moved for so long is not collected any more.
STALE_AFTER_S = 120.0
#: A node of 16 GPUs cut into 7 instances each, 40 counters, 10 pods, is below 8 MiB.
MOST_BYTES = 16 << 20
_MIB = 1 << 20
#: What DCGM gives for a figure that it does not have: in 32 bits and as a double, each with three
#: more that say why, and in 64 bits, of which a double keeps no differences. Exporters before 2.4
#: pass them on. No figure of ours can be one.
_BLANKS = {*(0x7FFFFFF0 + why for why in range(4)), *(2.0**47 + why for why in range(4)), 2.0**63}
_MOST_XID = 1 << 16
#: What the parser raises; the second where it stumbles.
_NOT_READ = (ValueError, LookupError, OverflowError)


@dataclass(frozen=True, slots=True)
class DcgmReading:
    """One GPU or GPU instance; None where the exporter does not tell, or no sense."""

    uuid: str
    #: None: the whole GPU.
    gpu_instance: int | None
    sm_ratio: float | None = None
    occupancy_ratio: float | None = None
    engine_ratio: float | None = None
    used_bytes: int | None = None
    free_bytes: int | None = None
    reserved_bytes: int | None = None
    total_bytes: int | None = None
    #: The last one; the exporter keeps it until it is restarted.
    xid: int | None = None


@dataclass(frozen=True, slots=True)
class Exposition:
    readings: tuple[DcgmReading, ...]
    #: Seconds since anything in it changed, as far as we have seen.
    age_s: float


class Unreadable(Exception):
    """The exporter did not answer, or not with an exposition."""


def _bytes(mebibytes: float) -> int | None:
    if not math.isfinite(mebibytes) or not 0 <= mebibytes * _MIB <= MAX_DEVICE_BYTES:
        return None
    return round(mebibytes) * _MIB


def _xid(number: float) -> int | None:
    whole = math.isfinite(number) and 0 <= number < _MOST_XID and number == int(number)
    return int(number) if whole else None


#: Metric -> our field, and what makes it one of our figures.
_METRICS: Mapping[str, tuple[str, Callable[[float], float | int | None]]] = {
    "DCGM_FI_PROF_SM_ACTIVE": ("sm_ratio", ratio),
    "DCGM_FI_PROF_SM_OCCUPANCY": ("occupancy_ratio", ratio),
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": ("engine_ratio", ratio),
    "DCGM_FI_DEV_FB_USED": ("used_bytes", _bytes),
    "DCGM_FI_DEV_FB_FREE": ("free_bytes", _bytes),
    "DCGM_FI_DEV_FB_RESERVED": ("reserved_bytes", _bytes),
    "DCGM_FI_DEV_FB_TOTAL": ("total_bytes", _bytes),
    "DCGM_FI_DEV_XID_ERRORS": ("xid", _xid),
}
#: Under these names exporters and relabelling rules tell the same.
_UUIDS = ("UUID", "uuid", "gpu_uuid", "GPU_UUID")
_INSTANCES = ("GPU_I_ID", "gpu_i_id")
_INSTANCE = re.compile("[0-9]{1,4}")
_PODS = ("pod", "pod_name", "exported_pod")


def parse(text: str) -> tuple[list[DcgmReading], int]:
    """The figures of every device, and how many of our lines could not be read or made no sense."""
    lines = [line for line in text.splitlines() if line.partition("{")[0].strip() in _METRICS]
    samples, bad = _samples(lines)
    #: device -> field -> (whether it is without a pod, value) of each series
    found: dict[tuple[str, int | None], dict[str, list[tuple[bool, float]]]] = {}
    for sample in samples:
        try:
            blank = float(sample.value) in _BLANKS
        except OverflowError:  # the parser makes whole numbers of any length
            bad += 1
            continue
        if blank:
            continue
        key = _key(sample.labels)
        field, convert = _METRICS[sample.name]
        value = convert(sample.value)
        if key is None or value is None:
            bad += 1
            continue
        alone = not _label(sample.labels, _PODS)
        found.setdefault(key, {}).setdefault(field, []).append((alone, value))
    readings = []
    for (uuid, instance), series in found.items():
        # max: a series without a pod before all others, then the largest.
        told: dict[str, Any] = {name: max(values)[1] for name, values in series.items()}
        readings.append(DcgmReading(uuid, instance, **told))
    return readings, bad


def _samples(lines: list[str]) -> tuple[list[Sample], int]:
    try:
        return _parsed(lines), 0
    except _NOT_READ:
        pass
    # One line that cannot be read must not hide the others.
    good: list[Sample] = []
    bad = 0
    for line in lines:
        try:
            good += _parsed([line])
        except _NOT_READ:
            bad += 1
    return good, bad


def _parsed(lines: Iterable[str]) -> list[Sample]:
    families = text_string_to_metric_families("\n".join(lines) + "\n")
    return [s for s in chain.from_iterable(f.samples for f in families) if s.name in _METRICS]


def _key(labels: Mapping[str, str]) -> tuple[str, int | None] | None:
    uuid, instance = _label(labels, _UUIDS), _label(labels, _INSTANCES)
    if not uuid or (instance and not _INSTANCE.fullmatch(instance)):
        return None
    return uuid, int(instance) if instance else None


def _label(labels: Mapping[str, str], names: Iterable[str]) -> str:
    return next((labels[name] for name in names if labels.get(name)), "")


class Exporter:
    """One exporter, scraped in a thread of its own; ``newest`` never waits for it twice."""

    def __init__(
        self,
        url: str,
        every_s: float,
        timeout_s: float = TIMEOUT_S,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._url = urllib.parse.urlsplit(url)
        self._every_s = every_s
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._worker: Worker[bytes] = Worker("dcgm")
        self._socket: socket.socket | None = None
        self._begun_s = -math.inf
        self._pending = False
        #: Whether the pending scrape was cut off.
        self._late = False
        self._digest = b""
        self._changed_s = 0.0
        self._readings: tuple[DcgmReading, ...] = ()
        self._read_s = -math.inf
        #: Why there is nothing newer; constant while the cause is.
        self._trouble = "not asked yet"
        #: Lines of the last exposition that made no sense.
        self.bad_lines = 0
        #: How many expositions were read completely.
        self.scrapes = 0

    def newest(self) -> Exposition:
        """The newest exposition that was read completely. Raises ``Unreadable``.

        The first call waits for the first scrape, so that an agent that only looks once sees
        something; no other call waits.
        """
        first = self._begun_s == -math.inf
        now_s = self._monotonic()
        if not self._pending and now_s - self._begun_s >= self._every_s:
            self._begun_s, self._pending, self._late = now_s, True, False
            self._worker.give(self._scrape)
        if self._pending:
            self._collect(time.monotonic() + (self._timeout_s if first else 0.0))
        now_s = self._monotonic()
        if self._trouble and now_s - self._read_s > 3 * self._every_s:
            raise Unreadable(self._trouble)
        age_s = now_s - self._changed_s
        if age_s > STALE_AFTER_S:
            raise Unreadable("nothing in its exposition has changed for minutes")
        return Exposition(self._readings, age_s)

    def close(self) -> None:
        self._cut()
        self._worker.close()

    def _collect(self, until_s: float) -> None:
        """Take the scrape's result if there is one; cut it off where it takes too long."""
        try:
            body = self._worker.result(until_s)
        except Hanging:
            if self._monotonic() - self._begun_s >= self._timeout_s:
                self._late = True
                self._cut()
                self._trouble = self._too_late
            return
        except (Unreadable, OSError, http.client.HTTPException, ValueError) as err:
            self._pending = False
            late = self._late or isinstance(err, TimeoutError)
            self._trouble = self._too_late if late else _why(err)
            return
        self._pending = False
        if self._late:  # cut off, which looks like the end of a body without a length
            return
        digest = hashlib.blake2b(body, digest_size=16).digest()
        if digest != self._digest:
            readings, self.bad_lines = parse(body.decode("utf-8", "replace"))
            self._readings = tuple(readings)
            self._digest, self._changed_s = digest, self._begun_s
        self._read_s, self._trouble = self._begun_s, ""
        self.scrapes += 1

    @property
    def _too_late(self) -> str:
        return f"no complete answer within {self._timeout_s:g} s"

    def _scrape(self) -> bytes:
        connection = http.client.HTTPConnection(
            self._url.hostname or "", self._url.port or 80, timeout=self._timeout_s
        )
        try:
            connection.connect()
            self._socket = connection.sock
            path = self._url.path or "/metrics"
            connection.request("GET", path, headers={"Accept": "text/plain"})
            with connection.getresponse() as answer:
                if answer.status != http.client.OK:
                    raise Unreadable(f"answered {answer.status}")
                body = answer.read(MOST_BYTES + 1)
            if len(body) > MOST_BYTES:
                raise Unreadable(f"answered more than {MOST_BYTES >> 20} MiB")
            return body
        finally:
            self._socket = None
            connection.close()

    def _cut(self) -> None:
        """End a scrape from outside: its timeout is for each read, and drops come for ever."""
        cut = self._socket
        if cut is not None:
            with contextlib.suppress(OSError):
                cut.shutdown(socket.SHUT_RDWR)


def _why(err: Exception) -> str:
    if isinstance(err, Unreadable):
        return str(err)
    if isinstance(err, OSError):
        return f"not reached: {err.strerror or type(err).__name__}"
    return f"not HTTP: {type(err).__name__}"
