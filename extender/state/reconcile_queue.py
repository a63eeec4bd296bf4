"""What is left to be tidied: promises whose pod no longer needs them, pods and nodes without one.

Only suggestions from what we happen to have seen: whoever acts on them asks the store again.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from contract.annotations import FINALIZER
from contract.gpunode import GPUNode, Reservation
from contract.kube import Node, Pod
from extender.state.cluster_state import ClusterState
from extender.state.deleted_pods import is_unreachable
from extender.state.heartbeats import age
from extender.state.node_eligibility import choice_to_note


@dataclass(frozen=True, slots=True)
class Leftover:
    """A promise that nobody needs; ``left``: its pod is gone, and known not to run on the node."""

    node: str
    uid: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class Unmarked:
    """A promise to a pod that is gone, whose containers may run on the node for all we know."""

    node: str
    uid: str
    reservation: Reservation


@dataclass(frozen=True, slots=True)
class UnreservedPod:
    """A pod that sits on the node, and to which the ledger promises nothing."""

    node: str
    pod: Pod


def unreserved_pods(state: ClusterState, on: Collection[str] | None = None) -> list[UnreservedPod]:
    """Pods that somebody else bound: the ledger is the only place where a node's agent learns what
    they will take. ``on`` names the nodes to look at, None means all."""
    held = state.gpunodes() if on is None else filter(None, map(state.gpunode, on))
    return [
        UnreservedPod(gpunode.name, pod)
        for gpunode in held
        if knows_devices(state, gpunode)
        for pod in state.unreserved_pods(gpunode.name)
    ]


def leftovers(
    state: ClusterState, wall_s: float, orphan_after_s: float, on: Collection[str] | None = None
) -> list[Leftover | Unmarked]:
    """Promises to pods that ended, went elsewhere, or never came.

    A bind in progress has a promise and no bound pod yet: such a one is left alone until it is
    ``orphan_after_s`` old. What a report still shows on a device stays charged whatever became of
    the pod: its memory is not free. Nor is that of a pod whose end nobody saw, before a sample that
    was taken when it was gone does not show it. ``on`` names the nodes to look at, None means all.
    """
    found: list[Leftover | Unmarked] = []
    held = state.gpunodes() if on is None else map(state.gpunode, on)
    for gpunode in filter(None, held):
        seen = {use.uid for use in gpunode.status.pods} if gpunode.status else set()
        for uid, reservation in gpunode.spec.reservations.items():
            if uid in seen:
                continue
            pod, departure = state.pod(uid), state.departures.seen(uid)
            since_s = age(reservation.since, wall_s)
            # Of a replica whose clock was ahead nobody knows; looking into it harms nobody.
            old = since_s is None or abs(since_s) > orphan_after_s
            if pod is not None:
                sits = pod.node == gpunode.name and not pod.ended
                if not sits and (pod.ended or pod.node or old):
                    found.append(Leftover(gpunode.name, uid))
            elif (
                (departure and departure.settles(gpunode.name))
                or _left(state, gpunode, uid)
                or _ended_by_kubelet(state, gpunode, uid, wall_s - state.epoch_s)
            ):
                found.append(Leftover(gpunode.name, uid, left=True))
            elif (departure or old) and not state.departures.marked(gpunode.name, uid):
                found.append(Unmarked(gpunode.name, uid, reservation))
    return found


def _left(state: ClusterState, gpunode: GPUNode, uid: str) -> bool:
    """Whether a sample that was taken when the pod was gone says what the report says, and the
    report would show the pod if it held anything."""
    vouch = state.confirmation(gpunode.name)
    return (
        vouch is not None
        and state.departures.precede(gpunode.name, uid, vouch.after)
        and gpunode.status is not None
        and gpunode.status.shows_every_pod
    )


def _ended_by_kubelet(state: ClusterState, gpunode: GPUNode, uid: str, now_s: float) -> bool:
    """Whether no agent has ever reported the node, and its kubelet has ended the pod."""
    return (
        gpunode.status is None
        and state.departures.ended_by_kubelet(gpunode.name, uid, now_s)
        and (node := state.node(gpunode.name)) is not None
        and not is_unreachable(node)
    )


def dying(among: Iterable[GPUNode]) -> list[str]:
    """Names of those that somebody deletes and that our finalizer still holds."""
    return [
        gpunode.name
        for gpunode in among
        if gpunode.metadata.deletion_timestamp and FINALIZER in (gpunode.metadata.finalizers or ())
    ]


def unnoted_choices(state: ClusterState, among: Iterable[GPUNode]) -> list[tuple[str, str]]:
    """Name and device choice of the nodes whose GPUNode has another choice than the Node."""
    found = ((held.name, choice_to_note(state.node(held.name), held)) for held in among)
    return [(name, choice) for name, choice in found if choice is not None]


def knows_devices(state: ClusterState, gpunode: GPUNode) -> bool:
    """Whether it is known what the pods of the node sit on."""
    status = state.report(gpunode.name, gpunode)
    return status is not None and bool(status.devices)


def uninitialised(state: ClusterState, among: Iterable[Node] | None = None) -> list[Node]:
    """Nodes that offer GPUs of ours and whose ledger can be set up now: those without an object,
    and those whose object waits no longer for its devices to be known. ``among`` are the nodes to
    look at, None means all."""
    found: list[Node] = []
    for node in state.nodes() if among is None else among:
        offers = node.status.allocatable if node.status else None
        if any(state.rules.manages(resource) for resource in offers or ()):
            gpunode = state.gpunode(node.metadata.name)
            if gpunode is None or (knows_devices(state, gpunode) and not gpunode.spec.initialised):
                found.append(node)
    return found
