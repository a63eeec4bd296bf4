"""Which pods on a node have not begun yet, so that nothing but time is lost when one is evicted."""

from collections.abc import Iterable

from contract.gate import has_gate, waits
from contract.gpunode import ADOPTED, EVICTED, GPUNode, GPUNodeStatus, Reservation
from contract.kube import Pod
from extender.placement.overfull_devices import Idle
from extender.placement.policy import Rules
from extender.state.heartbeats import age

#: Seconds since its promise for which a pod without a gate, that uses no memory, is new. One that
#: is older may have done anything.
NEW_FOR_S = 120.0


def idle_on(
    gpunode: GPUNode, sitting: Iterable[Pod], wall_s: float, rules: Rules
) -> dict[str, Idle]:
    """By uid: those at their gate, and, where the rules have them evicted, newcomers."""
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
    """Whether the pod, that we placed, has only just come and is known to use no memory."""
    since_s = age(reservation.since, wall_s)
    # From the future: of a replica whose clock was ahead, so that nobody knows.
    if has_gate(pod) or ADOPTED in reservation.flags or since_s is None or abs(since_s) > NEW_FOR_S:
        return False
    used = [use.used_bytes for use in status.pods if use.uid == pod.metadata.uid] if status else []
    return bool(used) and all(figure == 0 for figure in used)
