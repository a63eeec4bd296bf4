"""Random choices of kubelet and plugin: by a seed, or every possible one."""

import random
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import TypeVar

from tests.standin.allocations import Ids, Lots, Preferred
from tests.standin.plugin import Counts, Plugin, by_device, device_of

T = TypeVar("T")


class Drawn:
    """One way, by the seed."""

    def __init__(self, lots: random.Random) -> None:
        self._lots = lots

    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        return plugin.prefer(call.available, call.must_include, call.size, self._lots)

    def some(self, replicas: Ids, count: int) -> Ids:
        return frozenset(self._lots.sample(sorted(replicas), count))


class _Path:
    """One way through all of them, but for which replicas of a device: those are alike."""

    def __init__(self, turns: list[int]) -> None:
        self._turns = turns
        #: How many ways there were at each turn so far.
        self.widths: list[int] = []

    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        options = plugin.options(call.available, call.must_include, call.size)
        chosen = self._take(sorted(options))
        return call.must_include | first(call.available - call.must_include, chosen)

    def some(self, replicas: Ids, count: int) -> Ids:
        options = {by_device(each) for each in combinations(sorted(replicas), count)}
        return first(replicas, self._take(sorted(options)))

    def _take(self, options: list[Counts]) -> Counts:
        turn = len(self.widths)
        self.widths.append(len(options))
        if turn == len(self._turns):
            self._turns.append(0)
        return options[self._turns[turn]]


def first(replicas: Ids, chosen: Counts) -> Ids:
    """So many of each device."""
    return frozenset(
        each
        for device, count in chosen
        for each in sorted(replica for replica in replicas if device_of(replica) == device)[:count]
    )


def every_way(run: Callable[[Lots], T]) -> Iterator[T]:
    """The result of ``run`` for each way the lots may fall; it must begin afresh every time."""
    turns: list[int] = []
    while True:
        path = _Path(turns)
        yield run(path)
        while turns and turns[-1] + 1 == path.widths[len(turns) - 1]:
            turns.pop()
        if not turns:
            return
        turns[-1] += 1
