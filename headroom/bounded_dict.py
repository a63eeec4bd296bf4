"""The bounded dictionary for everything that is remembered about pods, requests and clients."""

from collections import OrderedDict
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


class Bounded(OrderedDict[K, V]):
    """A dictionary that drops its oldest entries when it has more than ``max_entries``.

    Write entries only by assignment, because other writing methods do not enforce the limit.
    """

    def __init__(self, max_entries: int) -> None:
        super().__init__()
        self.max_entries = max_entries

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        self.trim(self.max_entries)

    def trim(self, max_entries: int) -> None:
        """Drop the oldest entries until there are at most ``max_entries``."""
        while len(self) > max_entries:
            self.popitem(last=False)
