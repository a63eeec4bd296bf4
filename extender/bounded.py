"""The one dictionary for what is remembered of pods, requests and clients: it has a bound."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(OrderedDict[K, V]):
    """Forgets the entries that were written longest ago, beyond ``max_entries``.

    Write entries by assignment only: the other methods that write do not look at the bound.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        self.trim(self.max_entries)

    def trim(self, max_entries: int) -> None:
        while len(self) > max_entries:
            self.popitem(last=False)
