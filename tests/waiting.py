"""Waits for a condition, and says which one did not come."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0


def until(
    true: Callable[[], object],
    what: str,
    within_s: float = PATIENCE_S,
    every_s: float = 0.02,
    logs: Callable[[], str] = str,
) -> float:
    """Returns the seconds that it took; long patience costs nothing if it is not needed.

    ``logs`` returns what to show if it does not come. Raises ``AssertionError``.
    """
    began_s = time.monotonic()
    while not true():
        if time.monotonic() - began_s > within_s:
            raise AssertionError(f"not within {within_s:g} s: {what}\n{logs()}")
        time.sleep(every_s)
    return time.monotonic() - began_s


async def until_then(true: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """The same on a loop, where others go on meanwhile."""
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0.001)
