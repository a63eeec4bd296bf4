"""Decides how long we wait for somebody else's code, and what is left of it when it never returns.

A driver call that hangs cannot be cancelled: it sits in the driver, and its thread with it. So such
calls are made in threads of their own, one for each thing that can hang by itself, and awaited with
a deadline. Whoever misses it is abandoned: nobody waits for it, nothing more is given to its thread
and no second thread is made for it, until it returns. What it brings then is too old, and dropped.
"""

import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

#: When the process ends, calls that are awaited get this long together, and each call ``LEAST_S``.
ENDING_S = 1.0
LEAST_S = 0.2
#: How soon a wait notices that the process ends.
_LOOK_S = 0.25

_ends_at_s = float("inf")


def hurry() -> None:
    """From now on wait for calls only briefly, because the process ends. For signal handlers."""
    global _ends_at_s
    _ends_at_s = min(_ends_at_s, time.monotonic() + ENDING_S)


class Hanging(Exception):
    """The job did not return in time, or the one before it still has not."""


class _Job(Generic[T]):
    def __init__(self, work: Callable[[], T]) -> None:
        self._work = work
        self._ended = threading.Event()
        self._value: T
        self._error: Exception | None = None

    def run(self) -> None:
        try:
            self._value = self._work()
        except Exception as err:  # noqa: BLE001 - handed to whoever awaits the job
            self._error = err
        self._ended.set()

    @property
    def ended(self) -> bool:
        return self._ended.is_set()

    def result(self, until_s: float) -> T:
        least_s = time.monotonic() + LEAST_S
        while not self._ended.is_set():
            left_s = min(until_s, max(_ends_at_s, least_s)) - time.monotonic()
            if left_s <= 0:
                raise Hanging
            self._ended.wait(min(left_s, _LOOK_S))
        if self._error is not None:
            raise self._error
        return self._value


class Worker(Generic[T]):
    """One thread, and at most one job in it. Not for use by several threads at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: queue.SimpleQueue[_Job[T] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: _Job[T] | None = None

    @property
    def busy(self) -> bool:
        """Whether the last job has not returned yet."""
        return self._last is not None and not self._last.ended

    @property
    def thread_id(self) -> int | None:
        return None if self._thread is None else self._thread.ident

    def give(self, work: Callable[[], T]) -> bool:
        """Have ``work`` done; False, and it is not, while the last job has not returned.

        Also where the machine has no thread for it.
        """
        if self.busy:
            return False
        if self._thread is None:
            # A daemon: a call that never returns must not keep the process from ending.
            thread = threading.Thread(target=self._serve, name=self._name, daemon=True)
            try:
                thread.start()
            except RuntimeError:
                return False  # the machine has no thread left for us; perhaps next time
            self._thread = thread
        self._last = _Job(work)
        self._jobs.put(self._last)
        return True

    def result(self, until_s: float) -> T:
        """What the last job returned or raised; ``Hanging`` where it has not by ``until_s``.

        ``until_s`` is a time of the monotonic clock.
        """
        if self._last is None:
            raise Hanging
        return self._last.result(until_s)

    def close(self) -> None:
        """Let the thread end, at once or when its call returns."""
        if self._thread is not None:
            self._jobs.put(None)

    def _serve(self) -> None:
        while (job := self._jobs.get()) is not None:
            job.run()
            del job  # what it read is not kept until the next one comes
