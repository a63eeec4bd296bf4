"""Which device the kubelet and the plugin could give next, and how many replicas of it at most.

Nobody outside the kubelet decides that. Pods that are bound but not yet observed (*picks on their
way*) are admitted in any order, each of them or not at all; pods that are ending hold their
replicas or have let go of them; of equal devices the plugin takes any. What can happen all the
same follows from counting:

*distributed* takes the device with the fewest replicas taken, so picks fill the lowest level
first, like water. A device that could hold its n-th replica at level v gets it when everybody
else stands at v or higher, or is full: not before all free replicas of others below v are gone.
So the fewest picks after which a device can have got x replicas are those x and the free replicas
that others have below the level of the last of them. A replica let go counts for its own device
only: it lowers it, and another device that lets go only gets in its way.

*packed* takes the device with the most, and fills it: a device has its turn when those that hold
more, and cannot fall below it by letting go, are full.

*steered* takes the device that the ledger chose: the agent answers in the plugin's stead. As long
as pods are on their way it is the same one for all of them, so that it does not matter for which
of them the kubelet asks; for the next to come after those it may be any.

Of an unknown policy it is only known that it takes a free replica. Where the topology manager
aligns, the plugin is offered the replicas of some NUMA nodes only; the first of those is the first
of its own NUMA node, so every NUMA node is a world of its own, to which all picks may go.

``tests/placement/brute.py`` tries every order, subset and tie and finds the same.
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
    #: Allocated or unhealthy: the plugin cannot tell one from the other.
    taken: int
    #: Of those taken, how many pods hold that are ending: there, or gone already.
    leaving: int = 0


class Choice(Protocol):
    """What the plugin could do with some devices; they are meant by their place in the order."""

    def first(self, device: int) -> int | None:
        """The picks that must come before the device can be given; None: it never can."""
        ...

    def most(self, device: int, picks: int, gone: int) -> int:
        """The most replicas of the device that so many picks can take, when at most ``gone`` of
        its replicas that are leaving have been let go."""
        ...


def choice(policy: Policy, stocks: Sequence[Stock], reserved: int | None = None) -> Choice:
    """The choice among devices of one resource that are offered together; where it is steered,
    ``promised`` is the place of the device that those on their way go to, if any are."""
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
        #: Level -> free replicas of all devices below it.
        self._below = [0, *accumulate(accumulate(steps))]

    def first(self, device: int) -> int | None:
        stock = self._stocks[device]
        if stock.free + stock.leaving == 0:
            return None
        return self._below[stock.taken - stock.leaving]  # its own are not below that

    def most(self, device: int, picks: int, gone: int) -> int:
        stock, below = self._stocks[device], self._below
        lowest = stock.taken - gone

        def needed(count: int) -> int:
            """Picks until the device can have got ``count``."""
            level = lowest + count - 1
            own = min(max(level - stock.taken, 0), stock.free)
            return count + below[level] - own

        # Unless somebody is far below it, a device takes one or two: look there first.
        return bisect_right(range(1, min(stock.free + gone, picks) + 1), picks, key=needed)


class _Packed:
    def __init__(self, stocks: Sequence[Stock]) -> None:
        self._stocks = stocks

    def first(self, device: int) -> int | None:
        stock = self._stocks[device]
        if stock.free + stock.leaving == 0:
            return None
        # What is full must let go of a replica before it can be given.
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
    """Devices without a free replica too: whatever is let go of, by whom and when."""

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
