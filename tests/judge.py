"""Judges whether memory is overcommitted. It imports nothing of the product."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from typing import TypeVar

M = TypeVar("M", bound=Hashable)


def excess(taken: Iterable[tuple[M, int]], has: Mapping[M, int]) -> dict[M, int]:
    """Return by memory how far its use exceeds its size, without memories that have no excess.

    ``taken`` has a memory and an amount for each pod, container or process on it. ``has`` maps each
    memory to its size, and a missing memory raises ``KeyError``. All amounts have the same unit.
    """
    total = Counter[M]()
    for memory, amount in taken:
        total[memory] += amount
    return {memory: sum_ - has[memory] for memory, sum_ in total.items() if sum_ > has[memory]}
