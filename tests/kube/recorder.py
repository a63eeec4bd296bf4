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
        """Everything so far, once that is ``enough``; fails after ``timeout_s`` seconds.

        ``enough`` may look at other things too: it is asked again and again.
        """
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            while not enough(self.events):
                assert time.monotonic() < deadline_s, f"waited {timeout_s} s; so far: {self.events}"
                self._changed.wait(0.01)
            return list(self.events)
