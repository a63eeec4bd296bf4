"""Finds the candidate devices on nodes on which not the plugin but Headroom or the pod chooses the
device.

On a *steered* node, the agent makes the kubelet allocate the devices that Headroom chooses. A pod
that sets NVIDIA_VISIBLE_DEVICES itself can go *anywhere*, so it must fit on every device of the
node, whatever the resource of the device. The plugin also allocates a replica of some device to
this pod. The replica counts for the plugin's next choice but not for memory, and it can displace
unconfirmed pods to any device. So no such pod fits while the unconfirmed pods together could
overcommit a device.

On steered nodes Headroom chooses the device with the least free memory after placement, or with the
most free memory for the policy spread. The choice is adjusted for SM activity: full activity costs
as much as leaving a quarter of the node's largest device unused. So of two devices with equal free
memory, the less busy device is chosen. Without spread, an idle device is preferred to a fully busy
device only if its free memory is larger by less than a quarter of a device. Unknown activity counts
as 50 %.

A container that requests several replicas gets different devices. They are the devices with the
lowest cost, if possible connected by NVLink, and if possible of one NUMA node.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from headroom.contract.annotations import ScoringPolicy
from headroom.contract.gpunode import MAX_DEVICES
from headroom.core.placement.amounts import DeviceArrays, needed
from headroom.core.placement.request import Ask, VramRequest
from headroom.core.placement.snapshot import (
    MOST_BYTES,
    NUMA_NODES,
    Bytes2D,
    Mask,
    NodeTerms,
    Rows,
    Snapshot,
    clamped,
)
from headroom.core.placement.visible_devices import Visible

Nodes = NDArray[np.bool_]
#: Full SM activity costs as much as the node's largest device divided by this number.
_ACTIVITY_DIVISOR = 4
_UNKNOWN_PPM = 500_000
#: Limit on the cost of a device, so that the costs of a node's devices can be added.
_MOST_COST = MOST_BYTES // MAX_DEVICES


def by_environment(request: VramRequest, node: NodeTerms) -> bool:
    """Return whether the pod's NVIDIA_VISIBLE_DEVICES decides its devices on the node.

    Return False if the plugin decides, or if the node rejects such pods.
    """
    return request.visible is Visible.BY_POD and node.obeys_environment


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Candidate devices of an ask, with needed and free bytes, as arrays of shape (nodes,
    slots)."""

    #: Whether the pod could get the device.
    could: Mask
    need_bytes: Bytes2D
    free_bytes: Bytes2D


def candidates_by_environment(
    ask: Ask, request: VramRequest, snap: Snapshot, arrays: DeviceArrays, by_plugin: Candidates
) -> Candidates:
    """Return the candidates on all nodes, computed again for nodes on which the pod's variable
    decides.

    ``by_plugin`` contains the candidates if the plugin decides, which are correct for all other
    nodes.
    """
    shape = by_plugin.could.shape
    result = Candidates(
        could=by_plugin.could.copy(),
        need_bytes=np.array(np.broadcast_to(by_plugin.need_bytes, shape)),
        free_bytes=by_plugin.free_bytes.copy(),
    )
    rows = [row for row, node in enumerate(snap.nodes) if by_environment(request, node)]
    selected = DeviceArrays(
        **{f: getattr(arrays, f)[rows] for f in DeviceArrays.__dataclass_fields__}
    )
    # All containers of the pod can use the same device, and all devices that share its memory.
    together = replace(selected, common=np.ones_like(selected.common))
    need_bytes = needed(ask, request.asks, together) * np.clip(selected.sharers, 1, None)
    result.could[rows] = snap.columns.resource[rows] >= 0
    result.need_bytes[rows] = np.minimum(need_bytes, MOST_BYTES)
    result.free_bytes[rows] = -MOST_BYTES
    for row in rows:
        for slot, slot_bytes in enumerate(_free_bytes(snap.nodes[row])):
            result.free_bytes[row, slot] = slot_bytes
    return result


def _free_bytes(node: NodeTerms) -> list[int]:
    """Return the free bytes on each device for a pod that is certain to use the device.

    Return ``-MOST_BYTES`` for all devices if unconfirmed pods together could overcommit one of
    them.
    """
    if any(terms.crowd_bytes and terms.certain_free_bytes < 0 for terms in node.devices):
        return [-MOST_BYTES] * len(node.devices)
    return [clamped(terms.certain_free_bytes) for terms in node.devices]


def at_least(mask: Mask, count: int) -> Nodes:
    """Return whether at least ``count`` devices of each node are in the mask, (nodes,)."""
    # With one device, which is the usual case, this is faster than counting.
    return np.asarray(mask.any(axis=1) if count == 1 else mask.sum(axis=1) >= count)


def steered_candidates(
    request: VramRequest, snap: Snapshot, count: int, could: Mask, usable: Mask, left_bytes: Bytes2D
) -> tuple[Mask, Mask]:
    """Return the mask (nodes, slots) of the ``count`` devices that Headroom chooses on each steered
    node, and the mask of the devices from which it chooses.

    ``could`` selects the devices that the plugin could give to the pod, and ``usable`` the devices
    without a fault that have enough free replicas. ``left_bytes`` is the free memory of each device
    after placement. If the pod fits on too few devices, both masks select all usable devices, or
    all of ``could`` if too few are usable.
    """
    fitting = usable & (left_bytes >= 0)
    cost = _cost(request, snap, left_bytes)
    fits = at_least(fitting, count)[:, None]
    if count == 1:
        chosen = fitting & _cheapest(fitting, cost)
    else:
        chosen = _cheapest_set(snap, fitting & fits, cost, count)
    rest = np.where(at_least(usable, count)[:, None], usable, could)
    return np.where(fits, chosen, rest), rest


def _cost(request: VramRequest, snap: Snapshot, left_bytes: Bytes2D) -> Bytes2D:
    """Return the cost of each device, (nodes, slots). Headroom chooses the lowest cost."""
    columns = snap.columns
    sm_ppm, allocatable_bytes = columns.sm_ppm, columns.allocatable_bytes
    bytes_of_ppm = allocatable_bytes.max(axis=1, initial=0) // (_ACTIVITY_DIVISOR * 1_000_000)
    activity_bytes = bytes_of_ppm[:, None] * np.where(sm_ppm < 0, _UNKNOWN_PPM, sm_ppm)
    spread = request.policy is ScoringPolicy.SPREAD
    cost: Bytes2D = activity_bytes - left_bytes if spread else activity_bytes + left_bytes
    return cost


def _cheapest(among: Mask, cost: Bytes2D) -> Mask:
    """Return the mask (nodes, slots) of the cheapest device in ``among`` of each node.

    On nodes without such a device, the mask selects an arbitrary device.
    """
    best = np.where(among, cost, MOST_BYTES).argmin(axis=1)
    mask: Mask = best[:, None] == np.arange(among.shape[1])
    return mask


def _cheapest_set(snap: Snapshot, among: Mask, cost: Bytes2D, count: int) -> Mask:
    """Return the mask (nodes, slots) of the ``count`` cheapest devices in ``among`` of each node.

    If possible, the devices are connected by NVLink and in one NUMA node. Otherwise they are only
    connected by NVLink, otherwise only in one NUMA node. The cheapest such set is chosen.
    """
    locality = snap.columns.locality
    nvlink_group, numa_node = locality // NUMA_NODES, locality % NUMA_NODES
    best, best_cost = _first(among, cost, count)
    found = np.zeros(len(among), bool)
    linked = among & (nvlink_group > 0)
    for devices, place in ((linked, locality), (linked, nvlink_group), (among, numa_node)):
        #: Nodes on which a set in one such place has been found.
        here = np.zeros(len(among), bool)
        for each in np.unique(place[devices]).tolist():
            local = devices & (place == each)
            chosen, total = _first(local, cost, count)
            better = ~found & at_least(local, count) & (~here | (total < best_cost))
            best = np.where(better[:, None], chosen, best)
            best_cost = np.where(better, total, best_cost)
            here |= better
        found |= here
    return best


def _first(among: Mask, cost: Bytes2D, count: int) -> tuple[Mask, Rows]:
    """Return the mask (nodes, slots) of the ``count`` cheapest devices in ``among``, and their
    total cost, (nodes,).

    Both are arbitrary on nodes with fewer devices.
    """
    # A limit that keeps sums within int64.
    costs = np.where(among, np.minimum(cost, _MOST_COST), _MOST_COST)
    order = np.argsort(costs, axis=1, kind="stable")[:, :count]
    mask = np.zeros(among.shape, bool)
    np.put_along_axis(mask, order, True, axis=1)
    total: Rows = np.take_along_axis(costs, order, axis=1).sum(axis=1)
    return mask & among, total
