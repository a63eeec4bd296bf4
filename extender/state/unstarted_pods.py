"""Finds pods on a node that have not started their work, so evicting them only costs time."""

from collections.abc import Iterable

from contract.gate import has_gate, waits
from contract.gpunode import ADOPTED, EVICTED, GPUNode, GPUNodeStatus, Reservation
from contract.kube import Pod
from extender.placement.overfull_devices import Idle
from extender.placement.policy import Rules
from extender.state.heartbeats import age

#: A pod without a gate that uses no memory counts as new for this long after its reservation. An
#: older pod may already have done work.
NEW_FOR_S = 120.0


def idle_on(
    gpunode: GPUNode, sitting: Iterable[Pod], wall_s: float, rules: Rules
) -> dict[str, Idle]:
    """Return by uid the pods that wait at their gate and, with ``evict_misses``, new pods."""
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
            )
    return found


def _is_new(
    pod: Pod, reservation: Reservation, status: GPUNodeStatus | None, wall_s: float
) -> bool:
    """Return whether Headroom placed the pod recently and it is known to use no memory."""
    since_s = age(reservation.since, wall_s)
    # A time in the future comes from a replica whose clock was ahead: the age is unknown.
    if has_gate(pod) or ADOPTED in reservation.flags or since_s is None or abs(since_s) > NEW_FOR_S:
        return False
    used = [use.used_bytes for use in status.pods if use.uid == pod.metadata.uid] if status else []
    return bool(used) and all(figure == 0 for figure in used)
