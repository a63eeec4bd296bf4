"""Models which device the kubelet and the plugin can choose next, and how many replicas of it.

Only the kubelet decides the order. It admits unconfirmed pods in any order, and may reject any of
them. Terminating pods hold their replicas or have released them. Between equal devices the plugin
may choose either. A *pick* is one replica that the plugin allocates. Counting picks bounds what can
happen:

*distributed* chooses the device with the fewest replicas taken, so picks fill the lowest level
first. A device with v replicas taken gets its next one only after all other devices have at least v
taken or are full. So before a device can get x replicas, the plugin has allocated those x, and all
free replicas of other devices below the level of the last of them. A released replica helps only
its own device: it lowers that device's level, and other devices with released replicas come first.

*packed* chooses the device with the most replicas taken, and fills it. A device is next once all
devices with more replicas taken are full, except those that released replicas can put below it.

*steered* chooses the device that the ledger chose: the agent answers instead of the plugin. While
there are unconfirmed pods, it is one device for all of them, because the kubelet does not identify
the pod. For the next pod after those it can be any device.

*unknown* chooses any device with a free replica.

If the topology manager aligns, the kubelet offers the plugin only the replicas of some NUMA nodes.
Then each NUMA node is modelled separately, and all picks may go to any of them.

``tests/placement/brute.py`` tries every order, subset and tie, and gets equal results.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, Protocol

Policy = Literal["distributed", "packed", "unknown", "any", "steered"]


@dataclass(frozen=True, slots=True)
class Stock:
    """The replicas of one device as the plugin counts them."""

    free: int
    #: Allocated or unhealthy, which the plugin does not distinguish.
    taken: int
    #: Part of ``taken`` that terminating pods hold or have released already.
    leaving: int = 0


class Choice(Protocol):
    """The possible choices of the plugin among some devices; ``device`` is an index of them."""

    def first(self, device: int) -> int | None:
        """Return how many picks come before the device at least; None if it is never chosen."""
        ...

    def most(self, device: int, picks: int, gone: int) -> int:
        """Return the most replicas of the device among ``picks`` picks.

        At most ``gone`` of the replicas that terminating pods hold have been released.
        """
        ...


def choice(policy: Policy, stocks: Sequence[Stock], reserved: int | None = None) -> Choice:
    """Return the choice among devices of one resource that the kubelet offers together.

    ``reserved`` matters for steered devices: the index of the unconfirmed pods' device, if any.
    """
    match policy:
        case "distributed":
            return _Distributed(stocks)
        case "packed":
            return _Packed(stocks)
        case "unknown":
            return _AnyFree(stocks)
        case "any":
            return _Every()
        case "steered":
            return _Steered(stocks, reserved)


class _Distributed:
    def __init__(self, stocks: Sequence[Stock]) -> None:
        self._stocks = stocks
        steps = [0] * (2 + max((stock.taken + stock.free for stock in stocks), default=0))
        for stock in stocks:
            steps[stock.taken] += 1
            steps[stock.taken + stock.free] -= 1
        #: Level -> free replicas of all devices below that level.
        self._below = [0, *accumulate(accumulate(steps))]

    def first(self, device: int) -> int | None:
        stock = self._stocks[device]
        if stock.free + stock.leaving == 0:
            return None
        return self._below[stock.taken - stock.leaving]  # the device's own are not below its level

    def most(self, device: int, picks: int, gone: int) -> int:
        stock, below = self._stocks[device], self._below
        lowest = stock.taken - gone

        def needed(count: int) -> int:
            """Return the fewest picks with which the device can get ``count``."""
            level = lowest + count - 1
            own = min(max(level - stock.taken, 0), stock.free)
            return count + below[level] - own

        # Bisect on the count: ``needed`` grows with it.
        return bisect_right(range(1, min(stock.free + gone, picks) + 1), picks, key=needed)


class _Packed:
    def __init__(self, stocks: Sequence[Stock]) -> None:
        self._stocks = stocks

    def first(self, device: int) -> int | None:
        stock = self._stocks[device]
        if stock.free + stock.leaving == 0:
            return None
        # A full device must release a replica first.
        level = stock.taken - (stock.free == 0)
        return sum(other.free for other in self._stocks if other.taken - other.leaving > level)

    def most(self, device: int, picks: int, gone: int) -> int:
        before = self.first(device)
        stock = self._stocks[device]
        return 0 if before is None else min(max(picks - before, 0), stock.free + gone)


class _AnyFree:
    def __init__(self, stocks: Sequence[Stock]) -> None:
        self._stocks = stocks

    def first(self, device: int) -> int | None:
        stock = self._stocks[device]
        return 0 if stock.free + stock.leaving else None

    def most(self, device: int, picks: int, gone: int) -> int:
        return min(picks, self._stocks[device].free + gone)


class _Every:
    """Any device, even without a free replica: other pods may release replicas at any time."""

    def first(self, device: int) -> int | None:
        return 0

    def most(self, device: int, picks: int, gone: int) -> int:
        return picks


class _Steered:
    def __init__(self, stocks: Sequence[Stock], reserved: int | None) -> None:
        self._stocks = stocks
        self._reserved = reserved

    def first(self, device: int) -> int | None:
        open_to_all = self._reserved is None or self._reserved == device
        return 0 if open_to_all and self._stocks[device].free else None

    def most(self, device: int, picks: int, gone: int) -> int:
        if self._reserved not in (None, device):
            return 0
        return min(picks, self._stocks[device].free + gone)
