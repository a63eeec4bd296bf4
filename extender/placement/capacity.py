"""Reports whether the cluster is full or fragmented for pods of one size.

It computes how much free memory such a pod can use, and how much no pod can use. All values come
from one verdict: the arrays that filter decides by. ``state.node_whatif`` counts the pods that
fit, because that requires placing them.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from contract.quantity import gib
from contract.reasons import Reason
from extender.placement.chosen_device import Nodes
from extender.placement.fit import Verdicts
from extender.placement.snapshot import CODE_OF, Mask, Rows

INT64_MAX = int(np.iinfo(np.int64).max)
#: Verdicts that memory alone decided.
MEMORY_CODES = [CODE_OF[r] for r in (None, Reason.MEMORY_ON_ANY, Reason.MEMORY_ON_SOME)]
#: "closed": no node with a device of the resource accepts pods.
Fullness = Literal["room", "fragmented", "full", "closed"]
_ORDER = list(Reason)
#: Codes of reasons that concern the pod or the whole node, regardless of free memory and replicas.
_CLOSED_CODES = [CODE_OF[r] for r in _ORDER[: _ORDER.index(Reason.NO_SUCH_RESOURCE) + 1]]


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices of one model and memory size with one resource name."""

    resource: str
    model: str
    memory_bytes: int
    devices: int
    nodes: int
    #: The largest request per device that fits on a node with a candidate device of this class;
    #: None if reasons other than memory reject the pod on all of them.
    largest_fitting_bytes: int | None


@dataclass(frozen=True, slots=True)
class Space:
    """The free capacity of nodes for pods of one size."""

    #: Nodes with a device of the resource that accept pods, and nodes with one that do not.
    open_nodes: int
    closed_nodes: int
    #: Nodes on which one more pod fits.
    fitting_nodes: int
    #: The least that one pod takes of any open node; None without devices.
    need_bytes: int | None
    #: Headroom of the healthy devices of the resource, on open nodes and on closed nodes.
    headroom_bytes: int
    closed_bytes: int
    #: Part of the headroom on devices without a free replica: no pod can use it.
    stranded_bytes: int
    #: Free replicas on open nodes, and those on devices without enough memory for such a pod.
    replicas_free: int
    replicas_stranded: int
    #: The largest request per device that fits; None if other reasons than memory reject the pod.
    largest_fitting_bytes: int | None

    @property
    def fullness(self) -> Fullness:
        if self.fitting_nodes:
            return "room"
        if not self.open_nodes or self.need_bytes is None:
            return "closed"
        return "fragmented" if self.headroom_bytes >= self.need_bytes else "full"


def space(verdicts: Verdicts) -> Space:
    """Compute the free capacity for a request for one resource."""
    snap, rows, columns = verdicts.snap, verdicts.rows, verdicts.snap.columns
    verdict = verdicts.asks[0]
    slots = snap.slots_of(verdict.ask.resource)
    sound: Mask = slots & (columns.health_issue == 0)
    opens: Nodes = ~np.isin(verdicts.codes, _CLOSED_CODES)
    has_any = np.asarray(slots.any(axis=1))[rows]
    # Each of the devices that share a memory shows the headroom of all of it.
    left = np.maximum(columns.headroom_bytes, 0) // np.maximum(columns.sharers, 1)
    left = np.where(sound, left, 0)[rows]
    free = np.where(sound, columns.replicas_free, 0)[rows].astype(np.int64)
    unconfirmed = np.where(slots, columns.replicas_unconfirmed, 0).max(axis=1, initial=0)[rows]
    # Unconfirmed pods take free replicas that the report does not show as taken yet.
    too_few: Nodes = free.sum(axis=1) - unconfirmed < verdict.ask.count
    no_replica: Mask = (free == 0) | too_few[:, None]
    small = verdict.free_bytes < verdict.need_bytes
    needs = verdict.need_bytes[opens][sound[rows][opens]]
    return Space(
        open_nodes=int((opens & has_any).sum()),
        closed_nodes=int((~opens & has_any).sum()),
        fitting_nodes=int(verdicts.fits.sum()),
        need_bytes=int(needs.min()) * verdict.ask.count if len(needs) else None,
        headroom_bytes=int(left[opens].sum()),
        closed_bytes=int(left[~opens].sum()),
        stranded_bytes=int(np.where(no_replica, left, 0)[opens].sum()),
        replicas_free=int(free[opens].sum()),
        replicas_stranded=int(np.where(small, free, 0)[opens].sum()),
        largest_fitting_bytes=largest_fitting(verdicts),
    )


def device_classes(verdicts: Verdicts) -> list[DeviceClass]:
    """Return the device classes of the requested resource, largest memory first."""
    found: dict[tuple[int, str], list[tuple[int, int]]] = {}
    resource = verdicts.asks[0].ask.resource
    for i, row in enumerate(verdicts.rows.tolist()):
        for slot, terms in enumerate(verdicts.snap.nodes[row].devices):
            if terms.device.resource == resource and terms.believed:
                key = terms.device.memory_bytes, terms.device.model
                found.setdefault(key, []).append((i, slot))
    return [_class(verdicts, *key, found[key]) for key in sorted(found, reverse=True)]


def _class(
    verdicts: Verdicts, memory_bytes: int, model: str, at: list[tuple[int, int]]
) -> DeviceClass:
    could = verdicts.asks[0].candidates
    nodes = sorted({i for i, slot in at if could[i, slot]})
    return DeviceClass(
        resource=verdicts.asks[0].ask.resource,
        model=model,
        memory_bytes=memory_bytes,
        devices=len(at),
        nodes=len({i for i, _ in at}),
        largest_fitting_bytes=largest_fitting(verdicts, np.array(nodes, np.int64)),
    )


def capacity_summary(space: Space, pods: int, at_least: bool) -> str:
    """Return one sentence: how many ``pods`` fit, or why none does.

    ``at_least``: more pods may fit.
    """
    free = gib(space.headroom_bytes)
    stranded = (
        f"; {gib(space.stranded_bytes)} are on devices without a free replica"
        if space.stranded_bytes
        else ""
    )
    match space.fullness:
        case "room":
            more = "at least " if at_least else ""
            nodes = space.open_nodes + space.closed_nodes
            on = f"{space.fitting_nodes} of {nodes} node{'' if nodes == 1 else 's'}"
            fit = "1 such pod fits" if pods == 1 else f"{pods} such pods fit"
            return f"{more}{fit} now, on {on}; {free} are free in total{stranded}"
        case "closed":
            return "no node with a device of this resource accepts pods now"
        case "full":
            return f"full: {free} are free in total, less than one such pod needs{stranded}"
        case "fragmented":
            if space.largest_fitting_bytes is None:
                why = "every node also rejects the pod for reasons other than memory"
            else:
                why = f"the largest request that fits is {gib(space.largest_fitting_bytes)}"
            return f"fragmented: {free} are free in total, and {why}{stranded}"


def larger_than_any(verdicts: Verdicts) -> tuple[int, int] | None:
    """Return the pod's least need and the largest device's bytes if no device can ever hold it.

    Both concern one resource. None if some device of each resource is large enough.
    """
    for verdict in verdicts.asks:
        slots = verdicts.snap.slots_of(verdict.ask.resource)[verdicts.rows]
        allocatable = verdicts.snap.columns.allocatable_bytes[verdicts.rows][slots]
        needs = verdict.need_bytes[slots]
        if allocatable.any() and (needs > allocatable).all():
            return int(needs.min()), int(allocatable.max())
    return None


def largest_fitting(verdicts: Verdicts, among: Rows | None = None) -> int | None:
    """Return the most bytes per device that would fit on some node.

    Only nodes without other reasons than memory count; None if there are none. ``among`` limits the
    search to these indices of the verdicts.
    """
    by_memory = np.isin(verdicts.codes, MEMORY_CODES)
    if among is not None:
        by_memory &= np.isin(np.arange(len(verdicts.rows)), among)
    if not verdicts.asks or not by_memory.any():
        return None
    least = np.full(len(verdicts.rows), INT64_MAX)
    for verdict in verdicts.asks:
        room = np.where(verdict.candidates, verdict.free_bytes, INT64_MAX)
        least = np.minimum(least, room.min(axis=1, initial=INT64_MAX))
    return max(0, int(least[by_memory].max()))
