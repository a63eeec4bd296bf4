"""Predicts a node after other pods have left it or were added to it: which pods are leaving anyway,
and whether a pod would fit then."""

from collections.abc import Iterable, Set

import msgspec

from contract.kube import Pod
from contract.reasons import Reason
from extender.placement.device_accounting import without
from extender.placement.fit import fit
from extender.placement.request import Unreadable, VramRequest
from extender.placement.snapshot import NodeTerms
from extender.placement.snapshot_builder import build
from extender.state.cluster_state import ClusterState
from extender.state.heartbeats import age

#: A terminating pod is overdue if it still exists this long after its grace period.
OVERDUE_S = 60.0


def leaving(state: ClusterState, name: str, now_s: float, within_s: float) -> set[str]:
    """Return the uids of pods that leave the node within ``within_s`` seconds in any case.

    Memory of the node is still charged for them. They are terminating, have ended, or are deleted
    but their memory is not yet free.
    """
    gpunode = state.gpunode(name)
    reservations = gpunode.spec.reservations if gpunode else {}
    status = gpunode.status if gpunode else None
    uids = {*reservations, *(use.uid for use in (status.pods if status else ()))}
    uids |= {pod.metadata.uid for pod in state.pods_on(name)}
    return {uid for uid in uids if _goes_soon(state, uid, name, now_s, within_s)}


def _goes_soon(state: ClusterState, uid: str, name: str, now_s: float, within_s: float) -> bool:
    pod = state.pod(uid)
    if pod is None:
        # A pod that was never seen may be so new that only its reservation is known.
        return state.departures.seen(uid) is not None
    if pod.ended:
        return True
    late_s = overdue_s(state, pod, now_s)
    return late_s is not None and pod.node == name and -within_s <= late_s <= OVERDUE_S


def overdue_s(state: ClusterState, pod: Pod, now_s: float) -> float | None:
    """Return the seconds since the end of a terminating pod's grace period, negative before it;
    None if the pod is not terminating."""
    deleted = pod.metadata.deletion_timestamp
    return age(deleted, state.epoch_s + now_s) if deleted else None


def node_without(
    state: ClusterState, name: str, gone: Set[str], pod: Pod, assumed_pods: Iterable[Pod] = ()
) -> NodeTerms:
    """Return the node as filter would see it for ``pod``, once the pods with the uids ``gone`` have
    left and their memory is free. ``assumed_pods`` count as being bound to it."""
    gpunode = state.gpunode(name)
    assumed = state.binding_to(name)
    if gpunode is not None:
        for other in assumed_pods:
            if (reservation := state.adopt(other, gpunode)) is not None:
                assumed.setdefault(other.metadata.uid, reservation)
        if gpunode.status is not None:
            status = without(gpunode.status, gone)
            gpunode = msgspec.structs.replace(gpunode, status=status)
    assumed = {uid: reservation for uid, reservation in assumed.items() if uid not in gone}
    return state.terms_of(name, gpunode, gone | {pod.metadata.uid}, assumed)


def fits_after_eviction(
    state: ClusterState, pod: Pod, node: str, victims: Set[str], now_s: float
) -> bool:
    """Return whether the pod would fit on the node once the pods with these uids have gone."""
    request, gpunode = state.understand(pod), state.gpunode(node)
    if isinstance(request, VramRequest) and not request.asks:
        return True
    if isinstance(request, Unreadable) or gpunode is None or gpunode.status is None:
        return False
    snap = build([node_without(state, node, victims, pod)])
    return bool(fit(request, snap, snap.rows([node]), now_s).fits[0])


def rejection_beside(
    state: ClusterState, pod: Pod, node: str, assumed_pods: Iterable[Pod], now_s: float
) -> Reason | None:
    """Return why the pod would not fit on the node if ``assumed_pods`` were being bound to it."""
    request, gpunode = state.understand(pod), state.gpunode(node)
    if isinstance(request, Unreadable):
        return request.reason
    assumed = state.binding_to(node)
    for other in assumed_pods:
        if gpunode is not None and (reservation := state.adopt(other, gpunode)) is not None:
            assumed.setdefault(other.metadata.uid, reservation)
    snap = build([state.terms_of(node, gpunode, {pod.metadata.uid}, assumed)])
    return fit(request, snap, snap.rows([node]), now_s).reason(0)
