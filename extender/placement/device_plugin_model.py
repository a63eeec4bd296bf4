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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from contract.annotations import DeviceChoice
from contract.gpunode import MAX_REPLICAS, Device, Plugin

#: More picks than there are replicas on any node.
ALL_PICKS = 1 << 20

Policy = Literal["distributed", "packed", "unknown", "any", "steered"]


@dataclass(frozen=True, slots=True)
class Stock:
    """The replicas of one device as the plugin counts them."""

    free: int
    #: Allocated or unhealthy, which the plugin does not distinguish.
    taken: int
    #: Part of ``taken`` that terminating pods hold or have released already.
    leaving: int = 0


class Choice:
    """The possible choices of the plugin among some devices; ``device`` is an index of them.

    With an unknown policy, it can choose any device with a free replica.
    """

    def __init__(self, stocks: Sequence[Stock]) -> None:
        self._stocks = stocks

    def first(self, device: int) -> int | None:
        """Return how many picks come before the device at least; None if it is never chosen."""
        stock = self._stocks[device]
        return 0 if stock.free + stock.leaving else None

    def most(self, device: int, picks: int, gone: int) -> int:
        """Return the most replicas of the device among ``picks`` picks.

        At most ``gone`` of the replicas that terminating pods hold have been released.
        """
        return min(picks, self._stocks[device].free + gone)


class _Distributed(Choice):
    def __init__(self, stocks: Sequence[Stock]) -> None:
        super().__init__(stocks)
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


class _Packed(Choice):
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


class _Every(Choice):
    """Any device, even without a free replica: other pods may release replicas at any time."""

    def first(self, device: int) -> int | None:
        return 0

    def most(self, device: int, picks: int, gone: int) -> int:
        return picks


class _Steered(Choice):
    def __init__(self, stocks: Sequence[Stock], reserved: int | None) -> None:
        super().__init__(stocks)
        self._reserved = reserved

    def first(self, device: int) -> int | None:
        open_to_all = self._reserved is None or self._reserved == device
        return 0 if open_to_all and self._stocks[device].free else None

    def most(self, device: int, picks: int, gone: int) -> int:
        return super().most(device, picks, gone) if self._reserved in (None, device) else 0


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
            return Choice(stocks)
        case "any":
            return _Every(stocks)
        case "steered":
            return _Steered(stocks, reserved)


@dataclass(frozen=True, slots=True)
class PluginChoice:
    """The plugin's possible choices of one device, among the devices offered together with it."""

    policy: Policy
    #: Replicas that terminating pods hold.
    leaving: int
    #: Replicas allocated to no pod in the report, perhaps to an unconfirmed pod.
    unexplained: int
    #: Replicas of its resource that unconfirmed pods will get, on the whole node.
    picks: int
    #: How many replicas the plugin allocates before one of this device; None if it never can.
    first: int | None
    _choice: Choice
    _index: int

    def most(self, newcomers: int, gone: int) -> int:
        """Return the most replicas of the device that unconfirmed and new pods can get.

        New pods take ``newcomers`` picks. At most ``gone`` of the replicas that terminating pods
        hold have been released.
        """
        return self._choice.most(self._index, self.picks + newcomers, gone)


def plugin_choices(
    devices: Sequence[Device],
    plugin: Plugin,
    device_choice: DeviceChoice,
    picks: Mapping[str, int],
    reserved: Mapping[str, Set[str]],
    leaving: Sequence[int],
    explained: Sequence[int],
) -> list[PluginChoice]:
    """Return the plugin's possible choices of each device, in the order of ``devices``.

    ``picks``: resource -> replicas that unconfirmed pods wait for. ``reserved``: resource -> the
    devices that the ledger chose for them, "" if the plugin chooses. ``leaving`` and ``explained``
    have, for each device, the replicas that terminating pods and all pods hold in the report.
    """
    times = Counter(device.uuid for device in devices)
    doubted = {d.resource for d in devices if times[d.uuid] > 1 or not _countable(d)}
    # If the policy is unknown, the kubelet may offer the devices of one NUMA node only.
    aligned = plugin.topology_manager_policy != "none"
    offered: dict[tuple[str, int | None], list[int]] = {}
    for slot, device in enumerate(devices):
        numa_node = device.numa_node if aligned else None
        offered.setdefault((device.resource, numa_node), []).append(slot)
    # The kubelet may choose among several NUMA nodes regardless of the preferred allocation.
    times_offered = Counter(resource for resource, _ in offered)
    divided = {resource for resource, count in times_offered.items() if count > 1}
    found: dict[int, PluginChoice] = {}
    for (resource, _), slots in offered.items():
        # Gated and pinned nodes are treated as predicted ones, which is safe.
        policy: Policy = plugin.allocation_policy
        wanted = reserved.get(resource, frozenset())
        wanted_index = None
        if resource in doubted or any(wanted):
            # The plugin does not choose for pods that were bound while the resource was steered.
            policy = "unknown"
        if resource in plugin.steered and _shared(devices[slot] for slot in slots):
            policy = "unknown"
            index_of = {devices[slot].uuid: index for index, slot in enumerate(slots)}
            if resource not in doubted | divided and wanted <= index_of.keys() and len(wanted) < 2:
                policy = "steered"
                wanted_index = next((index_of[uuid] for uuid in wanted), None)
        if device_choice is DeviceChoice.ANY:
            policy = "any"
        stocks = [_stock(devices[slot], leaving[slot]) for slot in slots]
        chosen = choice(policy, stocks, wanted_index)
        for index, (slot, stock) in enumerate(zip(slots, stocks, strict=True)):
            found[slot] = PluginChoice(
                policy=policy,
                leaving=stock.leaving,
                unexplained=max(0, devices[slot].replicas.allocated - explained[slot]),
                picks=picks.get(resource, 0),
                first=chosen.first(index),
                _choice=chosen,
                _index=index,
            )
    return [found[slot] for slot in range(len(devices))]


def _shared(devices: Iterable[Device]) -> bool:
    """Return whether the agent steers these devices: it steers only shared ones."""
    return any(device.sharing != "none" for device in devices)


def may_have_free_replica(device: Device) -> bool:
    """Return whether the plugin may have a free replica of the device.

    The plugin counts by itself, so implausible reported counts do not exclude one.
    """
    replicas = device.replicas
    return replicas.free > 0 or min(replicas.free, replicas.allocated, replicas.unhealthy) < 0


def _countable(device: Device) -> bool:
    replicas = device.replicas
    believable = min(replicas.free, replicas.allocated, replicas.unhealthy) >= 0
    return believable and replicas.total <= MAX_REPLICAS


def _stock(device: Device, leaving: int) -> Stock:
    replicas = device.replicas
    if not _countable(device):
        return Stock(free=ALL_PICKS if may_have_free_replica(device) else 0, taken=0)
    taken = replicas.allocated + replicas.unhealthy
    return Stock(replicas.free, taken, min(leaving, taken))
