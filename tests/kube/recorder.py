"""Receives events in place of the single writer, and records them."""

import threading
import time
from collections.abc import Callable, Sequence

from headroom.core.cluster.changes import Event
from tests.waiting import PATIENCE_S


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []
        self._changed = threading.Condition()

    def __call__(self, events: Sequence[Event]) -> None:
        with self._changed:
            self.events += events
            self._changed.notify_all()

    def until(
        self, enough: Callable[[list[Event]], object], timeout_s: float = PATIENCE_S
    ) -> list[Event]:
        """Return all events when they are ``enough``. Fail after ``timeout_s`` seconds.

        ``enough`` may also check other state, because it is called repeatedly.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not enough(self.events):
                assert time.monotonic() < deadline_s, f"waited {timeout_s} s; so far: {self.events}"
                self._changed.wait(0.01)
            return list(self.events)
