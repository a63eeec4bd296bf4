"""Keeps values and sums of nodes, because few nodes of a large fleet change between two calls."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from math import inf
from operator import add, sub
from typing import Any, Generic, TypeVar

from headroom.core.placement.snapshot import NodeTerms, Snapshot
from headroom.core.placement.updated_nodes import UpdatedNodes

T = TypeVar("T")
K = TypeVar("K")
N = TypeVar("N", int, float)


class PerNode(Generic[T]):
    """A value of each node. It is computed again only if one of its sources is another object."""

    def __init__(self) -> None:
        self._updated = UpdatedNodes()
        #: The sources and the value of each node, by name.
        self._known: dict[str, tuple[tuple[object, ...], T]] = {}

    def values(self) -> list[T]:
        return [value for _, value in list(self._known.values())]

    def find(self, node: NodeTerms, sources: tuple[Any, ...], value: Callable[..., T]) -> T:
        """Return the value of the node, which is ``value(node, *sources)``."""
        known = self._known.get(node.name)
        if known is None or any(a is not b for a, b in zip(known[0], sources, strict=True)):
            known = self._known[node.name] = sources, value(node, *sources)
        return known[1]

    def drop_others(self, snap: Snapshot) -> list[tuple[str, T]]:
        """Drop the nodes that are not in the snapshot. Return their names and values."""
        if len(self._known) <= len(snap.nodes):
            return []
        gone = [(n, self._known.pop(n, None)) for n in self._known.keys() - snap.row_of.keys()]
        return [(name, known[1]) for name, known in gone if known]  # another thread may drop some

    def update(
        self,
        snap: Snapshot,
        sources: Callable[[NodeTerms], tuple[Any, ...]],
        value: Callable[..., T],
        now_s: float = -inf,
    ) -> Iterator[tuple[str, T | None, T | None]]:
        """Yield (name, last value, new value) of each node that was updated or is gone. The new
        value of a node that is gone is None.

        ``now_s`` is the argument of ``UpdatedNodes.since_last``. Only one thread at a time may call
        this, always with snapshots of the same state.
        """
        for row in self._updated.since_last(snap, now_s):
            node = snap.nodes[row]
            known = self._known.get(node.name)
            yield node.name, known and known[1], self.find(node, sources(node), value)
        for name, gone in self.drop_others(snap):
            yield name, gone, None


class Sums(Generic[K, N]):
    """Sums over all nodes by key. They are updated with differences, so they are exact only for
    integers and for multiples of a power of 2."""

    def __init__(self) -> None:
        self.totals: dict[K, list[N]] = {}
        self._counts = Counter[K]()

    def replace(
        self, before: Mapping[K, Sequence[N]] | None, after: Mapping[K, Sequence[N]] | None
    ) -> None:
        """Replace a node's part of the sums. The sequences of all keys have the same length and
        order."""
        if before is after or before == after:
            return
        for key, numbers in (after or {}).items():
            totals = self.totals.get(key)
            self.totals[key] = list(numbers if totals is None else map(add, totals, numbers))
            self._counts[key] += 1
        for key, numbers in (before or {}).items():
            self._counts[key] -= 1
            if self._counts[key]:
                self.totals[key] = list(map(sub, self.totals[key], numbers))
            else:
                del self.totals[key], self._counts[key]
