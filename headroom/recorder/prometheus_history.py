"""Reads the lives of the last days from Prometheus each time this recorder becomes the leader."""

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from headroom.errors import PrometheusUnreadable, innermost
from headroom.recorder.past_lives import DAYS, PastLife, PastLives, reading
from headroom.runtime.loops import progressed
from headroom.runtime.metric_history import Asked, Sample
from headroom.runtime.promql import EVERY_CLUSTER, Queries

log = structlog.get_logger()

#: Number of seconds between two attempts to read the history, and between two checks whether this
#: recorder is the leader.
RETRY_S, CHECK_S = 600.0, 15.0
#: Maximum timeout of a query. It is shorter than the time after which a loop counts as stuck.
MAX_TIMEOUT_S = 20.0
#: Maximum number of samples in all responses together. If there are more, no sample is used.
MAX_SAMPLES = 1_000_000
_EXTRA_S = 1.0


@dataclass(frozen=True, slots=True)
class Source:
    #: The URL of Prometheus. It may contain a user and a password, so it must not be logged.
    url: str
    timeout_s: float
    #: The file with the token. It is read before each query, because tokens are renewed.
    token_file: Path | None = None
    ca: Path | None = None
    queries: Queries = EVERY_CLUSTER


#: A function that returns the samples of a query. It blocks.
Query = Callable[[Source, Asked], list[Sample]]


def query(source: Source, asked: Asked) -> list[Sample]:
    """Return the samples of one query. Raise ``PrometheusUnreadable`` if it fails."""
    # The client of Prometheus is an optional dependency.
    from headroom.runtime.prometheus import connected, read_moment

    within_s = source.timeout_s + _EXTRA_S
    with connected(source.url, within_s, source.token_file, source.ca) as connection:
        return [Sample(*each) for each in read_moment(connection, *asked, source.timeout_s)]


@dataclass(slots=True)
class HistoryReader:
    """Fills ``past`` while this recorder is the leader, and empties it when another recorder is the
    leader."""

    source: Source
    past: PastLives
    leads: Callable[[], bool]
    now_s: Callable[[], float]
    monotonic_s: Callable[[], float]
    query: Query = query
    most_samples: int = MAX_SAMPLES
    #: The time of the next attempt, or None if the history was read.
    due_s: float | None = field(default=0.0, init=False)
    #: The thread of a query that did not end in time.
    hanging: threading.Thread | None = field(default=None, init=False)

    async def check(self) -> None:
        """Read the history once while this recorder is the leader, and drop it when another
        recorder is the leader.

        A failure is logged, and the next attempt follows after ``RETRY_S``. Meanwhile, lives are
        recorded without the history.
        """
        if not self.leads():
            self.past.load(())
            self.due_s = 0.0
            return
        if self.due_s is None or self.monotonic_s() < self.due_s:
            return
        self.due_s = self.monotonic_s() + RETRY_S
        try:
            lives = await self._lives()
        except PrometheusUnreadable as err:
            log.warning(
                "past_lives_unavailable",
                message=f"the lives of the last {DAYS} days cannot be read from Prometheus: {err}",
                hint=f"new lives are recorded; the next attempt is in {RETRY_S / 60:.0f} min",
            )
            return
        self.past.load(lives)
        self.due_s = None
        log.info("past_lives_read", lives=len(lives), days=DAYS)

    async def _lives(self) -> list[PastLife]:
        lives, count = reading(self.source.queries, self.now_s()), 0
        asked = next(lives)
        while True:
            found = await self._ask(asked)
            if (count := count + len(found)) > self.most_samples:
                raise PrometheusUnreadable(f"it has more than {self.most_samples:,} samples")
            try:
                asked = lives.send(found)
            except StopIteration as end:
                result: list[PastLife] = end.value
                return result

    async def _ask(self, asked: Asked) -> list[Sample]:
        """Send a query on its own thread, which is abandoned if the query does not end in time."""
        if self.hanging is not None and self.hanging.is_alive():
            raise PrometheusUnreadable("an earlier query still hangs")
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[list[Sample]] = loop.create_future()

        def put(found: list[Sample] | None, error: PrometheusUnreadable | None) -> None:
            if answer.done():
                return
            if error is not None:
                answer.set_exception(error)
            else:
                answer.set_result(found or [])

        def ask() -> None:
            found, error = None, None
            try:
                found = self.query(self.source, asked)
            except PrometheusUnreadable as err:
                error = err
            except Exception as err:  # noqa: BLE001 - errors of four libraries, without secrets
                error = PrometheusUnreadable(f"cannot be asked: {innermost(err)}")
            with contextlib.suppress(RuntimeError):  # the process ends
                loop.call_soon_threadsafe(put, found, error)

        thread = threading.Thread(target=ask, name="prometheus", daemon=True)
        thread.start()
        within_s = self.source.timeout_s + 2 * _EXTRA_S
        try:
            return await asyncio.wait_for(answer, within_s)
        except TimeoutError:
            self.hanging = thread
            raise PrometheusUnreadable(f"no complete answer within {within_s:g} s") from None
        finally:
            progressed()
