"""What a test waits for: asked again and again, and named where it does not come."""

import asyncio
import time
from collections.abc import Callable

PATIENCE_S = 60.0


def until(true: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """Returns as soon as it is so; long patience costs nothing where it is not needed."""
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)


async def until_then(true: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """The same on a loop, where others go on meanwhile."""
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        await asyncio.sleep(0)
