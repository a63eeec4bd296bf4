"""Progress marks: they show that a long round of a loop still advances.

A round may make many calls, each with its own timeout. Each client calls ``progressed`` after a
call; the context determines the loop to which the call belongs, if any.
"""

from collections.abc import Callable
from contextvars import ContextVar

_mark: ContextVar[Callable[[], None]] = ContextVar("mark", default=lambda: None)


def progressed() -> None:
    """Record progress of the current loop, if any."""
    _mark.get()()


def marked_by(mark: Callable[[], None]) -> None:
    """Call ``mark`` for each progress of this task, and of the tasks that it creates."""
    _mark.set(mark)
