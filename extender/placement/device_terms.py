"""What the plugin could do with each device of one node, as its report shows it."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from contract.annotations import DeviceChoice
from contract.gpunode import MAX_REPLICAS, Device, Plugin
from extender.placement.device_plugin_model import Choice, Policy, Stock, choice

#: More picks than there are replicas on any node.
ALL_PICKS = 1 << 20


@dataclass(frozen=True, slots=True)
class Chance:
    """One device among those that are offered with it."""

    policy: Policy
    #: Replicas held by pods that are ending.
    leaving: int
    #: Replicas that are allocated to nobody the report shows: to somebody we wait for, maybe.
    unexplained: int
    #: Replicas of its resource that pods on their way will be given, on the whole node.
    picks: int
    #: What must be given out before one of its replicas can be; None: none of them ever can.
    first: int | None
    _choice: Choice
    _place: int

    def most(self, newcomers: int, gone: int) -> int:
        """The most replicas of it that pods on their way can be given, ``newcomers`` picks
        included, when at most ``gone`` of those that are leaving have been let go."""
        return self._choice.most(self._place, self.picks + newcomers, gone)


def chances(
    devices: Sequence[Device],
    plugin: Plugin,
    device_choice: DeviceChoice,
    picks: Mapping[str, int],
    reserved: Mapping[str, Set[str]],
    leaving: Sequence[int],
    explained: Sequence[int],
) -> list[Chance]:
    """The chance of each device, in their order.

    ``picks``: resource -> replicas that pods on their way wait for; ``promised``: resource -> the
    devices that the ledger chose for them, "" where it left that to the plugin. ``leaving`` and
    ``explained`` count, by device, the replicas that the report shows in the hands of pods that
    are ending, and of pods at all.
    """
    times = Counter(device.uuid for device in devices)
    doubted = {d.resource for d in devices if times[d.uuid] > 1 or not _countable(d)}
    # Not known is not "none": then the plugin could be offered the devices of one NUMA node only.
    aligned = plugin.topology_manager_policy != "none"
    offered: dict[tuple[str, int | None], list[int]] = {}
    for slot, device in enumerate(devices):
        numa_node = device.numa_node if aligned else None
        offered.setdefault((device.resource, numa_node), []).append(slot)
    # Of those the kubelet may take a device whatever anybody prefers.
    times_offered = Counter(resource for resource, _ in offered)
    divided = {resource for resource, count in times_offered.items() if count > 1}
    found: dict[int, Chance] = {}
    for (resource, _), slots in offered.items():
        # Gated and pinned nodes are admitted to as predicted ones are: that is safe.
        policy: Policy = plugin.allocation_policy
        wanted = reserved.get(resource, frozenset())
        place_wanted = None
        if resource in doubted or any(wanted):
            # What is left of a time in which it was steered is not the plugin's choice.
            policy = "unknown"
        if resource in plugin.steered and _shared(devices[slot] for slot in slots):
            policy = "unknown"
            places = {devices[slot].uuid: place for place, slot in enumerate(slots)}
            if resource not in doubted | divided and wanted <= places.keys() and len(wanted) < 2:
                policy = "steered"
                place_wanted = next((places[uuid] for uuid in wanted), None)
        if device_choice is DeviceChoice.ANY:
            policy = "any"
        stocks = [_stock(devices[slot], leaving[slot]) for slot in slots]
        chosen = choice(policy, stocks, place_wanted)
        for place, (slot, stock) in enumerate(zip(slots, stocks, strict=True)):
            found[slot] = Chance(
                policy=policy,
                leaving=stock.leaving,
                unexplained=max(0, devices[slot].replicas.allocated - explained[slot]),
                picks=picks.get(resource, 0),
                first=chosen.first(place),
                _choice=chosen,
                _place=place,
            )
    return [found[slot] for slot in range(len(devices))]


def _shared(devices: Iterable[Device]) -> bool:
    """Whether the agent has an opinion on them, as on those that pods share and on no others."""
    return any(device.sharing != "none" for device in devices)


def may_have_free_replica(device: Device) -> bool:
    """The plugin goes by its own count: figures that cannot be true do not prove there is none."""
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
