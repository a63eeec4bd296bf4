"""Checks that garbage is collected, and that the garbage collector does not visit objects from the
first lists again.
"""

import asyncio
import contextlib
import gc
import weakref
from collections.abc import Awaitable, Callable, Iterator

import pytest

from headroom.runtime.memory_policy import collect_garbage
from tests.waiting import PATIENCE_S


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def _collector() -> Iterator[None]:
    """Restore the settings of the garbage collector after the test."""
    before = gc.get_threshold()
    yield
    gc.unfreeze()
    assert gc.get_threshold() == before


def play(script: Callable[[], Awaitable[None]], every_s: float) -> None:
    async def played() -> None:
        task = asyncio.create_task(collect_garbage(every_s))
        await asyncio.sleep(0)
        await asyncio.wait_for(script(), PATIENCE_S)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    asyncio.run(played())


def test_listed_objects_are_frozen_and_a_full_collection_waits_for_its_time() -> None:
    held = [[number] for number in range(1_000)]

    async def script() -> None:
        assert gc.get_freeze_count() >= len(held)
        passes = gc.get_stats()[2]["collections"]
        some = [[number] for number in range(300_000)]
        assert gc.get_stats()[1]["collections"] > 0
        assert gc.get_stats()[2]["collections"] == passes
        del some

    play(script, every_s=3600.0)


def test_garbage_is_freed_in_time() -> None:
    async def script() -> None:
        freed = asyncio.Event()
        weakref.finalize(Cycle(), freed.set)
        await freed.wait()

    play(script, every_s=0.001)


def test_young_garbage_does_not_wait_for_a_full_collection() -> None:
    async def script() -> None:
        gone = weakref.ref(Cycle())
        held = []
        while gone() is not None:
            held.append([0])
            assert len(held) < 1_000_000

    play(script, every_s=3600.0)
