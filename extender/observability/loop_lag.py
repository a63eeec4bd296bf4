"""Measures how late the event loop is. Whatever blocks it, or holds the interpreter's lock, delays
each call."""

import asyncio
import time
from collections.abc import Callable

EVERY_S = 0.05


async def sample_lag(observe: Callable[[float], None], every_s: float = EVERY_S) -> None:
    """Sleep again and again, and pass to ``observe`` by how many seconds each sleep ended late."""
    while True:
        due_s = time.perf_counter() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, time.perf_counter() - due_s))
