"""What is summed over the whole fleet again and again, for whoever looks: kept from look to look,
so that each costs what has changed since the last."""

from collections.abc import Callable, Iterable, Mapping
from operator import add, is_, sub

import numpy as np

from extender.placement.snapshot import NodeTerms

#: What one node adds to, and how much: as many numbers in each.
Part = Mapping[str, tuple[int, ...]]


class RunningSums:
    """For one thread at a time. ``part`` looks at nothing but the node; ``between`` is called
    before each that is new."""

    def __init__(
        self, part: Callable[[NodeTerms], Part], between: Callable[[], None] = lambda: None
    ) -> None:
        self._part, self._between = part, between
        #: What is in the sums, and what each of these added.
        self._nodes: list[NodeTerms] = []
        self._parts: list[Part] = []
        self._sums: dict[str, tuple[int, ...]] = {}

    def of(self, nodes: tuple[NodeTerms, ...]) -> Mapping[str, tuple[int, ...]]:
        """The sums; without those that are 0 in all numbers. Good until the next look."""
        while len(self._nodes) > len(nodes):
            self._nodes.pop()
            self._change(self._parts.pop(), sub)
        same = np.fromiter(map(is_, nodes, self._nodes), np.bool_)
        for row in [*np.flatnonzero(~same).tolist(), *range(len(same), len(nodes))]:
            self._between()
            now = self._part(nodes[row])
            for was in self._parts[row : row + 1]:
                self._change(was, sub)
            self._change(now, add)
            self._nodes[row : row + 1], self._parts[row : row + 1] = [nodes[row]], [now]
        return self._sums

    def parts(self, rows: Iterable[int]) -> Iterable[Part]:
        """What each of these nodes added at the last look."""
        return (self._parts[row] for row in rows)

    def _change(self, part: Part, by: Callable[[int, int], int]) -> None:
        for key, numbers in part.items():
            known = self._sums.get(key)
            sums = tuple(map(by, known or (0,) * len(numbers), numbers))
            if any(sums):
                self._sums[key] = sums
            else:
                self._sums.pop(key, None)
