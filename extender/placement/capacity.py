"""Whether the cluster is full or fragmented, for pods of one size: what of the memory that is left
such a pod can be given, and what of the rest lies where no pod could be put.

All is read from one verdict, that is from the arrays that filter decides by. How many pods fit is
not here, since that takes to place them: ``cluster.counting``.
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from contract.quantity import gib
from contract.reasons import Reason
from extender.placement.candidate_devices import Mask, slots_of
from extender.placement.explain import largest_fitting
from extender.placement.fit import Verdicts
from extender.placement.snapshot import CODE_OF
from extender.placement.visible_devices_env import Nodes

#: "closed": no node with a device of the resource takes pods at all.
Fullness = Literal["room", "fragmented", "full", "closed"]
_ORDER = list(Reason)
#: Codes of what is said of the pod or of a node as a whole, whatever its devices have.
_CLOSED_CODES = [CODE_OF[r] for r in _ORDER[: _ORDER.index(Reason.NO_SUCH_RESOURCE) + 1]]


@dataclass(frozen=True, slots=True)
class DeviceClass:
    """Devices of one make under one resource name."""

    resource: str
    model: str
    memory_bytes: int
    devices: int
    nodes: int
    #: The largest request per device that fits on a node with a device of it that the pod could
    #: end on; None where more than memory is in the way on all of them.
    largest_fitting_bytes: int | None


@dataclass(frozen=True, slots=True)
class Space:
    """Of the nodes asked about, for one size of pods."""

    #: That have a device of the resource and take pods; and that have one and take none.
    open_nodes: int
    closed_nodes: int
    #: On which one more pod fits.
    fitting_nodes: int
    #: What one pod takes of a node, on the devices where that is least; None without devices.
    need_bytes: int | None
    #: Left on the sound devices of the resource, on open nodes; and on closed ones.
    headroom_bytes: int
    closed_bytes: int
    #: Of the headroom what lies on devices without a replica for anybody: nobody can be given it.
    stranded_bytes: int
    #: Replicas on open nodes that nobody holds, and of those the ones on devices without room for
    #: such a pod.
    replicas_free: int
    replicas_stranded: int
    #: The largest request per device that fits; None where more than memory is in the way.
    largest_fitting_bytes: int | None

    @property
    def fullness(self) -> Fullness:
        if self.fitting_nodes:
            return "room"
        if not self.open_nodes or self.need_bytes is None:
            return "closed"
        return "fragmented" if self.headroom_bytes >= self.need_bytes else "full"


def space(verdicts: Verdicts) -> Space:
    """Of a request for one resource."""
    snap, rows, columns = verdicts.snap, verdicts.rows, verdicts.snap.columns
    verdict = verdicts.asks[0]
    slots = slots_of(verdict.ask.resource, snap)
    sound: Mask = slots & (columns.health_issue == 0)
    opens: Nodes = ~np.isin(verdicts.codes, _CLOSED_CODES)
    has_any = np.asarray(slots.any(axis=1))[rows]
    # Each of those that share a memory shows all that is left of it.
    left = np.maximum(columns.headroom_bytes, 0) // np.maximum(columns.sharers, 1)
    left = np.where(sound, left, 0)[rows]
    free = np.where(sound, columns.replicas_free, 0)[rows].astype(np.int64)
    awaited = np.where(slots, columns.replicas_unconfirmed, 0).max(axis=1, initial=0)[rows]
    # What is free for pods on their way is free for nobody else.
    too_few: Nodes = free.sum(axis=1) - awaited < verdict.ask.count
    nobody: Mask = (free == 0) | too_few[:, None]
    small = verdict.free_bytes < verdict.need_bytes
    needs = verdict.need_bytes[opens][sound[rows][opens]]
    return Space(
        open_nodes=int((opens & has_any).sum()),
        closed_nodes=int((~opens & has_any).sum()),
        fitting_nodes=int(verdicts.fits.sum()),
        need_bytes=int(needs.min()) * verdict.ask.count if len(needs) else None,
        headroom_bytes=int(left[opens].sum()),
        closed_bytes=int(left[~opens].sum()),
        stranded_bytes=int(np.where(nobody, left, 0)[opens].sum()),
        replicas_free=int(free[opens].sum()),
        replicas_stranded=int(np.where(small, free, 0)[opens].sum()),
        largest_fitting_bytes=largest_fitting(verdicts),
    )


def device_classes(verdicts: Verdicts) -> list[DeviceClass]:
    """The classes under the resource that is asked for, the largest first."""
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


def told(space: Space, pods: int, at_least: bool) -> str:
    """Full or fragmented, in one sentence; so many ``pods`` fit, or ``at_least``."""
    left = gib(space.headroom_bytes)
    stranded = (
        f"; {gib(space.stranded_bytes)} lie on devices without a free replica"
        if space.stranded_bytes
        else ""
    )
    match space.fullness:
        case "room":
            more = "at least " if at_least else ""
            on = f"{space.fitting_nodes} of {space.open_nodes + space.closed_nodes} nodes"
            fit = "1 such pod fits" if pods == 1 else f"{pods} such pods fit"
            return f"{more}{fit} now, on {on}; {left} are left in all{stranded}"
        case "closed":
            return "no node with a device of this resource takes pods now"
        case "full":
            return f"full: {left} are left in all, less than one such pod needs{stranded}"
        case "fragmented":
            if space.largest_fitting_bytes is None:
                why = "more than memory is in the way on every node"
            else:
                why = f"the largest request that fits is {gib(space.largest_fitting_bytes)}"
            return f"fragmented: {left} are left in all, and {why}{stranded}"
