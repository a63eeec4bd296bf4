"""Checks whether memory is overcommitted. Imports nothing from the product, so that both cannot
share a bug.
"""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

M = TypeVar("M", bound=Hashable)


def excess(taken: Iterable[tuple[M, int]], has: Mapping[M, int]) -> dict[M, int]:
    """Return how far the use of each overcommitted memory exceeds its size. Omit other memories.

    ``taken`` has a memory and an amount for each pod, container or process that uses the memory.
    ``has`` maps each memory to its size. Raises ``KeyError`` if a memory is missing from ``has``.
    All amounts have the same unit.
    """
    total = Counter[M]()
    for memory, amount in taken:
        total[memory] += amount
    return {memory: sum_ - has[memory] for memory, sum_ in total.items() if sum_ > has[memory]}
