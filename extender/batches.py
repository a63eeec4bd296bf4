"""Splits long work on the event loop, so that a call of kube-scheduler waits for one part at
most."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def part_by_part(items: Sequence[T], at_once: int) -> AsyncIterator[Sequence[T]]:
    """Yield ``items`` in parts of ``at_once``; run other tasks before each part and after
    the last."""
    for start in range(0, len(items), at_once):
        await asyncio.sleep(0)
        yield items[start : start + at_once]
    await asyncio.sleep(0)
