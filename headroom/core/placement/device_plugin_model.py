"""Models which device the kubelet and the plugin can choose next, and how many replicas of it.

The kubelet admits unconfirmed pods in any order, and may reject any of them. Terminating pods may
still hold their replicas or have released them. Between equal devices the plugin may choose either.
So the model computes bounds over all cases. It counts *picks*, which are single replicas that the
plugin allocates. The *level* of a device is its number of allocated replicas.

*distributed* chooses the device with the fewest allocated replicas, so picks fill the lowest level
first. A device at level v gets its next replica only after all other devices are at least at level
v or are full. So when a device gets its x-th replica, the plugin has also allocated all free
replicas of other devices below the level of this replica. If a terminating pod releases a replica,
the level of its device falls, so no other device is chosen earlier because of the release.

*packed* chooses the device with the most allocated replicas, and fills it. The plugin uses a device
only after every device at a higher level is full. Devices that can fall below it when terminating
pods release their replicas are ignored.

*steered* chooses the set of devices that the ledger chose, because the agent answers the kubelet
instead of the plugin. The kubelet does not name the pod in its request. So while there are
unconfirmed pods, only the set chosen for them is possible. Otherwise any device with a free replica
is possible. For pods whose containers request one replica each, the set is one device.

*unknown* may choose any device with a free replica. This is the worst case, for reports that do not
show how the plugin chooses.

If the topology manager aligns devices, the kubelet offers the plugin only the replicas of some NUMA
nodes. In this case each NUMA node is modelled separately, as if it could get all picks.

A test compares the bounds with ``tests/placement/brute.py``, which tries all orders, subsets and
ties.
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from headroom.contract.gpunode import MAX_REPLICAS, Device, Plugin

#: A number of picks that exceeds the number of replicas on any node.
ALL_PICKS = 1 << 20

Policy = Literal["distributed", "packed", "unknown", "steered"]


@dataclass(frozen=True, slots=True)
class Stock:
    """The replicas of one device as the plugin counts them."""

    free: int
    #: Number of allocated and unhealthy replicas, which the plugin does not distinguish.
    taken: int
    #: Part of ``taken`` that terminating pods hold in the report. The pods may have released these
    #: replicas since then.
    leaving: int = 0


class Choice:
    """The possible choices of the plugin among some devices. Arguments ``device`` are indices.

    This class models the policy *unknown*. Subclasses model other policies.
    """

    def __init__(self, stocks: Sequence[Stock]) -> None:
        self._stocks = stocks

    def first(self, device: int) -> int | None:
        """Return the minimum number of picks before the device is picked, or None if it is never
        picked."""
        stock = self._stocks[device]
        return 0 if stock.free + stock.leaving else None

    def most(self, device: int, picks: int, gone: int) -> int:
        """Return the maximum number of replicas of the device among ``picks`` picks.

        Terminating pods have released at most ``gone`` of the device's replicas.
        """
        return min(picks, self._stocks[device].free + gone)


class _Distributed(Choice):
    def __init__(self, stocks: Sequence[Stock]) -> None:
        super().__init__(stocks)
        steps = [0] * (2 + max((stock.taken + stock.free for stock in stocks), default=0))
        for stock in stocks:
            steps[stock.taken] += 1
            steps[stock.taken + stock.free] -= 1
        #: Item v is the number of free replicas of all devices below level v.
        self._below = [0, *accumulate(accumulate(steps))]

    def first(self, device: int) -> int | None:
        stock = self._stocks[device]
        if stock.free + stock.leaving == 0:
            return None
        # No free replica of the device itself is below this level.
        return self._below[stock.taken - stock.leaving]

    def most(self, device: int, picks: int, gone: int) -> int:
        stock, below = self._stocks[device], self._below
        lowest = stock.taken - gone

        def needed(count: int) -> int:
            """Return the minimum number of picks with which the device can get ``count``
            replicas."""
            level = lowest + count - 1
            own = min(max(level - stock.taken, 0), stock.free)
            return count + below[level] - own

        # Find the largest count by bisection, because ``needed`` increases with it.
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


class _Steered(Choice):
    """Chooses the set of devices reserved for unconfirmed pods, or any device with a free replica
    if there is no such reservation."""

    def __init__(self, stocks: Sequence[Stock], reserved: Set[int]) -> None:
        super().__init__(stocks)
        self._reserved = reserved

    def _is_open(self, device: int) -> bool:
        return not self._reserved or device in self._reserved

    def first(self, device: int) -> int | None:
        return 0 if self._is_open(device) and self._stocks[device].free else None

    def most(self, device: int, picks: int, gone: int) -> int:
        return super().most(device, picks, gone) if self._is_open(device) else 0


def choice(policy: Policy, stocks: Sequence[Stock], reserved: Set[int] = frozenset()) -> Choice:
    """Return the choice among devices of one resource that the kubelet offers together.

    ``reserved`` contains the indices of the devices that the ledger chose for unconfirmed pods, if
    there are any. Only the policy steered uses this argument.
    """
    match policy:
        case "distributed":
            return _Distributed(stocks)
        case "packed":
            return _Packed(stocks)
        case "unknown":
            return Choice(stocks)
        case "steered":
            return _Steered(stocks, reserved)


@dataclass(frozen=True, slots=True)
class PluginChoice:
    """When and how often the plugin can choose a device among the devices that are offered
    together."""

    policy: Policy
    #: Replicas of the device that terminating pods hold.
    leaving: int
    #: Allocated replicas of the device that no pod in the report holds. An unconfirmed pod may hold
    #: them.
    unexplained: int
    #: Replicas of the device's resource that unconfirmed pods will get on the whole node.
    picks: int
    #: Minimum number of replicas that the plugin allocates before a replica of this device, or None
    #: if the plugin never allocates a replica of it.
    first: int | None
    #: Number of devices in the set that is reserved for unconfirmed pods, or 0 if there is none.
    #: Only the policy steered has such a set.
    set_size: int
    _choice: Choice
    _index: int

    def most(self, newcomers: int, gone: int) -> int:
        """Return the maximum number of replicas of the device that unconfirmed and new pods can
        get.

        New pods take ``newcomers`` picks. Terminating pods have released at most ``gone`` of the
        device's replicas.
        """
        return self._choice.most(self._index, self.picks + newcomers, gone)


def plugin_choices(
    devices: Sequence[Device],
    plugin: Plugin,
    picks: Mapping[str, int],
    reserved: Mapping[str, Set[frozenset[str]]],
    leaving: Sequence[int],
    explained: Sequence[int],
) -> list[PluginChoice]:
    """Return when and how often the plugin can choose each device, in the order of ``devices``.

    ``picks`` maps each resource to the number of replicas that unconfirmed pods will get.
    ``reserved`` maps each resource to the sets of devices that the ledger chose for these pods,
    with an empty set if the plugin chooses. ``leaving`` and ``explained`` contain, for each device,
    the number of replicas that terminating pods and all pods hold in the report.
    """
    count_of = Counter(device.uuid for device in devices)
    uncertain = {d.resource for d in devices if count_of[d.uuid] > 1 or not _countable(d)}
    # With any other or an unknown policy of the topology manager, the kubelet may offer the devices
    # of only one NUMA node.
    aligned = plugin.topology_manager_policy != "none"
    offered: dict[tuple[str, int | None], list[int]] = {}
    for slot, device in enumerate(devices):
        numa_node = device.numa_node if aligned else None
        offered.setdefault((device.resource, numa_node), []).append(slot)
    # If there are several NUMA nodes, the kubelet may choose one regardless of the preferred
    # allocation.
    numa_nodes_of = Counter(resource for resource, _ in offered)
    divided = {resource for resource, count in numa_nodes_of.items() if count > 1}
    found: dict[int, PluginChoice] = {}
    for (resource, _), slots in offered.items():
        policy: Policy = plugin.allocation_policy
        reserved_here = reserved.get(resource, frozenset())
        reserved_indices: Set[int] = frozenset()
        if resource in uncertain or any(reserved_here):
            # Some unconfirmed pods were bound while the resource was steered. For these pods the
            # plugin's policy does not apply.
            policy = "unknown"
        if resource in plugin.steered and _shared(devices[slot] for slot in slots):
            policy = "unknown"
            index_of = {devices[slot].uuid: index for index, slot in enumerate(slots)}
            chosen_set = next(iter(reserved_here), None)
            if (
                resource not in uncertain | divided
                and len(reserved_here) < 2
                and (chosen_set is None or (chosen_set and chosen_set <= index_of.keys()))
            ):
                policy = "steered"
                reserved_indices = {index_of[uuid] for uuid in chosen_set or ()}
        stocks = [_stock(devices[slot], leaving[slot]) for slot in slots]
        chosen = choice(policy, stocks, reserved_indices)
        for index, (slot, stock) in enumerate(zip(slots, stocks, strict=True)):
            found[slot] = PluginChoice(
                policy=policy,
                leaving=stock.leaving,
                unexplained=max(0, devices[slot].replicas.allocated - explained[slot]),
                picks=picks.get(resource, 0),
                first=chosen.first(index),
                set_size=len(reserved_indices),
                _choice=chosen,
                _index=index,
            )
    return [found[slot] for slot in range(len(devices))]


def _shared(devices: Iterable[Device]) -> bool:
    """Return whether any of the devices is shared. The agent steers only shared devices."""
    return any(device.sharing != "none" for device in devices)


def may_have_free_replica(device: Device) -> bool:
    """Return whether the plugin may have a free replica of the device.

    The plugin counts its replicas itself, so it may have a free replica even if the reported counts
    are implausible.
    """
    replicas = device.replicas
    return replicas.free > 0 or min(replicas.free, replicas.allocated, replicas.unhealthy) < 0


def _countable(device: Device) -> bool:
    """Return whether the reported numbers of replicas are plausible."""
    replicas = device.replicas
    believable = min(replicas.free, replicas.allocated, replicas.unhealthy) >= 0
    return believable and replicas.total <= MAX_REPLICAS


def _stock(device: Device, leaving: int) -> Stock:
    """Return the replicas of a device. If the reported numbers are implausible, assume an unlimited
    number of free replicas or no replicas."""
    replicas = device.replicas
    if not _countable(device):
        return Stock(free=ALL_PICKS if may_have_free_replica(device) else 0, taken=0)
    taken = replicas.allocated + replicas.unhealthy
    return Stock(replicas.free, taken, min(leaving, taken))
