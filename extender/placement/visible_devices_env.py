"""Where a pod's own NVIDIA_VISIBLE_DEVICES decides which devices it sees, and not the plugin.

*Pinned*: it follows the placement, so the device is ours to choose, of those that are shared: the
one with room that leaves the least, or the most for a pod that is to be spread. *Anywhere*: it says
what it likes, and there must be room on every device of the node, whatever it is advertised as.

The plugin hands out a replica all the same, of any device. It is counted as the plugin counts, and
says nothing of the memory. Who is on the way may be pushed anywhere by it, so all of them are held
against each device, and while they could overcommit one, nobody is let in.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from contract.annotations import ScoringPolicy
from extender.placement.amounts import Places, needed
from extender.placement.candidate_devices import Mask
from extender.placement.mps_limits import above_cap
from extender.placement.request import Ask, VramRequest
from extender.placement.sm_penalty import unrest_bytes
from extender.placement.snapshot import (
    MOST_BYTES,
    SHARING,
    Bytes2D,
    NodeTerms,
    Snapshot,
    clamped,
)
from extender.placement.visible_devices import Visible

Nodes = NDArray[np.bool_]


def by_environment(request: VramRequest, node: NodeTerms) -> bool:
    """Whether the pod's variable, and not the plugin, decides what the pod is given there."""
    match request.visible:
        case Visible.BY_PLACEMENT:
            return node.pins
        case Visible.BY_POD:
            return node.obeys_environment
    return False


@dataclass(frozen=True, slots=True, eq=False)
class Candidates:
    """(nodes, slots) where an ask could end, what it needs there and what is left for it."""

    could: Mask
    need_bytes: Bytes2D
    free_bytes: Bytes2D
    #: (nodes,) where it is pinned.
    pinned: Nodes
    #: (nodes,) where it would be, but none of the devices is shared.
    unshared: Nodes


def overruled(
    ask: Ask,
    request: VramRequest,
    snap: Snapshot,
    slots: Mask,
    places: Places,
    by_plugin: tuple[Mask, Bytes2D, Bytes2D],
) -> Candidates:
    """``by_plugin``, with the rows replaced where the pod's variable decides.

    ``slots`` are those of the ask's resource; ``by_plugin`` is where it could end, what it needs
    there and what is left.
    """
    could_by_plugin, need_by_plugin, room_by_plugin = by_plugin
    result = Candidates(
        could=could_by_plugin.copy(),
        need_bytes=np.array(np.broadcast_to(need_by_plugin, could_by_plugin.shape)),
        free_bytes=room_by_plugin.copy(),
        pinned=np.zeros(len(snap.nodes), bool),
        unshared=np.zeros(len(snap.nodes), bool),
    )
    at = [row for row, node in enumerate(snap.nodes) if by_environment(request, node)]
    if not at:
        return result
    here = np.array(at)
    there = Places(**{f: getattr(places, f)[here] for f in Places.__dataclass_fields__})
    # Wherever it is, all its containers are there together.
    together = replace(there, common=np.ones_like(there.common))
    need = needed(ask, request.asks, together)
    shape = slots[here].shape
    room = np.full(shape, -MOST_BYTES)
    for place, row in enumerate(at):
        for slot, left_bytes in enumerate(_free_bytes(snap.nodes[row])):
            room[place, slot] = left_bytes
    pinned = request.visible is Visible.BY_PLACEMENT
    if pinned:
        could = _best(ask, request, snap, here, slots[here], together, need, room)
    else:
        could = snap.columns.resource[here] >= 0
        # Each of the devices that share a memory shows it to the pod.
        need = np.minimum(need * np.clip(there.sharers, 1, None), MOST_BYTES)
    result.could[here] = could
    result.need_bytes[here] = need
    result.free_bytes[here] = room
    result.pinned[here] = pinned
    shared = slots & (snap.columns.sharing > SHARING.index("none"))
    result.unshared[here] = pinned & ~shared[here].any(axis=1)
    return result


def _free_bytes(node: NodeTerms) -> list[int]:
    """What is left on each device for who is there for certain."""
    if any(terms.crowd_bytes and terms.certain_free_bytes < 0 for terms in node.devices):
        return [-MOST_BYTES] * len(node.devices)
    return [clamped(terms.certain_free_bytes) for terms in node.devices]


def _best(
    ask: Ask,
    request: VramRequest,
    snap: Snapshot,
    here: NDArray[np.int64],
    slots: Mask,
    places: Places,
    need: Bytes2D,
    room: Bytes2D,
) -> Mask:
    """(n, slots) the device that it is pinned to; several where none will do, all for one reason.

    None at all where no device is shared: those the plugin gives to one pod each, and two would
    come to share one.
    """
    columns = snap.columns
    could: Mask = slots & (columns.sharing[here] > SHARING.index("none"))
    if request.pinned_to:
        named = np.zeros(could.shape, bool)
        for place, row in enumerate(here.tolist()):
            for slot, terms in enumerate(snap.nodes[row].devices):
                named[place, slot] = terms.device.uuid == request.pinned_to
        could = could & named
    mps = columns.sharing[here] == SHARING.index("mps")
    conditions = [
        columns.health_issue[here] == 0,
        ~(mps & above_cap(ask, request.processes, columns.memory_bytes[here], places)),
        room >= need,
    ]
    if request.max_sm_ppm is not None:
        activity = columns.sm_ppm[here]
        conditions.insert(1, (activity >= 0) & (activity < request.max_sm_ppm))
    fine = np.ones(len(here), bool)
    for condition in conditions:
        left = could & condition
        fine &= left.any(axis=1)
        could = np.where(left.any(axis=1, keepdims=True), left, could)
    left_bytes = room - need
    unrest = unrest_bytes(columns.sm_ppm[here], columns.allocatable_bytes[here])
    spread = request.policy is ScoringPolicy.SPREAD
    order = np.where(could, unrest - left_bytes if spread else unrest + left_bytes, MOST_BYTES)
    best = np.zeros(could.shape, bool)
    best[np.arange(len(here)), order.argmin(axis=1)] = True
    chosen: Mask = np.where(fine[:, None], best, could)
    return chosen
