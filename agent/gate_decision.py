"""Decides whether a gated pod may start, which requires that the ledger counts it on its actual
devices. Pure.

A reservation names candidate devices, and the kubelet decides which of them the pod gets. Once the
GPUNode's status shows the pod's devices, its reservation is *narrowed*: it counts only on these
devices. From that version of the GPUNode on, extenders use the narrowed reservation, and a
reservation that was computed from an older version fails its compare-and-swap. So the agent answers
from its newest sample:

    not yet   the pod has no reservation, or holds fewer replicas than reserved, or the GPUNode does
              not show its devices yet; or a pod without a reservation holds a replica of such a
              device, so its future use is unknown; or unconfirmed pods could still use the memory;
              or the pod starts alone, for the first time or again, and must wait for another
              such pod
    no        the pods on one of its devices need more than is allocatable, or the device is
              unhealthy or closed by its compute mode, or it is cordoned and Headroom did not place
              the pod there, or the ledger marks the pod as evicted
    yes       on each of its devices everything fits, including unconfirmed pods:

    sum over pods there, or that may come: max(reserved, measured)
        + measured use of pods without a reservation
        + unattributed use above the tolerance  <=  allocatable

If two pods together need too much memory, both get "no". When one of them is gone, the other gets
"yes". The agent remembers an answer only if it was "yes" to a pod that starts alone.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from agent.attribution import memories
from agent.probes.cgroup import is_static
from headroom.contract.cordon import is_cordoned, may_start_on
from headroom.contract.gpunode import (
    ADOPTED,
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
    """Memory to keep free and unattributed use to ignore on each device. Extenders use the same
    values."""

    #: Memory that the node's annotation keeps free.
    reserve_bytes: int
    #: Unattributed use that is ignored.
    tolerance_bytes: int


#: Reason for "not yet" if ``limits`` returns None.
LIMITS_UNKNOWN = "the annotations of the node are not known"


def limits(reserve_bytes: int | None) -> Limits | None:
    """Return the limits of this node, which the gate and steering share.

    ``reserve_bytes`` is the value of the node's annotation. If it is None (unknown), the limits are
    None too, because with a guess of 0 a pod could get memory that the node keeps free.
    """
    return None if reserve_bytes is None else Limits(reserve_bytes, UNATTRIBUTED_TOLERANCE_BYTES)


@dataclass(frozen=True, slots=True)
class Verdict:
    answer: Literal["yes", "no", "not yet"]
    #: The reason contains nothing about other pods, because any pod can send a request.
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Gates:
    """Uids of pods that wait at their gate or have passed it (``agent.gate_starts``)."""

    #: Pods that start alone, have passed their gate and are still starting.
    starting: Collection[str] = ()
    #: Pods that wait at their gate.
    waiting: Collection[str] = ()


def judge(
    node: GPUNode, sample: GPUNodeStatus, uid: str, limits: Limits, gates: Gates = Gates()
) -> Verdict:
    """Return whether the pod ``uid`` may start. The answer must be yes on all of its devices.

    ``node`` must come from a consistent read. ``sample`` is the agent's newest sample, and must be
    fresh.
    """
    reservation = node.spec.reservations.get(uid)
    if reservation is None or not node.spec.initialised:
        return Verdict("not yet", "no memory is reserved for this pod on this node")
    if EVICTED in reservation.flags:
        return Verdict("no", "this pod is being evicted, because it cannot start on its device")
    if HOLDINGS_SOURCES.isdisjoint(s.name for s in sample.sources if s.state == "ok"):
        return Verdict("not yet", "the kubelet does not report which pod holds which device")
    held = _held(sample, uid)
    if not held or any(missing(sample, uid, charge) for charge in reservation.charges):
        return Verdict("not yet", "this pod does not hold all its devices yet")
    if node.status is None or _held(node.status, uid) != held:
        return Verdict("not yet", "the GPUNode does not show the devices of this pod yet")
    if not {uuid for uuid, _ in held} <= {device.uuid for device in sample.devices}:
        return Verdict("not yet", "a device of this pod is not among the node's devices")
    uuids = {uuid for uuid, _ in held}
    if any(
        device.uuid in uuids
        and is_cordoned(device, node.spec)
        and not may_start_on(reservation, device.uuid)
        for device in sample.devices
    ):
        return Verdict("no", "a device of this pod is cordoned")
    verdicts = [
        _verdict(memory, node.spec, sample, uid, limits, gates)
        for memory in memories(sample.devices)
        if any(device.uuid == uuid for device in memory for uuid, _ in held)
    ]
    order = ("no", "not yet", "yes")
    return min(verdicts, key=lambda verdict: order.index(verdict.answer))


def _verdict(
    memory: Sequence[Device],
    spec: GPUNodeSpec,
    sample: GPUNodeStatus,
    uid: str,
    limits: Limits,
    gates: Gates,
) -> Verdict:
    """Return whether one memory is large enough for its pods and for the unconfirmed pods that may
    get it."""
    first = memory[0]
    if not all(device.healthy for device in memory):
        return Verdict("no", "the device of this pod is unhealthy")
    if any(device.is_closed_by_mode for device in memory):
        return Verdict("no", "the compute mode of this pod's device does not allow it")
    if min(first.memory_bytes, first.reserved_bytes, first.used_bytes) < 0:
        return Verdict("not yet", "the memory of this pod's device is not known")
    allocatable_bytes = first.memory_bytes - first.reserved_bytes - limits.reserve_bytes
    rows = rows_in(memory, sample)
    if any(row.replica and reserved_for(row, spec) not in spec.reservations for row in rows):
        return Verdict("not yet", "a pod on the same device has no reservation yet")
    seen = {reserved_for(row, spec) for row in rows}
    present_bytes = taken_bytes(memory, spec, sample, limits.tolerance_bytes)
    if present_bytes > allocatable_bytes:
        return Verdict("no", "the device of this pod does not have enough free memory")
    # No other pod gets a replica of an unshared device while this pod holds it.
    shared = first.sharing != "none" or len(memory) > 1
    others = spec.reservations.items() if shared else ()
    unconfirmed_bytes = sum(
        asked(reservation, memory, uses=False)
        for other, reservation in others
        if other not in seen
        and any(_may_get(sample, other, c, memory) for c in reservation.charges)
    )
    if present_bytes + unconfirmed_bytes > allocatable_bytes:
        return Verdict("not yet", "pods that are starting on this node could need the memory")
    if _waits_for_start(memory, spec, sample, uid, rows, shared, gates):
        return Verdict("not yet", "another pod that starts alone is starting on the same device")
    return Verdict("yes")


def _waits_for_start(
    memory: Sequence[Device],
    spec: GPUNodeSpec,
    sample: GPUNodeStatus,
    uid: str,
    rows: Sequence[PodUse],
    shared: bool,
    gates: Gates,
) -> bool:
    """Return whether the pod starts alone, and must wait for another such pod on this memory.

    It waits for each such pod that has begun to start there, for the first time or again. On its
    first start it also waits for each pod that is earlier in the order of starts. Pods that start
    again have no order, so they do not wait for pods that may still wait at their gates. So pods
    never wait for each other, even if they hold several devices. Pods that start again do not wait
    for an extender to record a timeout either, because all extenders may have to start again too.
    """
    own = spec.reservations[uid]
    if not own.starts_alone:
        return False
    present = {reserved_for(row, spec) for row in rows} | certain(spec, memory)
    begun = {
        reserved_for(row, spec)
        for row in rows
        if row.used_bytes or (row.started_at and row.uid not in gates.waiting)
    }
    return any(
        (other in present and other in gates.starting)
        or (
            reservation.is_starting
            and other in begun
            and (own.is_starting or not _is_overdue(reservation, sample.observed_at))
        )
        or (
            own.is_starting
            and reservation.is_starting
            and _turn(reservation, other) < _turn(own, uid)
            and (
                other in present
                or (shared and any(_may_get(sample, other, c, memory) for c in reservation.charges))
            )
        )
        for other, reservation in spec.reservations.items()
        if other != uid
    )


def _is_overdue(reservation: Reservation, now: str) -> bool:
    """Return whether the start has timed out at ``now`` (RFC 3339), or False if either time is
    unknown."""
    try:
        age = datetime.fromisoformat(now) - datetime.fromisoformat(reservation.since)
    except (TypeError, ValueError):
        return False
    return age.total_seconds() >= reservation.start_timeout_s


def _turn(reservation: Reservation, uid: str) -> tuple[bool, str, str]:
    """Return the sort key by which pods start one after another: the order of their reservations.

    Adopted pods come first. Most of them were bound by another scheduler and have no gate, so they
    start at any time.
    """
    return ADOPTED not in reservation.flags, reservation.since, uid


def rows_in(memory: Iterable[Device], sample: GPUNodeStatus) -> list[PodUse]:
    """Return the rows of the sample that belong to one memory."""
    uuids = {device.uuid for device in memory}
    return [row for row in sample.pods if row.device in uuids]


def taken_bytes(
    memory: Sequence[Device],
    spec: GPUNodeSpec,
    sample: GPUNodeStatus,
    tolerance_bytes: int,
    unreserved_pod_bytes: int = 0,
) -> int:
    """Return the bytes of one memory that are committed to pods or used outside of pods.

    Each pod counts with its reservation or its use, whichever is larger. A pod without a
    reservation counts with its use, but at least with ``unreserved_pod_bytes``. Unattributed use
    above the tolerance is added.
    """
    of_pods_bytes = 0
    rows = rows_in(memory, sample)
    rows_of: defaultdict[str, list[PodUse]] = defaultdict(list)
    for row in rows:
        rows_of[reserved_for(row, spec)].append(row)
    for key in rows_of.keys() | certain(spec, memory):
        figures = [row.used_bytes for row in rows_of.get(key, ())]
        used_bytes = sum(figure or 0 for figure in figures)
        reservation = spec.reservations.get(key)
        uses = used_bytes > 0 or None in figures
        asked_bytes = unreserved_pod_bytes
        if reservation is not None:
            by_container = any(charge.containers for charge in reservation.charges)
            of_pod = (
                [row for row in sample.pods if reserved_for(row, spec) == key]
                if by_container
                else ()
            )
            asked_bytes = asked(reservation, memory, uses, of_pod)
        of_pods_bytes += max(asked_bytes, used_bytes)
    return of_pods_bytes + max(0, _unattributed(memory, rows, of_pods_bytes) - tolerance_bytes)


def _held(status: GPUNodeStatus, uid: str) -> set[tuple[str, str]]:
    """Return the (device, replica) pairs of all replicas that the pod holds."""
    return {(row.device, row.replica) for row in status.pods if row.uid == uid and row.replica}


def held_by_pods(status: GPUNodeStatus) -> dict[str, set[tuple[str, str]]]:
    """Return the (device, replica) pairs of all held replicas, by the uid of their pod."""
    held: defaultdict[str, set[tuple[str, str]]] = defaultdict(set)
    for row in status.pods:
        if row.replica:
            held[row.uid].add((row.device, row.replica))
    return dict(held)


def missing(
    status: GPUNodeStatus,
    uid: str,
    charge: Charge,
    held_by: Mapping[str, set[tuple[str, str]]] | None = None,
) -> int:
    """Return how many of a charge's replicas the pod does not hold.

    ``held_by`` is the result of ``held_by_pods``, which avoids repeated work for callers that ask
    about many pods.

    A replica held by two containers counts once. Replicas of a candidate device count under any
    resource name, because a changed plugin configuration can rename the resource.
    """
    counted = {
        device.uuid
        for device in status.devices
        if device.resource == charge.resource or device.uuid in charge.candidates
    }
    held = _held(status, uid) if held_by is None else held_by.get(uid, ())
    return max(0, charge.count - sum(uuid in counted for uuid, _ in held))


def certain(spec: GPUNodeSpec, memory: Iterable[Device]) -> set[str]:
    """Return the uids of pods that use one of these devices because they set NVIDIA_VISIBLE_DEVICES
    themselves. The replicas that these pods hold do not matter.
    """
    uuids = {device.uuid for device in memory}
    return {
        uid
        for uid, reservation in spec.reservations.items()
        if any(c.by_environment and not uuids.isdisjoint(c.candidates) for c in reservation.charges)
    }


def _may_get(status: GPUNodeStatus, uid: str, charge: Charge, memory: Iterable[Device]) -> bool:
    """Return whether the pod may still get a replica of one of these devices for the charge."""
    if charge.by_environment or not missing(status, uid, charge):
        return False
    return any(
        device.uuid in charge.candidates
        or (device.resource == charge.resource and device.replicas.free > 0)
        for device in memory
    )


def reserved_for(row: PodUse, spec: GPUNodeSpec) -> str:
    """Return the uid that a row's pod has in the ledger, or "namespace/name" if it has none.

    Rows from PodResources may have only a name. A static pod has different uids at the kubelet and
    at the API server.
    """
    if row.uid and not is_static(row.uid):
        return row.uid
    named = [
        uid
        for uid, reservation in spec.reservations.items()
        if (reservation.namespace, reservation.name) == (row.namespace, row.name)
    ]
    return named[0] if len(named) == 1 else f"{row.namespace}/{row.name}"


def asked(
    reservation: Reservation, memory: Iterable[Device], uses: bool, rows: Sequence[PodUse] = ()
) -> int:
    """Return the bytes that a reservation claims on a memory, summed over its charges.

    If some charges are for the resource or a device of this memory, the others are ignored. As in
    the extender, a charge counts with its largest value among the memory's devices, or with the
    maximum of all candidates if no device of the memory is a candidate. A charge from the pod's own
    variable counts only on its candidates, unless the pod ``uses`` this memory. ``rows`` contains
    all rows of the pod. On a memory of one device, only the pod's containers on this device count.
    """
    memory = list(memory)
    shown = rows if len(memory) == 1 else ()
    possible = [
        charge
        for charge in reservation.charges
        if uses or not charge.by_environment or any(d.uuid in charge.candidates for d in memory)
    ]
    matching = [
        charge
        for charge in possible
        if any(d.resource == charge.resource or d.uuid in charge.candidates for d in memory)
    ]
    return sum(
        max(charge.bytes_on(d.uuid, shown) for d in memory) for charge in matching or possible
    )


def _unattributed(memory: Sequence[Device], rows: Sequence[PodUse], of_pods_bytes: int) -> int:
    """Return the unattributed bytes of one memory.

    If these bytes or the use of a pod are not reported, return the used bytes above
    ``of_pods_bytes``.
    """
    figures = [device.unattributed_bytes for device in memory]
    if None in figures or any(row.used_bytes is None for row in rows):
        return max(0, max(device.used_bytes for device in memory) - of_pods_bytes)
    return sum(figure for figure in figures if figure is not None)
