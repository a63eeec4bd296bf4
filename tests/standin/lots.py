"""Random choices of kubelet and plugin, drawn with a seed or enumerated."""

import random
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import TypeVar

from tests.standin.allocations import Ids, Lots, Preferred
from tests.standin.plugin import Counts, Plugin, by_device, device_of

T = TypeVar("T")


class Drawn:
    """Draws the choices with the seed."""

    def __init__(self, lots: random.Random) -> None:
        self._lots = lots

    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        return plugin.prefer(call.available, call.must_include, call.size, self._lots)

    def some(self, replicas: Ids, count: int) -> Ids:
        return frozenset(self._lots.sample(sorted(replicas), count))


class _Path:
    """One path through all choices, except the choice between replicas of one device, because these
    are equivalent.
    """

    def __init__(self, turns: list[int]) -> None:
        self._turns = turns
        #: Number of alternatives at each choice so far.
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
    """Return this number of replicas of each device."""
    return frozenset(
        each
        for device, count in chosen
        for each in sorted(replica for replica in replicas if device_of(replica) == device)[:count]
    )


def every_way(run: Callable[[Lots], T]) -> Iterator[T]:
    """Return the result of ``run`` for every sequence of choices. ``run`` must start from the same
    state every time.
    """
    turns: list[int] = []
    while True:
        path = _Path(turns)
        yield run(path)
        while turns and turns[-1] + 1 == path.widths[len(turns) - 1]:
            turns.pop()
        if not turns:
            return
        turns[-1] += 1
