"""Decides whether a gated pod may start: only where the ledger charges it. Pure.

A promise names candidates; which of them the pod got, the kubelet decides. The promise is
*narrowed* to the devices the pod got once the GPUNode's own status shows it there: from that
version of the object on, whoever weighs the node charges the pod on these devices, and a promise
that was weighed on an older version fails its compare-and-swap. So, with our own newest sample:

    not yet   it holds fewer replicas than promised, or is promised nothing, or the GPUNode does not
              show it where it is; or a pod that sits there is not in the ledger, so that nobody
              can say what it will take; or pods on their way could still take the room
    no        what sits on one of its devices is more than allocatable, or the device is broken, or
              the ledger says that the pod is to leave the node
    yes       everything that sits there, or may come, fits:

    sum over pods there, or that may come: max(promised, measured)
        + measured use of pods without a promise + unowned use beyond the tolerance  <=  allocatable

Two pods that are too much together are both told no, whichever asks first: the agent keeps no
memory of its answers that a restart could lose. When one of them goes, the other is told yes.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from agent.probes.cgroup import is_static
from agent.status.attribution import memories
from contract.gpunode import (
    EVICTED,
    HOLDINGS_SOURCES,
    UNATTRIBUTED_TOLERANCE_BYTES,
    Charge,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    PodUse,
    Reservation,
)


@dataclass(frozen=True, slots=True)
class Limits:
    """What is left out of the equation of each device, as the extender does it."""

    reserve_bytes: int
    tolerance_bytes: int


#: Why nobody is answered for where ``limits`` are None.
LIMITS_UNKNOWN = "the annotations of the node are not known"


def limits(reserve_bytes: int | None) -> Limits | None:
    """What holds on this node, for gate and steering alike.

    None where it is not known what the node's annotation keeps free: taken for nothing, that
    could be given to a pod.
    """
    return None if reserve_bytes is None else Limits(reserve_bytes, UNATTRIBUTED_TOLERANCE_BYTES)


@dataclass(frozen=True, slots=True)
class Verdict:
    answer: Literal["yes", "no", "not yet"]
    #: Says nothing of other pods: whoever is on the node may ask.
    reason: str = ""


def judge(node: GPUNode, sample: GPUNodeStatus, uid: str, limits: Limits) -> Verdict:
    """Whether the pod may start.

    ``node`` must have been read consistently; ``sample`` is our own, newest and fresh.
    """
    reservation = node.spec.reservations.get(uid)
    if reservation is None or not node.spec.initialised:
        return Verdict("not yet", "no memory is promised to this pod on this node")
    if EVICTED in reservation.flags:
        return Verdict("no", "this pod is to leave the node, where its device has no room for it")
    if HOLDINGS_SOURCES.isdisjoint(s.name for s in sample.sources if s.state == "ok"):
        return Verdict("not yet", "the kubelet does not tell which pod holds which device")
    held = _held(sample, uid)
    if not held or any(missing(sample, uid, charge) for charge in reservation.charges):
        return Verdict("not yet", "this pod does not hold all its devices yet")
    if node.status is None or _held(node.status, uid) != held:
        return Verdict("not yet", "the report of where this pod is was not written yet")
    if not {uuid for uuid, _ in held} <= {device.uuid for device in sample.devices}:
        return Verdict("not yet", "a device of this pod is not known")
    verdicts = [
        _room(memory, node.spec, sample, uid, limits)
        for memory in memories(sample.devices)
        if any(device.uuid == uuid for device in memory for uuid, _ in held)
    ]
    order = ("no", "not yet", "yes")
    return min(verdicts, key=lambda verdict: order.index(verdict.answer))


def _room(
    memory: Sequence[Device],
    spec: GPUNodeSpec,
    sample: GPUNodeStatus,
    uid: str,
    limits: Limits,
) -> Verdict:
    """Whether all that sits in one memory, or may come, fits."""
    first = memory[0]
    if not all(device.healthy for device in memory):
        return Verdict("no", "the device that this pod got is unhealthy")
    if min(first.memory_bytes, first.reserved_bytes, first.used_bytes) < 0:
        return Verdict("not yet", "the memory of the device that this pod got is not known")
    allocatable_bytes = first.memory_bytes - first.reserved_bytes - limits.reserve_bytes
    rows = rows_in(memory, sample)
    if any(row.replica and reserved_for(row, spec) not in spec.reservations for row in rows):
        return Verdict("not yet", "a pod on its device is not in the ledger yet")
    seen = {reserved_for(row, spec) for row in rows}
    sitting_bytes = taken_bytes(memory, spec, rows, limits.tolerance_bytes)
    if sitting_bytes > allocatable_bytes:
        return Verdict("no", "the device that this pod got has no room for it")
    # Of an unshared device nobody gets a replica while this pod has it.
    shared = first.sharing != "none" or len(memory) > 1
    coming = spec.reservations.items() if shared else ()
    assumed_bytes = sum(
        asked(reservation, memory, uses=False)
        for other, reservation in coming
        if other not in seen
        and any(_may_come(sample, other, c, memory) for c in reservation.charges)
    )
    if sitting_bytes + assumed_bytes > allocatable_bytes:
        return Verdict("not yet", "pods on their way to this node could take the room")
    return Verdict("yes")


def rows_in(memory: Iterable[Device], sample: GPUNodeStatus) -> list[PodUse]:
    uuids = {device.uuid for device in memory}
    return [row for row in sample.pods if row.device in uuids]


def taken_bytes(
    memory: Sequence[Device],
    spec: GPUNodeSpec,
    rows: Sequence[PodUse],
    tolerance_bytes: int,
    unattributed_use_bytes: int = 0,
) -> int:
    """What those that sit in one memory were promised or use, whichever is more, and what nobody
    that we know uses. A pod without a promise counts as ``unattributed_use_bytes`` at least."""
    explained_bytes = 0
    for key in {reserved_for(row, spec) for row in rows} | certain(spec, memory):
        figures = [row.used_bytes for row in rows if reserved_for(row, spec) == key]
        used_bytes = sum(figure or 0 for figure in figures)
        reservation = spec.reservations.get(key)
        uses = used_bytes > 0 or None in figures
        asked_bytes = (
            unattributed_use_bytes if reservation is None else asked(reservation, memory, uses)
        )
        explained_bytes += max(asked_bytes, used_bytes)
    return explained_bytes + max(0, _unattributed(memory, rows, explained_bytes) - tolerance_bytes)


def _held(status: GPUNodeStatus, uid: str) -> set[tuple[str, str]]:
    """(device, replica) of the pod."""
    return {(row.device, row.replica) for row in status.pods if row.uid == uid and row.replica}


def missing(status: GPUNodeStatus, uid: str, charge: Charge) -> int:
    """Replicas of a charge that the pod does not hold; one held by two containers counts once.

    By device, not by resource alone: a plugin that was configured anew can have renamed it.
    """
    meant = {
        device.uuid
        for device in status.devices
        if device.resource == charge.resource or device.uuid in charge.candidates
    }
    return max(0, charge.count - sum(uuid in meant for uuid, _ in _held(status, uid)))


def certain(spec: GPUNodeSpec, memory: Iterable[Device]) -> set[str]:
    """Those whose own variable shows them one of these devices, wherever their replicas are."""
    uuids = {device.uuid for device in memory}
    return {
        uid
        for uid, reservation in spec.reservations.items()
        if any(c.by_environment and not uuids.isdisjoint(c.candidates) for c in reservation.charges)
    }


def _may_come(status: GPUNodeStatus, uid: str, charge: Charge, memory: Iterable[Device]) -> bool:
    if charge.by_environment or not missing(status, uid, charge):
        return False
    return any(
        device.uuid in charge.candidates
        or (device.resource == charge.resource and device.replicas.free > 0)
        for device in memory
    )


def reserved_for(row: PodUse, spec: GPUNodeSpec) -> str:
    """The uid that a row's pod has in the ledger; PodResources alone tells names only, and the
    kubelet knows a static pod by another uid than the API server."""
    if row.uid and not is_static(row.uid):
        return row.uid
    named = [
        uid
        for uid, reservation in spec.reservations.items()
        if (reservation.namespace, reservation.name) == (row.namespace, row.name)
    ]
    return named[0] if len(named) == 1 else f"{row.namespace}/{row.name}"


def asked(reservation: Reservation, memory: Iterable[Device], uses: bool) -> int:
    """The most that was promised for any device of the memory, of every charge that can be there.

    Where a device was not thought of it is the most for any, as the extender has it. Whose own
    variable decides is not there by a replica alone, unless it ``uses`` the memory, or may.
    """
    memory = list(memory)
    there = [
        charge
        for charge in reservation.charges
        if uses or not charge.by_environment or any(d.uuid in charge.candidates for d in memory)
    ]
    meant = [
        charge
        for charge in there
        if any(d.resource == charge.resource or d.uuid in charge.candidates for d in memory)
    ]
    return sum(
        max(
            charge.candidates.get(d.uuid, max(charge.candidates.values(), default=0))
            for d in memory
        )
        for charge in meant or there
    )


def _unattributed(memory: Sequence[Device], rows: Sequence[PodUse], explained_bytes: int) -> int:
    """Where processes cannot be told apart it is all use beyond what is charged."""
    told = [device.unattributed_bytes for device in memory]
    if None in told or any(row.used_bytes is None for row in rows):
        return max(0, max(device.used_bytes for device in memory) - explained_bytes)
    return sum(figure for figure in told if figure is not None)
