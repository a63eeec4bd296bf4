"""Measures when API server events arrive, with one clock for all watches."""

import time
from collections.abc import Callable, Sequence
from typing import Self

from tests.controlplane import ControlPlane
from tests.follow import Follower, Object


class Watch:
    """Records the changes of the objects under a path during the context."""

    def __init__(self, plane: ControlPlane, path: str) -> None:
        self._follower = Follower(plane, path, self._record)
        self._began_s = time.monotonic()
        #: The changed objects in order, each with its time on the monotonic clock.
        self.changes: list[tuple[float, Object]] = []

    def __enter__(self) -> Self:
        self._follower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._follower.stop()

    def _record(self, what: str, objects: Sequence[Object]) -> None:
        if what != "LISTED":
            self.changes += [(time.monotonic(), each) for each in objects]

    def quiet_s(self) -> float:
        """Return the seconds since the last change, or since the start of the watch if there was no
        change.
        """
        changes = list(self.changes)
        return time.monotonic() - (changes[-1][0] if changes else self._began_s)

    def first(
        self, name: str, true: Callable[[Object], object], after_s: float = 0.0
    ) -> float | None:
        """Return the time when the watch first showed the object in this state, or None."""
        for at_s, changed in list(self.changes):
            if at_s >= after_s and changed["metadata"]["name"] == name and true(changed):
                return at_s
        return None
