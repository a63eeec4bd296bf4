"""How late the event loop is: what keeps it, or the interpreter's lock, keeps every call."""

import asyncio
import time
from collections.abc import Callable

EVERY_S = 0.05


async def sample_lag(observe: Callable[[float], None], every_s: float = EVERY_S) -> None:
    """For ever: ask to be woken, and tell by how many seconds that was too late."""
    while True:
        due_s = time.perf_counter() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, time.perf_counter() - due_s))
