"""How the event loop goes through much: in parts, so that kube-scheduler's calls wait for one of
them at most."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import TypeVar

T = TypeVar("T")


async def part_by_part(all_there_are: Sequence[T], at_once: int) -> AsyncIterator[Sequence[T]]:
    """So many at a time; others have their turn before each part, and after the last."""
    for start in range(0, len(all_there_are), at_once):
        await asyncio.sleep(0)
        yield all_there_are[start : start + at_once]
    await asyncio.sleep(0)
