"""Runs background loops as long as the process runs.

Each loop repeats its work. If a round raises an exception, it is logged and counted, and the loop
continues. If a loop makes no progress for ``STUCK_AFTER_S``, ``/healthz`` fails and the kubelet
restarts the process.
"""

import asyncio
import contextlib
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import TypeVar

import structlog

log = structlog.get_logger()

T = TypeVar("T")
#: A function that marks progress of the current loop. A round may make many calls, each with its
#: own timeout, so clients call ``progressed`` after each call.
_mark: ContextVar[Callable[[], None]] = ContextVar("mark", default=lambda: None)

#: Seconds without progress after which a loop counts as stuck. Every call to the API server is
#: shorter.
STUCK_AFTER_S = 30.0
#: Seconds after which work that has ended is started again.
AGAIN_AFTER_S = 1.0


class Loops:
    """Runs the loops of a process.

    ``failures_of`` is called with the name of each loop that starts, so that the count of its
    failures starts at 0. The returned function is called after each exception of that loop.
    """

    def __init__(
        self,
        failures_of: Callable[[str], Callable[[], None]],
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._failures_of = failures_of
        self.again_after_s = AGAIN_AFTER_S
        self._monotonic_s = monotonic_s
        self._tasks: set[asyncio.Task[None]] = set()
        #: Time of the last progress of each loop, by name, or None while the loop waits for its
        #: next round.
        self._progress_at_s: dict[str, float | None] = {}

    def start(
        self,
        name: str,
        once: Callable[[], Awaitable[object]],
        every_s: float,
        wanted: asyncio.Event | None = None,
        least_s: float = 0.0,
        unready: Callable[[], str] = str,
    ) -> None:
        """Run ``once`` now, and again ``every_s`` seconds after each round, or after only
        ``least_s`` seconds if ``wanted`` is set. Skip rounds while ``unready`` returns a reason."""

        self._failures_of(name)

        async def ready() -> None:
            if not unready():
                await once()

        task = asyncio.create_task(self._run(name, ready, every_s, wanted, least_s), name=name)
        self._tasks.add(task)

    def keep(self, name: str, work: Callable[[], Awaitable[None]]) -> None:
        """Run ``work``, which normally does not end, and start it again whenever it fails."""

        self._failures_of(name)

        async def kept() -> None:
            while True:
                with self._survived(name):
                    await work()
                with self._survived(name):
                    await asyncio.sleep(self.again_after_s)

        self._tasks.add(asyncio.create_task(kept(), name=name))

    def failing(self, name: str) -> None:
        """Log and count the exception that is being handled. This function never raises."""
        with contextlib.suppress(Exception):  # the log may be closed
            log.error("loop_failed", loop=name, exc_info=sys.exc_info())
        with contextlib.suppress(Exception):
            self._failures_of(name)()

    @contextlib.contextmanager
    def _survived(self, name: str) -> Iterator[None]:
        """Handle any exception, because a loop that ended would go unnoticed for days."""
        try:
            yield
        except Exception:  # noqa: BLE001 - as above
            self.failing(name)

    def stuck(self) -> dict[str, float]:
        """Return the stuck loops by name, with the seconds since their last progress. A loop is
        stuck after ``STUCK_AFTER_S`` seconds without progress. Any thread may call this method.
        """
        now_s = self._monotonic_s()
        return {
            name: now_s - at_s
            for name, at_s in list(self._progress_at_s.items())
            if at_s is not None and now_s - at_s > STUCK_AFTER_S
        }

    def stop(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def _run(
        self,
        name: str,
        once: Callable[[], Awaitable[None]],
        every_s: float,
        wanted: asyncio.Event | None,
        least_s: float,
    ) -> None:
        def moved() -> None:
            if self._progress_at_s.get(name) is not None:
                self._progress_at_s[name] = self._monotonic_s()

        marked_by(moved)
        while True:
            if wanted is not None:
                wanted.clear()
            with self._survived(name):
                self._progress_at_s[name] = self._monotonic_s()
                await once()
            self._progress_at_s[name] = None
            with self._survived(name):
                await asyncio.sleep(min(least_s, every_s))
                if wanted is None:
                    await asyncio.sleep(every_s - least_s)
                else:
                    with contextlib.suppress(TimeoutError):
                        await asyncio.wait_for(wanted.wait(), every_s - least_s)


def stuck_sentence(stuck: Mapping[str, float]) -> str:
    """Describe which loops have made no progress, and for how many seconds. Return "" if there are
    none."""
    return ", ".join(f"{name} has made no progress for {s:.0f} s" for name, s in stuck.items())


async def part_by_part(items: Sequence[T], at_once: int) -> AsyncIterator[Sequence[T]]:
    """Yield ``items`` in parts of ``at_once`` items. Before each part and after the last part, let
    other tasks run, such as calls of kube-scheduler."""
    for start in range(0, len(items), at_once):
        await asyncio.sleep(0)
        yield items[start : start + at_once]
    await asyncio.sleep(0)


def progressed() -> None:
    """Record progress of the current loop, if there is one."""
    _mark.get()()


async def on_thread(call: Callable[[], T]) -> T:
    """Run a blocking call on a thread, and record progress when it returns."""
    result = await asyncio.to_thread(call)
    progressed()
    return result


def marked_by(mark: Callable[[], None]) -> None:
    """Call ``mark`` whenever this task, or a task that it creates, makes progress."""
    _mark.set(mark)
