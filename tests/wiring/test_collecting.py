"""The collector looks at all that is held when nobody calls, and hardly ever otherwise."""

import asyncio
import contextlib
from unittest.mock import Mock, patch

from extender.web.calls import Calls
from extender.wiring.memory import _MOST_NEW, _SOME_NEW, collect_in_lulls


def collections(calling: bool, at_most_s: float, new: int = _SOME_NEW + 1) -> tuple[Mock, int]:
    """The collector, and how often it went through everything in 20 lulls, the first time aside."""

    async def play() -> tuple[Mock, int]:
        calls = Calls()
        with patch("extender.wiring.memory.gc") as collector:
            collector.get_count.return_value = new, 0, 0
            task = asyncio.create_task(collect_in_lulls(calls, 0.005, 0.0, at_most_s))
            for _ in range(20):
                calls.begun += calling
                await asyncio.sleep(0.005)
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task
            return collector, collector.collect.call_count - 1

    return asyncio.run(play())


def test_it_collects_when_nobody_called_for_a_while() -> None:
    collector, times = collections(calling=False, at_most_s=3600.0)
    assert times > 0
    collector.freeze.assert_called_once()
    # By itself it never looks at anything, as long as the process serves.
    assert [each[0] for each in collector.method_calls][:3] == ["collect", "freeze", "disable"]
    collector.enable.assert_called_once()


def test_it_leaves_calls_alone_but_not_for_ever() -> None:
    assert collections(calling=True, at_most_s=3600.0)[1] <= 3  # a lull on a busy machine
    assert collections(calling=True, at_most_s=0.0)[1] > 3
    assert collections(calling=True, at_most_s=3600.0, new=_MOST_NEW + 1)[1] > 3


def test_what_little_is_new_is_left_alone() -> None:
    assert collections(calling=False, at_most_s=0.0, new=_SOME_NEW)[1] == 0
