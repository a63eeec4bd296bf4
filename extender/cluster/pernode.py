"""What is reckoned of each node again and again, for whoever looks at the whole fleet: kept for as
long as the node is the same object, so that a look costs a comparison for each that is."""

from collections.abc import Callable, Iterable, Iterator
from typing import Generic, TypeVar

from extender.placement.snapshot import NodeTerms

T = TypeVar("T")


class PerNode(Generic[T]):
    """For one thread at a time. ``reckon`` looks at nothing but the node."""

    def __init__(self, reckon: Callable[[NodeTerms], T]) -> None:
        self._reckon = reckon
        self._kept: dict[str, tuple[NodeTerms, T]] = {}

    def of(self, nodes: Iterable[NodeTerms]) -> Iterator[T]:
        """Of each of these, in their order; of others nothing is kept."""
        kept: dict[str, tuple[NodeTerms, T]] = {}
        for node in nodes:
            known = self._kept.get(node.name)
            if known is None or known[0] is not node:
                known = node, self._reckon(node)
            kept[node.name] = known
            yield known[1]
        self._kept = kept
