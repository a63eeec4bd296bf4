"""Candidate devices on nodes where Headroom or the pod chooses the device, and not the plugin.

*Steered*: the agent makes the kubelet allocate the device that Headroom chooses. *Pinned*: the
pod's own NVIDIA_VISIBLE_DEVICES follows the placement, so Headroom chooses a shared device.
*Anywhere*: the pod sets the variable itself, so it must fit on every device of the node, whatever
resource they belong to.

On pinned nodes and anywhere, the plugin also allocates a replica, of any device. The replica counts
for the plugin's next choice but not for memory. It can displace unconfirmed pods to any device, so
each device must have enough memory for all of them. While they could overcommit a device, no pod
fits.

Headroom chooses the device with the least free memory left, or with the most for the policy spread,
adjusted for SM activity: full activity costs as much as leaving a quarter of the node's largest
device unused. So of two devices with equal free memory the less busy one is chosen. An idle device
is chosen only if that wastes less than a quarter of a device. Unknown activity counts as 50 %.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from contract.annotations import ScoringPolicy
from extender.placement.amounts import DeviceArrays, above_cap, needed
from extender.placement.request import Ask, VramRequest
from extender.placement.snapshot import (
    MOST_BYTES,
    SHARING,
    Bytes2D,
    Int2D,
    Mask,
    NodeTerms,
    Snapshot,
    clamped,
)
from extender.placement.visible_devices import Visible

Nodes = NDArray[np.bool_]
#: Full SM activity costs 1 / this number of a device.
_PART = 4
_UNKNOWN_PPM = 500_000


def by_environment(request: VramRequest, node: NodeTerms) -> bool:
    """Return whether the pod's variable, and not the plugin, decides its devices on the node."""
    match request.visible:
        case Visible.BY_PLACEMENT:
            return node.pins
        case Visible.BY_POD:
            return node.obeys_environment
    return False


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Candidate devices of an ask, with needed and free bytes; (nodes, slots)."""

    could: Mask
    need_bytes: Bytes2D
    free_bytes: Bytes2D
    #: (nodes,) whether Headroom pins the pod to a device.
    pinned: Nodes
    #: (nodes,) whether the node is pinned but none of its devices is shared.
    unshared: Nodes


def candidates_by_environment(
    ask: Ask,
    request: VramRequest,
    snap: Snapshot,
    slots: Mask,
    arrays: DeviceArrays,
    by_plugin: tuple[Mask, Bytes2D, Bytes2D],
) -> Candidates:
    """Return ``by_plugin`` with the rows replaced for nodes where the pod's variable decides.

    ``slots`` are the devices of the ask's resource. ``by_plugin`` has the candidates, the needed
    bytes and the free bytes if the plugin decides.
    """
    could_by_plugin, need_by_plugin, room_by_plugin = by_plugin
    result = Candidates(
        could=could_by_plugin.copy(),
        need_bytes=np.array(np.broadcast_to(need_by_plugin, could_by_plugin.shape)),
        free_bytes=room_by_plugin.copy(),
        pinned=np.zeros(len(snap.nodes), bool),
        unshared=np.zeros(len(snap.nodes), bool),
    )
    row_list = [row for row, node in enumerate(snap.nodes) if by_environment(request, node)]
    if not row_list:
        return result
    rows = np.array(row_list)
    selected = DeviceArrays(
        **{f: getattr(arrays, f)[rows] for f in DeviceArrays.__dataclass_fields__}
    )
    # All containers of the pod use one device.
    together = replace(selected, common=np.ones_like(selected.common))
    need = needed(ask, request.asks, together)
    shape = slots[rows].shape
    room = np.full(shape, -MOST_BYTES)
    for i, row in enumerate(row_list):
        for slot, left_bytes in enumerate(_free_bytes(snap.nodes[row])):
            room[i, slot] = left_bytes
    pinned = request.visible is Visible.BY_PLACEMENT
    if pinned:
        could = _best(ask, request, snap, rows, slots[rows], together, need, room)
    else:
        could = snap.columns.resource[rows] >= 0
        # Each of the devices that share a memory shows it to the pod.
        need = np.minimum(need * np.clip(selected.sharers, 1, None), MOST_BYTES)
    result.could[rows] = could
    result.need_bytes[rows] = need
    result.free_bytes[rows] = room
    result.pinned[rows] = pinned
    shared = slots & (snap.columns.sharing > SHARING.index("none"))
    result.unshared[rows] = pinned & ~shared[rows].any(axis=1)
    return result


def _free_bytes(node: NodeTerms) -> list[int]:
    """Return the bytes on each device that are free for a pod that certainly uses it."""
    if any(terms.crowd_bytes and terms.certain_free_bytes < 0 for terms in node.devices):
        return [-MOST_BYTES] * len(node.devices)
    return [clamped(terms.certain_free_bytes) for terms in node.devices]


def _best(
    ask: Ask,
    request: VramRequest,
    snap: Snapshot,
    rows: NDArray[np.int64],
    slots: Mask,
    arrays: DeviceArrays,
    need: Bytes2D,
    room: Bytes2D,
) -> Mask:
    """Return the mask (n, slots) of the device to which the pod is pinned.

    If it fits on no device, the mask has all devices that fail for one common reason. It is empty
    if no device is shared: the plugin gives each unshared device to one pod, so a pinned pod would
    share it with another.
    """
    columns = snap.columns
    could: Mask = slots & (columns.sharing[rows] > SHARING.index("none"))
    if request.pinned_to:
        named = np.zeros(could.shape, bool)
        for i, row in enumerate(rows.tolist()):
            for slot, terms in enumerate(snap.nodes[row].devices):
                named[i, slot] = terms.device.uuid == request.pinned_to
        could = could & named
    mps = columns.sharing[rows] == SHARING.index("mps")
    conditions = [
        columns.health_issue[rows] == 0,
        ~(mps & above_cap(ask, request.processes, columns.memory_bytes[rows], arrays)),
        room >= need,
    ]
    if request.max_sm_ppm is not None:
        activity = columns.sm_ppm[rows]
        conditions.insert(1, (activity >= 0) & (activity < request.max_sm_ppm))
    fine = np.ones(len(rows), bool)
    for condition in conditions:
        left = could & condition
        fine &= left.any(axis=1)
        could = np.where(left.any(axis=1, keepdims=True), left, could)
    best = _preferred(
        request, could, room - need, columns.sm_ppm[rows], columns.allocatable_bytes[rows]
    )
    chosen: Mask = np.where(fine[:, None], best, could)
    return chosen


def steered_candidates(
    request: VramRequest, snap: Snapshot, could: Mask, usable: Mask, left_bytes: Bytes2D
) -> Mask:
    """Return the mask (nodes, slots) of the device that Headroom chooses, as the only candidate.

    ``usable`` are the devices without a fault that have enough free replicas. If the pod fits on no
    device, the mask has all devices that determine the reason.
    """
    fitting = usable & (left_bytes >= 0)
    columns = snap.columns
    chosen = fitting & _preferred(
        request, fitting, left_bytes, columns.sm_ppm, columns.allocatable_bytes
    )
    rest = np.where(usable.any(axis=1, keepdims=True), usable, could)
    narrowed: Mask = np.where(fitting.any(axis=1, keepdims=True), chosen, rest)
    return narrowed


def _preferred(
    request: VramRequest,
    among: Mask,
    left_bytes: Bytes2D,
    sm_ppm: Int2D,
    allocatable_bytes: Bytes2D,
) -> Mask:
    """Return the mask (n, slots) with the best device of each node, if any is ``among`` them."""
    bytes_of_ppm = allocatable_bytes.max(axis=1, initial=0) // (_PART * 1_000_000)
    unrest = bytes_of_ppm[:, None] * np.where(sm_ppm < 0, _UNKNOWN_PPM, sm_ppm)
    spread = request.policy is ScoringPolicy.SPREAD
    cost = unrest - left_bytes if spread else unrest + left_bytes
    best = np.where(among, cost, MOST_BYTES).argmin(axis=1)
    mask: Mask = best[:, None] == np.arange(among.shape[1])
    return mask
