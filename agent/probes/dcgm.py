"""The DCGM probe: scrapes the node's dcgm-exporter over HTTP.

An exposition is a copy of DCGM's newest values, without timestamps. DCGM refreshes them every 30 s
(the exporter's default). So the age of a value is not known, only how long ago anything in the
exposition changed. Temperatures, clocks and energy counters change with every collection. If
nothing changes for minutes, DCGM does not collect any more.

The exporter may repeat a device's series for each pod that shares it (KUBERNETES_VIRTUAL_GPUS), and
some copies contain figures of single pods. So series of one device are never added up. The series
without a pod is the device's. If all have a pod, they are copies, and the largest value counts.

MIG series have the UUID of the whole GPU and the number of the GPU instance. The label Hostname
(hostname since 4.6.0) is not used, because the UUID identifies the device.
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

#: Seconds for one scrape: connection, headers and body together.
TIMEOUT_S = 3.0
#: An exposition without any change for this many seconds is stale.
STALE_AFTER_S = 120.0
#: Maximum size. A node of 16 GPUs with 7 instances each, 40 counters and 10 pods needs 8 MiB.
MOST_BYTES = 16 << 20
_MIB = 1 << 20
#: Values that DCGM uses for a missing figure: the blank of 32-bit integers and of doubles, each
#: with three variants for the reason, and that of 64-bit integers. Exporters before 2.4 export
#: them. A real figure never has such a value.
_BLANKS = {*(0x7FFFFFF0 + why for why in range(4)), *(2.0**47 + why for why in range(4)), 2.0**63}
_MOST_XID = 1 << 16
#: Errors that the parser raises for a malformed exposition.
_NOT_READ = (ValueError, LookupError, OverflowError)


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


@dataclass(frozen=True, slots=True)
class Exposition:
    readings: tuple[DcgmReading, ...]
    #: Seconds since the last observed change in it.
    age_s: float


class Unreadable(Exception):
    """The exporter did not answer, or its answer is not an exposition."""


def _bytes(mebibytes: float) -> int | None:
    if not math.isfinite(mebibytes) or not 0 <= mebibytes * _MIB <= MAX_DEVICE_BYTES:
        return None
    return round(mebibytes) * _MIB


def _xid(number: float) -> int | None:
    whole = math.isfinite(number) and 0 <= number < _MOST_XID and number == int(number)
    return int(number) if whole else None


#: Metric -> field of ``DcgmReading``, and the conversion to its unit.
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
#: Label names that exporters and relabelling rules use for the same value.
_UUIDS = ("UUID", "uuid", "gpu_uuid", "GPU_UUID")
_INSTANCES = ("GPU_I_ID", "gpu_i_id")
_INSTANCE = re.compile("[0-9]{1,4}")
_PODS = ("pod", "pod_name", "exported_pod")


def parse(text: str) -> tuple[list[DcgmReading], int]:
    """Return the figures of every device, and the number of lines that could not be used."""
    lines = [line for line in text.splitlines() if line.partition("{")[0].strip() in _METRICS]
    samples, bad = _samples(lines)
    #: device -> field -> (whether the series has no pod, value) of each series
    found: dict[tuple[str, int | None], dict[str, list[tuple[bool, float]]]] = {}
    for sample in samples:
        try:
            blank = float(sample.value) in _BLANKS
        except OverflowError:  # the parser returns integers of any size
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
        # max prefers a series without a pod, then the largest value.
        figures: dict[str, Any] = {name: max(values)[1] for name, values in series.items()}
        readings.append(DcgmReading(uuid, instance, **figures))
    return readings, bad


def _samples(lines: list[str]) -> tuple[list[Sample], int]:
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
    """Scrapes one exporter in its own thread. Only the first call of ``newest`` waits for it."""

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
        #: Whether the pending scrape was aborted.
        self._late = False
        self._digest = b""
        self._changed_s = 0.0
        self._readings: tuple[DcgmReading, ...] = ()
        self._read_s = -math.inf
        #: Why there is no newer exposition. The text stays the same while the cause lasts.
        self._trouble = "not scraped yet"
        #: Number of lines of the last exposition that could not be used.
        self.bad_lines = 0
        #: Number of expositions that were read completely.
        self.scrapes = 0

    def newest(self) -> Exposition:
        """Return the newest complete exposition. Raises ``Unreadable``.

        The first call waits for the first scrape, because ``--once`` takes few samples. Later calls
        do not wait.
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
        """Take the scrape's result if it has ended; abort the scrape if it takes too long."""
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
        if self._late:  # aborted, which looks like the end of a body without a length
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
        """Abort the scrape. Its own timeout restarts with every byte, so it may never expire."""
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
