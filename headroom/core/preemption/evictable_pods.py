"""Finds the pods that leave a node anyway, and the pods that preemption may evict from it.

``left_bytes`` computes the memory that evictions free. ``Needs`` computes the amounts that they
must free so that kube-scheduler's own filters, which do not run here, pass.
"""

from collections.abc import Iterable, Sequence, Set
from decimal import Decimal

from headroom.contract.annotations import MIRROR
from headroom.contract.kube import Pod
from headroom.contract.timestamps import age
from headroom.core.cluster.cluster import Cluster
from headroom.core.eviction.eligibility import is_static
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.preemption.victims import NOT_STARTED_S, Evictable
from headroom.core.rules.eligible_nodes import not_modeled
from headroom.core.rules.pod_requests import NOTHING, Demands, amount, demands, total

#: Priority of system-cluster-critical. User-defined priorities are lower.
CRITICAL = 2_000_000_000
#: A terminating pod is overdue if it still exists this number of seconds after its grace period.
OVERDUE_S = 60.0


def leaving(state: Cluster, name: str, now_s: float, within_s: float) -> set[str]:
    """Return the uids of pods that leave the node within ``within_s`` seconds in any case.

    Memory of the node is still charged for these pods. They are terminating, have ended, or are
    deleted but their memory is not free yet.
    """
    gpunode = state.gpunode(name)
    reservations = gpunode.spec.reservations if gpunode else {}
    status = gpunode.status if gpunode else None
    uids = {*reservations, *(use.uid for use in (status.pods if status else ()))}
    uids |= {pod.metadata.uid for pod in state.pods_on(name)}
    return {uid for uid in uids if _goes_soon(state, uid, name, now_s, within_s)}


def _goes_soon(state: Cluster, uid: str, name: str, now_s: float, within_s: float) -> bool:
    pod = state.pod(uid)
    if pod is None:
        # A pod that was never seen may be so new that only its reservation is known.
        return state.departures.seen(uid) is not None
    late_s = _overdue_s(state, pod, now_s)
    return pod.ended or (
        late_s is not None and pod.node == name and -within_s <= late_s <= OVERDUE_S
    )


def is_stuck(state: Cluster, pod: Pod, now_s: float) -> bool:
    """Return whether the pod is terminating and overdue, so that another eviction frees no
    memory."""
    late_s = _overdue_s(state, pod, now_s)
    return late_s is not None and late_s > OVERDUE_S


def _overdue_s(state: Cluster, pod: Pod, now_s: float) -> float | None:
    """Return the seconds since the end of a terminating pod's grace period.

    The result is negative before the end, and None if the pod is not terminating.
    """
    deleted = pod.metadata.deletion_timestamp
    return age(deleted, state.epoch_s + now_s) if deleted else None


def may_preempt(pod: Pod) -> bool:
    return pod.spec.preemption_policy != "Never"


def is_evictable(pod: Pod, preemptor: Pod) -> bool:
    """Return whether the pod can be evicted and has a lower priority than the preemptor.

    Static pods cannot be evicted. Only the annotation proves that a pod is static. The author of
    any pod can write an owner of kind Node, but a kubelet runs no pod with this annotation except
    its own static pods.
    """
    return pod.priority < min(preemptor.priority, CRITICAL) and not is_static(pod)


def as_evictable(pod: Pod) -> Evictable:
    """Return the values by which kube-scheduler orders victims."""
    stamp = pod.status.start_time if pod.status else None
    since_s = age(stamp, 0.0) if stamp else None
    started_s = NOT_STARTED_S if since_s is None else round(-since_s)
    return Evictable(pod.metadata.uid, pod.priority, started_s)


def left_bytes(terms: DeviceTerms, gone: Set[str]) -> int:
    """Return an upper bound of the free bytes on the device after the pods in ``gone`` have left.

    Unattributed and unreserved use does not count. Return -1 if a pod stays on an unshared device.
    """
    staying = [h for h in terms.holders if h.observed and h.uid not in gone]
    if staying and not terms.common:
        return -1
    return terms.allocatable_bytes - sum(holder.charged_bytes for holder in staying)


class Needs:
    """The amounts to free on a node, by resource.

    For managed GPU resources it is the missing amount, and for other resources the amount that
    kube-scheduler's own victims would free.
    """

    def __init__(
        self,
        state: Cluster,
        name: str,
        asked: Demands,
        proposed: Sequence[Pod],
        held_for: Iterable[Pod],
    ) -> None:
        """Compute the amounts.

        ``asked`` contains the preemptor's requests, ``proposed`` kube-scheduler's victims with
        managed GPUs on the node, and ``held_for`` the pods for which the node is held.
        """
        sitting = {pod.metadata.uid: demands(pod) for pod in state.pods_on(name)}
        freed = total(sitting[pod.metadata.uid] for pod in proposed)
        node = state.node(name)
        offers = (node.status.allocatable if node and node.status else None) or {}
        held = total(map(demands, held_for))
        #: For each resource, the request of each pod on the node, and the amount to free.
        self._terms: list[tuple[dict[str, int], int]] = []
        for key, wanted in asked.items():
            if wanted <= 0:
                continue
            taken = {uid: _nanos(of.get(key, NOTHING)) for uid, of in sitting.items()}
            if key in offers and (state.rules.manages(key) or key == MIRROR):
                # Only GPU pods request these resources, so the missing amount is known.
                left = amount(offers[key]) - wanted - held.get(key, NOTHING)
                self._terms.append((taken, sum(taken.values()) - _nanos(left)))
            else:
                self._terms.append((taken, _nanos(freed.get(key, NOTHING))))

    def met(self, gone: Set[str]) -> bool:
        """Return whether the pods in ``gone`` free enough. If a set of pods frees enough, so does
        every superset."""
        return all(
            least <= 0 or sum(taken[uid] for uid in gone if uid in taken) >= least
            for taken, least in self._terms
        )


def _nanos(of: Decimal) -> int:
    return int(of * 1_000_000_000)


def only_resources_missing(pod: Pod, proposed: Iterable[Pod]) -> bool:
    """Return whether kube-scheduler can have rejected the node only because of insufficient
    resources.

    If so, other pods can be evicted instead of the proposed pods.
    """
    affinity = pod.spec.affinity
    return not (
        (affinity and (affinity.pod_affinity or affinity.pod_anti_affinity))
        or not_modeled(pod)
        or any(p.spec.affinity and p.spec.affinity.pod_anti_affinity for p in proposed)
    )
