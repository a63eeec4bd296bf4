"""The DCGM probe, which scrapes the node's dcgm-exporter over HTTP.

The exporter's response (the exposition) is a copy of DCGM's newest values without timestamps, which
DCGM refreshes every 30 s by default. So the age of a single value is unknown. The probe can only
measure how long ago any value last changed. Temperatures, clocks and energy counters change with
every collection. So if nothing changes for ``STALE_AFTER_S``, DCGM has stopped collecting.
"""

import contextlib
import http.client
import math
import socket
import time
import urllib.parse
from collections.abc import Callable, Sequence

import structlog

from agent.deadline import Hanging, Worker
from agent.probes.cause import joined
from agent.probes.dcgm_exposition import DcgmReading, Exposition, Scraped, is_foreign
from agent.probes.readings import DeviceReading, SourceReading
from headroom.contract.dcgm import SM_ACTIVITY

_log = structlog.get_logger()

SOURCE = "dcgm"

#: Seconds that one scrape may take, including connection, headers and body.
TIMEOUT_S = 3.0
#: An exposition that does not change for this many seconds is stale.
STALE_AFTER_S = 120.0
#: Maximum size of an exposition in bytes. A node of 16 GPUs with 7 instances each, 40 counters and
#: 10 pods needs 8 MiB.
MOST_BYTES = 16 << 20
_PART_BYTES = 1 << 20


class Unreadable(Exception):
    """The exporter did not answer, or its response is not an exposition."""


class Exporter:
    """Scrapes one exporter in its own thread. Only the first call of ``newest`` waits for the
    scrape."""

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
        self._worker: Worker[Scraped] = Worker("dcgm")
        self._socket: socket.socket | None = None
        #: When the last scrape began.
        self._begun_s = -math.inf
        #: Whether a scrape has begun but its result has not been taken yet.
        self._pending = False
        #: Whether the pending scrape was aborted.
        self._late = False
        #: Hash of the newest complete exposition, and the time at which the first scrape with it
        #: began.
        self._digest = b""
        self._changed_s = 0.0
        self._readings: tuple[DcgmReading, ...] = ()
        #: When the last successful scrape began.
        self._read_s = -math.inf
        #: Why there is no newer exposition. The text does not change while the cause stays the
        #: same.
        self._trouble = "not scraped yet"
        #: Number of lines of the last exposition that could not be used.
        self.bad_lines = 0
        #: Number of expositions that were read completely.
        self.scrapes = 0

    def newest(self) -> tuple[DcgmReading, ...]:
        """Return the figures of the newest complete exposition, and start a scrape if one is due.

        The first call waits for the first scrape, because ``--once`` takes few samples. Later calls
        do not wait. Raises ``Unreadable``.
        """
        first = self._begun_s == -math.inf
        now_s = self._monotonic()
        if not self._pending and now_s - self._begun_s >= self._every_s:
            self._begun_s, self._late = now_s, False
            self._pending = self._worker.give(self._scrape)
            if not self._pending:
                self._trouble = "the agent cannot start a thread for the scrape"
        if self._pending:
            self._collect(time.monotonic() + (self._timeout_s if first else 0.0))
        now_s = self._monotonic()
        if self._trouble and now_s - self._read_s > 3 * self._every_s:
            raise Unreadable(self._trouble)
        if now_s - self._changed_s > STALE_AFTER_S:
            raise Unreadable("its exposition has not changed for minutes")
        return self._readings

    def read(self, devices: Sequence[DeviceReading]) -> tuple[Sequence[DcgmReading], SourceReading]:
        """Return the newest figures and the state of the source. ``devices`` contains NVML's
        devices.

        Raises nothing.
        """
        try:
            readings = self.newest()
        except Unreadable as err:
            return (), SourceReading(SOURCE, "absent", str(err))
        except Exception as err:  # noqa: BLE001 - a probe never raises
            _log.error("dcgm_not_read", exc_info=err)
            what = f"the agent cannot read it: {type(err).__name__}"
            return (), SourceReading(SOURCE, "absent", what)
        wrong: list[str] = []
        if is_foreign(readings, devices):
            wrong.append("it exports metrics of devices that are not on this node")
        if self.bad_lines:
            wrong.append("some of its lines cannot be read and were ignored")
        if not any(r.sm_ratio is not None for r in readings):
            wrong.append(f"it does not export {' or '.join(SM_ACTIVITY)}")
        return readings, SourceReading(SOURCE, "degraded" if wrong else "ok", joined(wrong))

    def close(self) -> None:
        self._cut()
        self._worker.close()

    def _collect(self, until_s: float) -> None:
        """Store the result of the scrape if it has ended, and abort the scrape if it takes too
        long."""
        try:
            scraped = self._worker.result(until_s)
        except Hanging:
            if self._monotonic() - self._begun_s >= self._timeout_s:
                self._late = True
                self._cut()
                self._trouble = self._too_late
            return
        except Exception as err:
            self._pending = False
            if not isinstance(err, (Unreadable, OSError, http.client.HTTPException, ValueError)):
                raise
            late = self._late or isinstance(err, TimeoutError)
            self._trouble = self._too_late if late else _why(err)
            return
        self._pending = False
        # Ignore the result of an aborted scrape, because a body without a length may be incomplete.
        if self._late:
            return
        if scraped.digest != self._digest:
            self._readings, self.bad_lines = scraped.readings, scraped.bad_lines
            self._digest, self._changed_s = scraped.digest, self._begun_s
        self._read_s, self._trouble = self._begun_s, ""
        self.scrapes += 1

    @property
    def _too_late(self) -> str:
        return f"no complete answer within {self._timeout_s:g} s"

    def _scrape(self) -> Scraped:
        """Read the exporter's response. The worker's thread calls this method.

        The response is parsed while it arrives, so a large response neither fills memory nor delays
        the sampling thread. Raises ``Unreadable``, ``OSError`` and ``http.client.HTTPException``.
        """
        connection = http.client.HTTPConnection(
            self._url.hostname or "", self._url.port or 80, timeout=self._timeout_s
        )
        try:
            connection.connect()
            self._socket = connection.sock
            target = urllib.parse.urlunsplit(
                ("", "", self._url.path or "/metrics", self._url.query, "")
            )
            connection.request("GET", target, headers={"Accept": "text/plain"})
            with connection.getresponse() as answer:
                if answer.status != http.client.OK:
                    raise Unreadable(f"answered {answer.status}")
                return _read(answer)
        finally:
            self._socket = None
            connection.close()

    def _cut(self) -> None:
        """Abort the scrape. Its own timeout restarts with every byte, so it might never expire."""
        cut = self._socket
        if cut is not None:
            with contextlib.suppress(OSError):
                cut.shutdown(socket.SHUT_RDWR)


def _read(answer: http.client.HTTPResponse) -> Scraped:
    """Read and parse the body of a response."""
    exposition, read_bytes = Exposition(), 0
    while part := answer.read(_PART_BYTES):
        read_bytes += len(part)
        if read_bytes > MOST_BYTES:
            raise Unreadable(f"answered more than {MOST_BYTES >> 20} MiB")
        exposition.feed(part)
    if answer.length:
        raise http.client.IncompleteRead(b"", answer.length)
    return exposition.end()


def _why(err: Exception) -> str:
    if isinstance(err, Unreadable):
        return str(err)
    if isinstance(err, OSError):
        return f"not reached: {err.strerror or type(err).__name__}"
    return f"not HTTP: {type(err).__name__}"
