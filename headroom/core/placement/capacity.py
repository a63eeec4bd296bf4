"""Reports whether the cluster is full or fragmented for pods of one size.

It divides the free memory into a part that pods of this size can use and a part that they cannot
use. All values come from the ``Verdicts`` of one request, as in filter. ``whatif.node_whatif``
counts how many pods fit, because that requires placing them.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from headroom.contract.quantity import gib
from headroom.contract.reasons import Reason
from headroom.core.placement.chosen_device import Nodes, at_least
from headroom.core.placement.fit import AskVerdict, Verdicts
from headroom.core.placement.snapshot import CODE_OF, Mask, Rows, Snapshot

INT64_MAX = int(np.iinfo(np.int64).max)
#: Codes of nodes on which only memory decides whether the pod fits.
MEMORY_CODES = [
    CODE_OF[r]
    for r in (
        *(None, Reason.HELD),
        *(Reason.MEMORY_ON_ANY, Reason.TOO_FEW_DEVICES, Reason.MEMORY_ON_SOME),
    )
]
#: ``fits`` means that one more pod fits. ``fragmented`` means that the total headroom suffices for
#: one more pod, but the pod fits on no node. ``full`` means that the total headroom does not
#: suffice, and ``closed`` that no node with a healthy device of the resource accepts pods.
Fullness = Literal["fits", "fragmented", "full", "closed"]
_ORDER = list(Reason)
#: Codes of reasons that concern the pod or the whole node instead of single devices. These are the
#: first reasons in the order of ``Reason``, up to NO_SUCH_RESOURCE.
_CLOSED_CODES = [CODE_OF[r] for r in _ORDER[: _ORDER.index(Reason.NO_SUCH_RESOURCE) + 1]]


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices of one model and memory size with one resource name."""

    resource: str
    model: str
    memory_bytes: int
    devices: int
    nodes: int
    #: The largest request per device that fits on a node with a candidate device of this class, or
    #: None if all these nodes reject the pod for reasons other than memory.
    largest_fitting_bytes: int | None


@dataclass(frozen=True, slots=True)
class Space:
    """The free capacity of nodes for pods of one size."""

    #: Number of nodes that have a device of the resource and accept pods.
    open_nodes: int
    #: Number of nodes that have a device of the resource but accept no pods.
    closed_nodes: int
    #: Nodes on which one more pod fits.
    fitting_nodes: int
    #: Minimum number of bytes that one pod takes on any open node, or None if no open node has a
    #: healthy device.
    need_bytes: int | None
    #: Total headroom of the healthy devices of the resource on open nodes.
    headroom_bytes: int
    #: Total headroom of the healthy devices of the resource on closed nodes.
    closed_bytes: int
    #: Part of ``headroom_bytes`` that no such pod can use, because the device has no free replica
    #: or its node has fewer free replicas than the pod requests.
    stranded_bytes: int
    #: Number of free replicas on open nodes.
    replicas_free: int
    #: Number of these replicas that are on devices with too little free memory.
    replicas_stranded: int
    #: The largest request per device that fits on some node, or None if every node rejects the pod
    #: for reasons other than memory.
    largest_fitting_bytes: int | None

    @property
    def fullness(self) -> Fullness:
        if self.fitting_nodes:
            return "fits"
        if not self.open_nodes or self.need_bytes is None:
            return "closed"
        return "fragmented" if self.headroom_bytes >= self.need_bytes else "full"


@dataclass(frozen=True, slots=True)
class NodeSpaces:
    """The free capacity of each node for pods of one size. All arrays are (n,)."""

    #: Whether the node accepts pods.
    is_open: Nodes
    #: Whether the node has a device of the resource.
    has_any: Nodes
    #: Headroom of the healthy devices of the resource.
    headroom_bytes: Rows
    #: Part of the headroom of an open node that no such pod can use; 0 on a closed node.
    stranded_bytes: Rows
    #: Free replicas of an open node, and how many of them are on devices with too little free
    #: memory; 0 on a closed node.
    replicas_free: Rows
    replicas_stranded: Rows
    #: The least memory that one pod takes on a healthy device of the node, or ``INT64_MAX``.
    need_bytes: Rows


def node_spaces(verdicts: Verdicts) -> NodeSpaces:
    """Compute the free capacity of each node for a request for one resource."""
    snap, rows, columns = verdicts.snap, verdicts.rows, verdicts.snap.columns
    verdict = verdicts.asks[0]
    slots = snap.slots_of(verdict.ask.resource)
    healthy: Mask = slots & (columns.health_issue == 0)
    is_open: Nodes = ~np.isin(verdicts.codes, _CLOSED_CODES)
    # Devices that share a memory all show the headroom of the whole memory, so divide it among
    # them.
    headroom_bytes = np.maximum(columns.headroom_bytes, 0) // np.maximum(columns.sharers, 1)
    headroom_bytes = np.where(healthy, headroom_bytes, 0)[rows]
    free_replicas = np.where(healthy, columns.replicas_free, 0)[rows].astype(np.int64)
    unconfirmed = np.where(slots, columns.replicas_unconfirmed, 0).max(axis=1, initial=0)[rows]
    # Unconfirmed pods will take replicas that the report still shows as free.
    too_few: Nodes = free_replicas.sum(axis=1) - unconfirmed < verdict.ask.count
    no_replica: Mask = (free_replicas == 0) | too_few[:, None]
    small = verdict.free_bytes < verdict.need_bytes
    stranded_bytes = np.where(no_replica, headroom_bytes, 0).sum(axis=1)
    replicas_stranded = np.where(small, free_replicas, 0).sum(axis=1)
    needs = np.where(healthy[rows], verdict.need_bytes, INT64_MAX)
    return NodeSpaces(
        is_open=is_open,
        has_any=np.asarray(slots.any(axis=1))[rows],
        headroom_bytes=headroom_bytes.sum(axis=1),
        stranded_bytes=np.where(is_open, stranded_bytes, 0),
        replicas_free=np.where(is_open, free_replicas.sum(axis=1), 0),
        replicas_stranded=np.where(is_open, replicas_stranded, 0),
        need_bytes=needs.min(axis=1, initial=INT64_MAX),
    )


def space(verdicts: Verdicts) -> Space:
    """Compute the free capacity of all nodes for a request for one resource."""
    nodes = node_spaces(verdicts)
    is_open = nodes.is_open
    need_bytes = int(nodes.need_bytes[is_open].min(initial=INT64_MAX))
    return Space(
        open_nodes=int((is_open & nodes.has_any).sum()),
        closed_nodes=int((~is_open & nodes.has_any).sum()),
        fitting_nodes=int(verdicts.fits.sum()),
        need_bytes=need_bytes * verdicts.asks[0].ask.count if need_bytes < INT64_MAX else None,
        headroom_bytes=int(nodes.headroom_bytes[is_open].sum()),
        closed_bytes=int(nodes.headroom_bytes[~is_open].sum()),
        stranded_bytes=int(nodes.stranded_bytes.sum()),
        replicas_free=int(nodes.replicas_free.sum()),
        replicas_stranded=int(nodes.replicas_stranded.sum()),
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
    """Return the device class. ``at`` contains (index of the node in ``verdicts``, slot) for each
    device."""
    choosable = verdicts.asks[0].choosable
    nodes = sorted({i for i, slot in at if choosable[i, slot]})
    return DeviceClass(
        resource=verdicts.asks[0].ask.resource,
        model=model,
        memory_bytes=memory_bytes,
        devices=len(at),
        nodes=len({i for i, _ in at}),
        largest_fitting_bytes=largest_fitting(verdicts, np.array(nodes, np.int64)),
    )


def largest_devices(snap: Snapshot) -> dict[str, int]:
    """Return the allocatable bytes of the largest device in the snapshot, by device model."""
    found: dict[str, int] = {}
    for node in snap.nodes:
        for terms in node.devices:
            if terms.believed and terms.allocatable_bytes > found.get(terms.device.model, 0):
                found[terms.device.model] = terms.allocatable_bytes
    return found


def capacity_summary(space: Space, pods: int, at_least: bool) -> str:
    """Return a sentence that states how many ``pods`` fit, or why no pod fits.

    ``at_least`` states whether more pods may fit.
    """
    free = gib(space.headroom_bytes)
    stranded = (
        f"; {gib(space.stranded_bytes)} are on devices without a free replica"
        if space.stranded_bytes
        else ""
    )
    match space.fullness:
        case "fits":
            more = "at least " if at_least else ""
            nodes = space.open_nodes + space.closed_nodes
            on = f"{space.fitting_nodes} of {nodes} node{'' if nodes == 1 else 's'}"
            fit = "1 such pod fits" if pods == 1 else f"{pods} such pods fit"
            return f"{more}{fit} now, on {on}; {free} are free in total{stranded}"
        case "closed":
            return "no node with a device of this resource accepts pods at the moment"
        case "full":
            return (
                f"full: {free} are free in total, which is less than one such pod needs{stranded}"
            )
        case "fragmented":
            if space.largest_fitting_bytes is None:
                why = "every node also rejects the pod for reasons other than memory"
            else:
                why = f"the largest request that fits is {gib(space.largest_fitting_bytes)}"
            return f"fragmented: {free} are free in total, and {why}{stranded}"


def larger_than_any(verdicts: Verdicts) -> tuple[int, int] | None:
    """Return the pod's minimum need and the largest allocatable memory if no device is large
    enough.

    Both values are bytes, for the first resource without a device that could ever hold the pod.
    Return None if each requested resource has a device that is large enough.
    """
    for verdict in verdicts.asks:
        slots = verdicts.snap.slots_of(verdict.ask.resource)[verdicts.rows]
        allocatable = verdicts.snap.columns.allocatable_bytes[verdicts.rows][slots]
        needs = verdict.need_bytes[slots]
        if allocatable.any() and (needs > allocatable).all():
            return int(needs.min()), int(allocatable.max())
    return None


def least_need_bytes(verdicts: Verdicts) -> int:
    """Return the least memory that the pod needs on any device of each resource that it requests,
    for the resource with the largest need; 0 if no node has a device of the resources."""
    found = [0]
    for verdict in verdicts.asks:
        needs = verdict.need_bytes[verdicts.snap.slots_of(verdict.ask.resource)[verdicts.rows]]
        found.append(int(needs.min(initial=INT64_MAX)) if needs.size else 0)
    return max(found)


def decisive(verdict: AskVerdict, values: Rows) -> Rows:
    """Return the value of the device that is decisive on each node, (n,).

    ``values`` (n, slots) are larger on devices that suit the pod less. If the plugin chooses, the
    worst candidate decides. If Headroom chooses, the worst device of the best set decides.
    """
    choosable, width = verdict.choosable, verdict.ask.widest
    worst: Rows = np.where(choosable, values, -INT64_MAX).max(axis=1, initial=-INT64_MAX)
    by_headroom = verdict.all_ours[verdict.rows] & at_least(choosable, width)
    if by_headroom.any():
        ordered = np.sort(np.where(choosable, values, INT64_MAX), axis=1)
        worst = np.where(by_headroom, ordered[:, width - 1], worst)
    return worst


def largest_fitting(verdicts: Verdicts, among: Rows | None = None) -> int | None:
    """Return the largest request, in bytes per device, that would fit on some node.

    Ignores nodes that reject the pod for reasons other than memory. Returns None if all nodes are
    ignored or the pod requests no GPU. ``among`` restricts the nodes to these indices of the
    verdicts.
    """
    by_memory = np.isin(verdicts.codes, MEMORY_CODES)
    if among is not None:
        by_memory &= np.isin(np.arange(len(verdicts.rows)), among)
    if not verdicts.asks or not by_memory.any():
        return None
    least_bytes = np.full(len(verdicts.rows), INT64_MAX)
    for verdict in verdicts.asks:
        least_bytes = np.minimum(least_bytes, -decisive(verdict, -verdict.free_bytes))
    return max(0, int(least_bytes[by_memory].max()))
