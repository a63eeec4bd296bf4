"""Finds orphaned reservations, unreserved pods, and nodes whose ledger is not initialised.

The results are based on this replica's cache. Before a caller acts on them, it must check them
against the store.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from headroom.contract.annotations import FINALIZER
from headroom.contract.gpunode import GPUNode, Reservation
from headroom.contract.kube import Node, Pod
from headroom.contract.reasons import Reason
from headroom.contract.timestamps import age
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.node_settings import AgentSettings, settings_to_copy
from headroom.core.cluster.trackers.deleted_pods import is_unreachable


@dataclass(frozen=True, slots=True)
class Orphan:
    """An orphaned reservation. ``left`` is true if its pod is gone and is certain not to run on the
    node."""

    node: str
    uid: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class Unmarked:
    """A reservation of a pod that is gone but whose containers may still run on the node."""

    node: str
    uid: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class UnreservedPod:
    """A pod that is bound to the node without a reservation in the ledger."""

    node: str
    pod: Pod


def unreserved_pods(state: Cluster, on: Collection[str] | None = None) -> list[UnreservedPod]:
    """Return the pods that were bound without a reservation.

    They need a reservation, because agents read from the ledger how much memory pods may use.
    ``on`` contains the names of the nodes to check. With None, all nodes are checked.
    """
    held = state.gpunodes() if on is None else filter(None, map(state.gpunode, on))
    return [
        UnreservedPod(gpunode.name, pod)
        for gpunode in held
        if devices_known(state, gpunode)
        for pod in state.unreserved_pods(gpunode.name)
    ]


def orphans(
    state: Cluster, wall_s: float, orphan_after_s: float, on: Collection[str] | None = None
) -> list[Orphan | Unmarked]:
    """Return the reservations of pods that ended, were bound elsewhere, or were never bound.

    A bind in progress has a reservation but no bound pod yet, so a reservation without a bound pod
    is kept until it is ``orphan_after_s`` old. A reservation is also kept while a report shows the
    pod on a device, because its memory is not free. If the end of a pod was not observed, the
    reservation is kept until a sample taken after the pod was gone no longer shows it. ``on``
    contains the names of the nodes to check. With None, all nodes are checked.
    """
    found: list[Orphan | Unmarked] = []
    held = state.gpunodes() if on is None else map(state.gpunode, on)
    for gpunode in filter(None, held):
        seen = {use.uid for use in gpunode.status.pods} if gpunode.status else set()
        for uid, reservation in gpunode.spec.reservations.items():
            if uid in seen:
                continue
            pod, departure = state.pod(uid), state.departures.seen(uid)
            since_s = age(reservation.since, wall_s)
            # A reservation far in the future was written by a replica whose clock was ahead. It is
            # checked early, which does no harm.
            old = since_s is None or abs(since_s) > orphan_after_s
            if pod is not None:
                sits = pod.node == gpunode.name and not pod.ended
                if not sits and (pod.ended or pod.node or old):
                    found.append(Orphan(gpunode.name, uid))
            elif (
                (departure and departure.settles(gpunode.name))
                or _left(state, gpunode, uid)
                or _ended_by_kubelet(state, gpunode, uid, wall_s - state.epoch_s)
            ):
                found.append(Orphan(gpunode.name, uid, left=True))
            elif (departure or old) and not state.departures.marked(gpunode.name, uid):
                found.append(Unmarked(gpunode.name, uid, reservation))
    return found


def _left(state: Cluster, gpunode: GPUNode, uid: str) -> bool:
    """Return whether the report proves that the pod has left the node. This requires that a sample
    taken after the pod was gone confirms the report, and that the report shows every pod."""
    confirmation = state.confirmation(gpunode.name)
    return (
        confirmation is not None
        and state.departures.precede(gpunode.name, uid, confirmation.after)
        and gpunode.status is not None
        and gpunode.status.shows_every_pod
    )


def _ended_by_kubelet(state: Cluster, gpunode: GPUNode, uid: str, now_s: float) -> bool:
    """Return whether the node has no report and its kubelet has had time to end the pod."""
    return (
        gpunode.status is None
        and state.departures.ended_by_kubelet(gpunode.name, uid, now_s)
        and (node := state.node(gpunode.name)) is not None
        and not is_unreachable(node)
    )


def being_deleted(among: Iterable[GPUNode]) -> list[str]:
    """Return the names of GPUNodes that are being deleted and still have Headroom's finalizer."""
    return [
        gpunode.name
        for gpunode in among
        if gpunode.metadata.deletion_timestamp and FINALIZER in (gpunode.metadata.finalizers or ())
    ]


def changed_settings(state: Cluster, among: Iterable[GPUNode]) -> list[tuple[str, AgentSettings]]:
    """Return the name of each GPUNode whose copy of the settings differs from its Node, with the
    Node's settings."""
    found = ((held.name, settings_to_copy(state.node(held.name), held)) for held in among)
    return [(name, settings) for name, settings in found if settings is not None]


def devices_known(state: Cluster, gpunode: GPUNode) -> bool:
    """Return whether the devices of the node are known."""
    status = state.report(gpunode.name, gpunode)
    return status is not None and bool(status.devices)


def uninitialised(state: Cluster, among: Iterable[Node] | None = None) -> list[Node]:
    """Return the nodes with managed GPUs whose ledger can be initialised now.

    These nodes have no GPUNode, or their GPUNode is uninitialised and their devices are known.
    Nodes whose GPUs are managed by a DRA driver are included, so that their agents can report.
    ``among`` contains the nodes to check. With None, all nodes are checked.
    """
    found: list[Node] = []
    for node in state.nodes() if among is None else among:
        offers = node.status.allocatable if node.status else None
        if (
            any(state.rules.manages(resource) for resource in offers or ())
            or state.manager(node.metadata.name) is Reason.DRA_MANAGES
        ):
            gpunode = state.gpunode(node.metadata.name)
            if gpunode is None or (devices_known(state, gpunode) and not gpunode.spec.initialised):
                found.append(node)
    return found
