"""Candidate devices on nodes where Headroom or the pod chooses the device, and not the plugin.

*Steered*: the agent makes the kubelet allocate the device that Headroom chooses. *Pinned*: the
pod's own NVIDIA_VISIBLE_DEVICES follows the placement, so Headroom chooses a shared device.
*Anywhere*: the pod sets the variable itself, so it must fit on every device of the node, whatever
resource they belong to.

In the cases *pinned* and *anywhere*, the plugin also allocates a replica, of any device. It counts
for the plugin's next choice but not for memory. It can displace unconfirmed pods to any device. So
while the unconfirmed pods together could overcommit a device, no such pod fits.

Headroom chooses the device with the least free memory after placement, or with the most for the
policy spread, adjusted for SM activity: full activity costs as much as leaving a quarter of the
node's largest device unused. So of two devices with equal free memory the less busy one is chosen.
Without spread, an idle device is preferred to a fully busy one only if it has less than a quarter
of a device more free memory. Unknown activity counts as 50 %.
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
#: Full SM activity costs as much as 1 / this number of the node's largest device.
_ACTIVITY_DIVISOR = 4
_UNKNOWN_PPM = 500_000


def by_environment(request: VramRequest, node: NodeTerms) -> bool:
    """Return whether the pod's NVIDIA_VISIBLE_DEVICES decides its devices on the node.

    False if the plugin decides, or if the node rejects such pods.
    """
    match request.visible:
        case Visible.BY_PLACEMENT:
            return node.pins
        case Visible.BY_POD:
            return node.obeys_environment
    return False


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """Candidate devices of an ask, with needed and free bytes; (nodes, slots)."""

    #: Whether the pod could get the device.
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
    """Return the candidates on all nodes, computed again where the pod's variable decides.

    ``slots`` are the devices of the ask's resource. ``by_plugin`` has the candidates, the needed
    bytes and the free bytes as if the plugin decided, which are correct for all other nodes.
    """
    could_by_plugin, need_by_plugin, free_by_plugin = by_plugin
    result = Candidates(
        could=could_by_plugin.copy(),
        need_bytes=np.array(np.broadcast_to(need_by_plugin, could_by_plugin.shape)),
        free_bytes=free_by_plugin.copy(),
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
    need_bytes = needed(ask, request.asks, together)
    shape = slots[rows].shape
    free_bytes = np.full(shape, -MOST_BYTES)
    for i, row in enumerate(row_list):
        for slot, slot_bytes in enumerate(_free_bytes(snap.nodes[row])):
            free_bytes[i, slot] = slot_bytes
    pinned = request.visible is Visible.BY_PLACEMENT
    if pinned:
        candidates = _pinned_device(
            ask, request, snap, rows, slots[rows], together, need_bytes, free_bytes
        )
    else:
        candidates = snap.columns.resource[rows] >= 0
        # The pod can use each of the devices that share a memory, so its need is multiplied.
        need_bytes = np.minimum(need_bytes * np.clip(selected.sharers, 1, None), MOST_BYTES)
    result.could[rows] = candidates
    result.need_bytes[rows] = need_bytes
    result.free_bytes[rows] = free_bytes
    result.pinned[rows] = pinned
    shared = slots & (snap.columns.sharing > SHARING.index("none"))
    result.unshared[rows] = pinned & ~shared[rows].any(axis=1)
    return result


def _free_bytes(node: NodeTerms) -> list[int]:
    """Return the bytes on each device that are free for a pod that certainly uses the device.

    ``-MOST_BYTES`` for all devices if unconfirmed pods together could overcommit one of them.
    """
    if any(terms.crowd_bytes and terms.certain_free_bytes < 0 for terms in node.devices):
        return [-MOST_BYTES] * len(node.devices)
    return [clamped(terms.certain_free_bytes) for terms in node.devices]


def _pinned_device(
    ask: Ask,
    request: VramRequest,
    snap: Snapshot,
    rows: NDArray[np.int64],
    slots: Mask,
    arrays: DeviceArrays,
    need_bytes: Bytes2D,
    free_bytes: Bytes2D,
) -> Mask:
    """Return the mask (n, slots) of the device to which Headroom pins the pod on each node.

    If the pod fits on no device, the mask has all devices that fail for one common reason. Only
    shared devices count: the plugin gives an unshared device to one pod, and a pinned pod would use
    it beside that pod.
    """
    columns = snap.columns
    candidates: Mask = slots & (columns.sharing[rows] > SHARING.index("none"))
    if request.pinned_to:
        named = np.zeros(candidates.shape, bool)
        for i, row in enumerate(rows.tolist()):
            for slot, terms in enumerate(snap.nodes[row].devices):
                named[i, slot] = terms.device.uuid == request.pinned_to
        candidates = candidates & named
    mps = columns.sharing[rows] == SHARING.index("mps")
    conditions = [
        columns.health_issue[rows] == 0,
        ~(mps & above_cap(ask, request.processes, columns.memory_bytes[rows], arrays)),
        free_bytes >= need_bytes,
    ]
    if request.max_sm_ppm is not None:
        activity = columns.sm_ppm[rows]
        conditions.insert(1, (activity >= 0) & (activity < request.max_sm_ppm))
    fits = np.ones(len(rows), bool)
    for condition in conditions:
        remaining = candidates & condition
        fits &= remaining.any(axis=1)
        candidates = np.where(remaining.any(axis=1, keepdims=True), remaining, candidates)
    best = _preferred(
        request,
        candidates,
        free_bytes - need_bytes,
        columns.sm_ppm[rows],
        columns.allocatable_bytes[rows],
    )
    chosen: Mask = np.where(fits[:, None], best, candidates)
    return chosen


def steered_candidates(
    request: VramRequest, snap: Snapshot, could: Mask, usable: Mask, left_bytes: Bytes2D
) -> Mask:
    """Return the mask (nodes, slots) of the device that Headroom chooses on each steered node.

    ``could`` are the devices that the plugin could give to the pod. ``usable`` are those without a
    fault that have enough free replicas. ``left_bytes`` are free after placement. If the pod fits
    on no device, the mask has all usable devices, or all of ``could`` if none is usable.
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
    """Return the mask (n, slots) of the best device of each node among ``among``.

    On nodes without such a device, the mask has an arbitrary device.
    """
    bytes_of_ppm = allocatable_bytes.max(axis=1, initial=0) // (_ACTIVITY_DIVISOR * 1_000_000)
    activity_bytes = bytes_of_ppm[:, None] * np.where(sm_ppm < 0, _UNKNOWN_PPM, sm_ppm)
    spread = request.policy is ScoringPolicy.SPREAD
    cost = activity_bytes - left_bytes if spread else activity_bytes + left_bytes
    best = np.where(among, cost, MOST_BYTES).argmin(axis=1)
    mask: Mask = best[:, None] == np.arange(among.shape[1])
    return mask
