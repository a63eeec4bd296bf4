"""Marks of progress: whoever runs a loop learns that a long round of it still moves.

A round may make many calls, each bounded in time. Who makes one calls ``progressed`` when it is
done; the loop that it belongs to, if any, is found by its context.
"""

from collections.abc import Callable
from contextvars import ContextVar

_mark: ContextVar[Callable[[], None]] = ContextVar("mark", default=lambda: None)


def progressed() -> None:
    """The loop that this runs in, if any, has made progress."""
    _mark.get()()


def marked_by(mark: Callable[[], None]) -> None:
    """From now on, in this task and those that it creates, progress is told to ``mark``."""
    _mark.set(mark)
