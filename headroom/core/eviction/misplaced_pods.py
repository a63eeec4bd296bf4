"""Selects the pods to evict from a device that lacks memory for all of its pods.

If all predictions are correct, no eviction is necessary. But if the plugin chooses a device that
was not predicted, or if unattributed use appears, a device becomes *overfull*:

    sum over pods on the device: max(requested, measured)
    + unreserved pods + unattributed > allocatable

The agent lets no gated pod start on a device that is overfull, unhealthy or closed by its compute
mode, nor on a cordoned device on which Headroom did not place it. Only pods that have not started
are evicted, because their eviction costs nothing but time, and only as many as necessary. Pods that
were bound without Headroom come first, then the newest pods. Terminating pods count as gone. A pod
marked for eviction stays marked until it is gone.

A pod without a controller is not replaced after its eviction. So it is not evicted but waits at its
gate, as long as it does not keep a pod of another namespace from starting or from its memory.
Otherwise authors of pods could protect their pods at the cost of others by creating them without a
controller.

At most one pod is marked at a time. If two pods were marked, both could be evicted although
evicting one of them is enough.
"""

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass

from headroom.contract.cordon import may_start_on
from headroom.contract.gate import has_gate, waits
from headroom.contract.gpunode import ADOPTED, EVICTED, GPUNode, GPUNodeStatus, Reservation
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.contract.timestamps import age
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.occupancy import Holder
from headroom.core.placement.policy import Rules

#: Issues of a device on which the agent lets no gated pod start.
_CLOSED = (Reason.UNHEALTHY_DEVICE, Reason.COMPUTE_MODE)
#: Seconds after its reservation during which a pod without a gate that uses no memory counts as
#: new. An older pod may already have done work.
NEW_FOR_S = 120.0


@dataclass(frozen=True, slots=True)
class Idle:
    """A pod that has not started, because it waits at its gate or uses no memory yet."""

    #: When the pod's reservation was made (RFC 3339). The newest pod is evicted first.
    since: str
    gated: bool
    #: Whether a controller creates a replacement after the pod's eviction.
    replaced: bool
    #: Whether the ledger already marks the pod for eviction.
    marked: bool
    #: Whether Headroom granted the pod's reservation. Pods that were bound without Headroom are
    #: evicted first.
    granted: bool = True
    #: UUIDs of the devices on which the pod may start although they are cordoned.
    placed_on: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Misplaced:
    #: Uids of pods to evict.
    leave: frozenset[str] = frozenset()
    #: Uids of gated pods that cannot start, and that no controller would replace after eviction.
    stuck: frozenset[str] = frozenset()


def idle_on(
    gpunode: GPUNode, sitting: Iterable[Pod], wall_s: float, rules: Rules
) -> dict[str, Idle]:
    """Return the pods that wait at their gate, by uid, and with ``evict_misses`` also new pods."""
    found: dict[str, Idle] = {}
    for pod in sitting:
        uid, metadata = pod.metadata.uid, pod.metadata
        reservation = gpunode.spec.reservations.get(uid)
        if reservation is None or metadata.deletion_timestamp:
            continue
        gated = waits(pod)
        if gated or (rules.evict_misses and _is_new(pod, reservation, gpunode.status, wall_s)):
            owners = metadata.owner_references or ()
            found[uid] = Idle(
                since=reservation.since,
                gated=gated,
                replaced=any(owner.controller for owner in owners),
                marked=EVICTED in reservation.flags,
                granted=ADOPTED not in reservation.flags,
                placed_on=frozenset(
                    uuid
                    for charge in reservation.charges
                    for uuid in charge.candidates
                    if may_start_on(reservation, uuid)
                ),
            )
    return found


def _is_new(
    pod: Pod, reservation: Reservation, status: GPUNodeStatus | None, wall_s: float
) -> bool:
    """Return whether the pod was bound recently and is known to use no memory."""
    stamps = [reservation.since]
    # An adopted pod may be much older than its reservation.
    if ADOPTED in reservation.flags:
        stamps.append(pod.metadata.creation_timestamp or "")
    ages_s = [age(stamp, wall_s) for stamp in stamps]
    # The time can be in the future if the replica that wrote it had a clock that was ahead.
    if has_gate(pod) or any(each is None or abs(each) > NEW_FOR_S for each in ages_s):
        return False
    used = [use.used_bytes for use in status.pods if use.uid == pod.metadata.uid] if status else []
    return bool(used) and all(figure == 0 for figure in used)


def overfull(devices: Iterable[DeviceTerms]) -> bool:
    """Return whether any device that is reserved for pods is overfull, or closed to some pods."""
    return any(
        terms.reservation_bytes
        and (
            _excess_bytes(terms, _observed_holders(terms)) > 0
            or terms.health_issue in (*_CLOSED, Reason.CORDONED_DEVICE)
        )
        for terms in devices
    )


def misplaced(
    devices: Sequence[DeviceTerms], idle: Mapping[str, Idle], leaving: Set[str], may_mark: bool
) -> Misplaced:
    """Return the pods to evict from the node, including pods already marked for eviction.

    ``idle`` maps uids to the pods that have not started. Only these pods may be evicted.
    ``leaving`` contains the uids of pods that are terminating or have ended. ``may_mark`` permits
    marking one more pod.
    """
    leave: set[str] = set()
    stuck: set[str] = set()
    for terms in devices:
        if not terms.believed:
            # No pod starts there, and the free memory is unknown.
            continue
        observed = [
            holder for holder in _observed_holders(terms) if holder.uid not in leaving | leave
        ]
        excess_bytes = _excess_bytes(terms, observed)
        for holder in sorted(observed, key=lambda h: _eviction_order(h, idle), reverse=True):
            pod = idle.get(holder.uid)
            if pod is None or not (excess_bytes > 0 or _is_closed_to(terms, pod)):
                continue
            harms = excess_bytes > 0 and _harms_others(holder, pod, observed, idle)
            if not pod.replaced and not harms:
                if pod.gated:
                    stuck.add(holder.uid)
            elif pod.marked or may_mark:
                may_mark = may_mark and pod.marked
                leave.add(holder.uid)
                excess_bytes -= holder.charged_bytes
    return Misplaced(frozenset(leave), frozenset(stuck))


def _is_closed_to(terms: DeviceTerms, pod: Idle) -> bool:
    """Return whether the agent keeps the pod from starting there, regardless of free memory."""
    if not pod.gated:
        return False
    if terms.cordoned:
        return terms.device.uuid not in pod.placed_on
    return terms.health_issue in _CLOSED


def _harms_others(
    holder: Holder, pod: Idle, observed: Iterable[Holder], idle: Mapping[str, Idle]
) -> bool:
    """Return whether a pod of another namespace lacks memory because of this pod.

    A gated pod uses no memory, so it can only keep other gated pods from starting.
    """
    return any(
        other.namespace != holder.namespace
        and (not pod.gated or (other.uid in idle and idle[other.uid].gated))
        for other in observed
    )


def _eviction_order(holder: Holder, idle: Mapping[str, Idle]) -> tuple[bool, bool, str, str]:
    """Return a sort key. The pod with the largest key is evicted first.

    Marked pods come first, then pods that were bound without Headroom, then the newest pod.
    """
    pod = idle.get(holder.uid)
    return (pod.marked, not pod.granted, pod.since, holder.uid) if pod else (False, False, "", "")


def _observed_holders(terms: DeviceTerms) -> list[Holder]:
    return [holder for holder in terms.holders if holder.observed]


def _excess_bytes(terms: DeviceTerms, observed: Iterable[Holder]) -> int:
    """Return the bytes by which the observed pods exceed the memory. The result is negative if
    memory is free."""
    charged_bytes = sum(holder.charged_bytes for holder in observed)
    return (
        charged_bytes
        + terms.unreserved_pods_bytes
        + terms.unattributed_bytes
        - terms.allocatable_bytes
    )
