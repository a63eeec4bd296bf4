"""Receives events in place of the single writer, and records them."""

from collections.abc import Callable, Sequence

from headroom.core.cluster.changes import Event
from tests.waiting import PATIENCE_S, until


class Recorder:
    def __init__(self) -> None:
        self.events: list[Event] = []

    def __call__(self, events: Sequence[Event]) -> None:
        self.events += events

    def until(
        self, enough: Callable[[list[Event]], object], timeout_s: float = PATIENCE_S
    ) -> list[Event]:
        """Return all events when they are ``enough``."""
        until(
            lambda: enough(self.events), "enough events", timeout_s, logs=lambda: f"{self.events}"
        )
        return list(self.events)
