"""Queries Prometheus for the history of SM activity in the background, and applies it to the state.

One thread starts queries at intervals and passes the results on, so nothing else waits for
Prometheus. Each query runs on its own thread and is abandoned if it has no complete answer in time,
so old figures expire even if Prometheus hangs. Without fresh history, decisions use the agents' own
samples.

The querying thread groups changed figures by node. The event loop applies them in small steps after
kube-scheduler's calls, like changes from watches.

The age of a sample is Prometheus' evaluation time minus the sample's own time, both from the same
answer. If Prometheus' clock differs from the local clock by more than the maximum age of a sample,
the answer is not used, because it may be an old answer from a cache.
"""

import asyncio
import contextlib
import math
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from concurrent.futures import Future

import structlog

from headroom.contract.dcgm import Key
from headroom.core.cluster.changes import ActivitySeen, Event
from headroom.core.cluster.readers import Activities
from headroom.core.placement.device_reading import HISTORY, Activity
from headroom.errors import PrometheusUnreadable, innermost
from headroom.runtime.follow.sm_source import Answer, QuerySource, Span
from headroom.runtime.settings.settings import Settings
from headroom.runtime.telemetry import ViewTelemetry

log = structlog.get_logger()

#: While this many abandoned queries still hang, no new query starts.
_MAX_ABANDONED = 3
#: Maximum length of a quoted error of the operating system or a library.
_MAX_QUOTED = 200
#: A sample may be newer than Prometheus' evaluation time by at most this number of seconds.
_AHEAD_S = 30.0
#: Changes below this ratio are ignored, because their effect on decisions is not worth the work.
CHANGED_RATIO = 0.05


#: One answer for each query, and warnings that answers may be incomplete.
Answers = tuple[list[Answer], list[str]]
#: A callback that receives all fresh history, and the devices whose figures changed.
Deliver = Callable[[Mapping[Key, Activity], Collection[Key]], None]
#: A callback that receives whether Prometheus answered, and the number of devices with fresh
#: history.
Queried = Callable[[bool, int], None]


@contextlib.asynccontextmanager
async def sm_history(
    settings: Settings,
    telemetry: ViewTelemetry,
    activities: Activities,
    apply: Callable[[Sequence[Event]], None],
) -> AsyncIterator[None]:
    """Query Prometheus while the context lasts, if the settings contain its URL.

    ``apply`` receives the changes of the state, on the querying thread.
    """
    if settings.prometheus_url is None:
        yield
        return

    def queried(answered: bool, devices: int) -> None:
        telemetry.history_queries.labels("answered" if answered else "failed").inc()
        telemetry.history_devices.set(devices)

    def deliver(history: Mapping[Key, Activity], changed: Collection[Key]) -> None:
        nodes = {node for key in changed if (node := activities.node_of(key)) is not None}
        apply([ActivitySeen(history, ()), *(ActivitySeen(history, (node,)) for node in nodes)])

    source = QuerySource(
        settings.prometheus_url,
        Span(settings.prometheus_quantile, settings.prometheus_window_s),
        every_s=settings.prometheus_refresh_s,
        timeout_s=settings.prometheus_timeout_s,
        stale_after_s=settings.prometheus_stale_after_s,
        token_file=settings.prometheus_token_file,
        ca=settings.prometheus_ca,
        queries=settings.queries,
    )
    loop = PrometheusHistory(source, deliver, queried)
    loop.start()
    try:
        yield
    finally:
        await asyncio.get_running_loop().run_in_executor(None, loop.stop)


class PrometheusHistory:
    """Queries Prometheus. After each query, it calls ``queried`` and then passes the results on."""

    def __init__(
        self,
        source: QuerySource,
        deliver: Deliver,
        queried: Queried = lambda answered, devices: None,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        # The client of Prometheus is an optional dependency.
        from headroom.runtime.follow.sm_queries import query

        self._query = query
        self._source = source
        self._deliver = deliver
        self._queried = queried
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._held: dict[Key, Activity] = {}
        #: Queries that had no answer in time and may still hang.
        self._abandoned: list[threading.Thread] = []
        #: Why the last query has no usable answer. Empty if it has one, and None before the first
        #: query.
        self._error: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="prometheus", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait until it has ended. No result is passed on after that."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                self.refresh()
            except Exception:  # if the thread ended, old figures would never expire
                log.exception("history_failed")
            self._stopping.wait(self._source.every_s)

    def refresh(self) -> None:
        """Query once and pass the result on. Without an answer, pass on the history that is still
        fresh."""
        error = ""
        try:
            after = self._newer()
        except PrometheusUnreadable as err:
            error = str(err)
        except Exception:  # even after a bug in this module, old figures must expire
            log.exception("history_failed")
            error = "cannot use the answer"
        if error:
            after = still_fresh(self._held, self._monotonic_s(), self._source.stale_after_s)
        if self._stopping.is_set():
            return
        before, self._held = self._held, after
        self._queried(not error, len(after))
        if error and error != self._error:
            log.warning("history_unavailable", message=error, hint="using the agents' own samples")
        elif error != self._error:
            log.info("history_available", devices=len(after))
        self._error = error
        self._deliver(after, changed(before, after))

    def _newer(self) -> dict[Key, Activity]:
        """Make a new query and return its history. Raises ``PrometheusUnreadable``."""
        source = self._source
        queried_at_s, wall_s = self._monotonic_s(), self._wall_s()
        answers, warnings = self._answers()
        if warnings:
            log.warning("history_incomplete", warnings="; ".join(warnings)[:_MAX_QUOTED])
        return history(answers, self._held, source.span, queried_at_s, wall_s, source.stale_after_s)

    def _answers(self) -> Answers:
        self._abandoned = [thread for thread in self._abandoned if thread.is_alive()]
        if len(self._abandoned) >= _MAX_ABANDONED:
            raise PrometheusUnreadable("earlier queries still hang")
        answers: Future[Answers] = Future()
        thread = threading.Thread(target=self._query_into, args=(answers,), daemon=True)
        until_s = time.monotonic() + self._source.timeout_s
        thread.start()
        while not self._stopping.is_set() and time.monotonic() < until_s:
            with contextlib.suppress(TimeoutError):
                return answers.result(timeout=0.1)
        self._abandoned.append(thread)
        raise PrometheusUnreadable(f"no complete answer within {self._source.timeout_s:g} s")

    def _query_into(self, answers: Future[Answers]) -> None:
        try:
            answers.set_result(self._query(self._source))
        except PrometheusUnreadable as err:
            answers.set_exception(err)
        except Exception as err:  # noqa: BLE001 - from four libraries; none of them gets a secret
            answers.set_exception(PrometheusUnreadable(f"cannot be asked: {innermost(err)}"))


def history(
    answers: Sequence[Answer],
    before: Mapping[Key, Activity],
    span: Span,
    queried_at_s: float,
    wall_s: float,
    stale_after_s: float,
) -> dict[Key, Activity]:
    """Return all fresh history in these answers.

    ``queried_at_s`` is the monotonic clock at the time of the query, and ``wall_s`` the wall clock.
    Raises ``PrometheusUnreadable``.
    """
    ratios: dict[Key, float] = {}
    ages_s: dict[Key, float] = {}
    for answer in answers:
        skew_s = answer.evaluated_at_s - wall_s
        if (answer.ratios or answer.ages_s) and not abs(skew_s) <= stale_after_s:
            raise PrometheusUnreadable(
                "its clock differs from ours by more than the maximum age of a sample"
            )
        for key, ratio in answer.ratios.items():
            ratios[key] = max(ratio, ratios.get(key, 0.0))
        for key, age_s in answer.ages_s.items():
            ages_s[key] = min(age_s, ages_s.get(key, math.inf))
    found: dict[Key, Activity] = {}
    for key, ratio in ratios.items():
        age_s = ages_s.get(key, math.inf)
        # A sample that is far in the future would never become stale.
        if -_AHEAD_S <= age_s <= stale_after_s:
            settled, sampled_at_s = _settled(ratio, before.get(key)), queried_at_s - max(0.0, age_s)
            found[key] = Activity(settled, HISTORY, span.quantile, span.window_s, sampled_at_s)
    return found


def _settled(ratio: float, had: Activity | None) -> float:
    return had.ratio if had is not None and abs(had.ratio - ratio) < CHANGED_RATIO else ratio


def still_fresh(
    before: Mapping[Key, Activity], now_s: float, stale_after_s: float
) -> dict[Key, Activity]:
    """Return the part of the earlier history that is still fresh, because no newer answer came."""
    return {
        key: activity
        for key, activity in before.items()
        if now_s - activity.sampled_at_s <= stale_after_s
    }


def changed(before: Mapping[Key, Activity], after: Mapping[Key, Activity]) -> list[Key]:
    """Return the devices whose figure appeared, disappeared or changed."""
    gone = [key for key in before if key not in after]
    return gone + [
        key
        for key, now in after.items()
        if (was := before.get(key)) is None or was.ratio != now.ratio
    ]
