"""Applies the model of the device plugin to the reported devices of one node."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from contract.annotations import DeviceChoice
from contract.gpunode import MAX_REPLICAS, Device, Plugin
from extender.placement.device_plugin_model import Choice, Policy, Stock, choice

#: More picks than there are replicas on any node.
ALL_PICKS = 1 << 20


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
