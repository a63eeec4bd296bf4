"""Runs calls that may hang in threads, and waits for them with a deadline.

A driver call that hangs cannot be cancelled, and blocks its thread. So calls that can hang
independently of each other run in separate threads (``Worker``). If a call misses its deadline, the
caller continues without the result. The worker accepts no other call until the hanging call
returns, and starts no second thread, so a driver that hangs cannot pile up threads.
"""

import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Generic, TypeVar

T = TypeVar("T")

#: Maximum number of seconds that the process waits for all pending calls together after ``hurry``.
#: Each call still gets at least ``LEAST_S``.
ENDING_S = 1.0
LEAST_S = 0.2
#: A wait notices within this number of seconds that ``hurry`` was called.
_CHECK_S = 0.25

_ends_at_s = float("inf")


def hurry() -> None:
    """Shorten all waits for calls from now on, because the process ends. Signal handlers call
    this."""
    global _ends_at_s
    _ends_at_s = min(_ends_at_s, time.monotonic() + ENDING_S)


class Hanging(Exception):
    """The job has not returned in time, or could not start because the previous job still runs."""


class Worker(Generic[T]):
    """A thread that runs one job at a time. The class is not thread-safe."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[tuple[Future[T], Callable[[], T]] | None] = (
            queue.SimpleQueue()
        )
        self._thread: threading.Thread | None = None
        self._last: Future[T] | None = None

    @property
    def busy(self) -> bool:
        """Whether the last job has not returned yet."""
        return self._last is not None and not self._last.done()

    @property
    def thread_id(self) -> int | None:
        return None if self._thread is None else self._thread.ident

    def give(self, work: Callable[[], T]) -> bool:
        """Start ``work`` and return True.

        If the last job has not returned, or no thread can be started, return False without starting
        it.
        """
        if self.busy:
            return False
        if self._thread is None:
            # The thread is a daemon, so a call that never returns does not keep the process from
            # exiting.
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The system cannot start a thread now, so the next call tries again.
                return False
            self._thread = thread
        self._last = Future()
        self._jobs.put((self._last, work))
        return True

    def result(self, until_s: float) -> T:
        """Wait for the last job, and return its result or raise its exception.

        Raises ``Hanging`` if the job has not ended at ``until_s`` (seconds of the monotonic clock),
        or earlier if the process is about to end.
        """
        if self._last is None:
            raise Hanging
        least_s = time.monotonic() + LEAST_S
        while not self._last.done():
            left_s = min(until_s, max(_ends_at_s, least_s)) - time.monotonic()
            if left_s <= 0:
                raise Hanging
            wait([self._last], min(left_s, _CHECK_S))
        return self._last.result()

    def run(self, work: Callable[[], T], within_s: float) -> T:
        """Run ``work`` and return its result.

        Raises ``Hanging`` if it takes longer than ``within_s``, or if it cannot be started because
        the thread is busy.
        """
        if not self.give(work):
            raise Hanging
        return self.result(time.monotonic() + within_s)

    def close(self) -> None:
        """End the thread immediately, or as soon as its current call returns."""
        if self._thread is not None:
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            try:
                future.set_result(work())
            except Exception as err:  # noqa: BLE001 - raised again by the caller of ``result``
                future.set_exception(err)
            del job, future, work  # free the result, which could be large, before the next job
