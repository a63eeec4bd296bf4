"""Judges whether memory is overcommitted. It imports nothing of the product."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

M = TypeVar("M", bound=Hashable)


def excess(taken: Iterable[tuple[M, int]], has: Mapping[M, int]) -> dict[M, int]:
    """Map each memory of which more is taken than it has to the difference.

    ``taken``: a memory and an amount, for each pod, container or process that sits there; all
    amounts are in one unit.
    """
    total = Counter[M]()
    for memory, amount in taken:
        total[memory] += amount
    return {memory: sum_ - has[memory] for memory, sum_ in total.items() if sum_ > has[memory]}
