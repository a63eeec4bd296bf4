"""Waits for conditions, and raises errors that describe the condition."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 180.0
_LONGEST_PAUSE_S = 0.25


def until(
    true: Callable[[], object],
    what: str,
    within_s: float = PATIENCE_S,
    every_s: float = 0.02,
    logs: Callable[[], str] = str,
) -> float:
    """Wait until ``true()`` is true. Return the seconds that it took.

    Polls every ``every_s`` seconds. Polls more often at first, because most waits are short, and
    less often during a long wait, because polling uses CPU. Raise ``AssertionError`` with ``what``
    and the text of ``logs()`` after ``within_s``.
    """
    began_s = time.monotonic()
    while not true():
        waited_s = time.monotonic() - began_s
        if waited_s > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}\n{logs()}")
        first_s = min(every_s, every_s / 10 + waited_s / 2)
        time.sleep(max(first_s, min(waited_s / 20, _LONGEST_PAUSE_S)))
    return time.monotonic() - began_s


async def until_then(true: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """Wait like ``until`` in a coroutine, without blocking the event loop."""
    began_s = time.monotonic()
    while not true():
        waited_s = time.monotonic() - began_s
        assert waited_s < within_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(max(0.001, min(waited_s / 20, _LONGEST_PAUSE_S)))
