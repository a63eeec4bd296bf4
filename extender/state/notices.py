"""What somebody has to be told: each becomes a Kubernetes Event on a pod or a node, once.

A notice is read off what is, not off what happened, so that a replica that starts late or misses
the moment tells it all the same; its key is the same on every replica, and another for each
occurrence.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from contract.annotations import PLACEMENT
from contract.decision import decision_of
from contract.gpunode import UnattributedProcess
from contract.kube import Node, Pod
from contract.quantity import format_bytes, gib
from extender.state.cluster_state import ClusterState
from extender.state.overcommitted_devices import Overcommit

#: Named in one message; of more it is said how many there are.
_MOST_NAMES = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """What an Event is about; ``namespace`` is empty for a node."""

    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Notice:
    about: Subject
    #: In the words of Kubernetes Events: what ``kubectl get events`` can be filtered by.
    reason: str
    message: str
    #: Tells one occurrence from the next.
    key: str
    #: Whether it is told again when its message has changed, in the same Event.
    follows: bool = False
    #: The decision that it tells of, where there is one.
    decision_id: str = ""


def pod_subject(pod: Pod) -> Subject:
    metadata = pod.metadata
    return Subject("Pod", metadata.namespace, metadata.name, metadata.uid)


def pod_notice(pod: Pod, reason: str, message: str, key: str) -> Notice:
    """Of a pod that is bound; names the decision by which it is where it is, if that was ours."""
    return Notice(pod_subject(pod), reason, message, key, decision_id=decision_of(pod))


def notices(state: ClusterState) -> Iterator[Notice]:
    """One by one: of a fleet whose driver fails everywhere there are tens of thousands. The state
    may change between two of them."""
    yield from _overcommitting(state)
    yield from _edited(state)
    yield from _overcommitted_nodes(state)
    yield from _unhealthy(state)
    yield from _overusing(state)


def _overcommitting(state: ClusterState) -> Iterator[Notice]:
    """Pods that came around us to a device that had no room for them."""
    worst: dict[str, Overcommit] = {}
    for over in state.overcommits.now():
        for holder in over.holders:
            known = worst.get(holder.uid)
            if known is None or known.beyond_bytes < over.beyond_bytes:
                worst[holder.uid] = over
    for uid, over in worst.items():
        pod = state.pod(uid)
        if pod is None or not _came_around_us(pod, over.node):
            continue
        yield pod_notice(
            pod,
            "Overcommitted",
            f"This pod was bound without Headroom, to a node without room for it: with it device "
            f"{over.device} of {over.node} is or may be committed "
            f"{format_bytes(over.beyond_bytes)} beyond its {format_bytes(over.allocatable_bytes)}. "
            "It is charged all the same; to have it placed where it fits, delete it and create it "
            "anew with the scheduler that asks Headroom.",
            key=over.node,
        )


def _came_around_us(pod: Pod, node: str) -> bool:
    return pod.node == node and pod.annotation(PLACEMENT) is None


def _edited(state: ClusterState) -> Iterator[Notice]:
    for pod, message in state.edits.now():
        yield pod_notice(pod, "RequestChangeIgnored", message, key=message)


def _overcommitted_nodes(state: ClusterState) -> Iterator[Notice]:
    """Devices that are short because of pods that came around us, or of processes of no pod."""
    for over in state.overcommits.now():
        node = state.node(over.node)
        if node is None:
            continue
        outsiders = [
            pod
            for holder in over.holders
            if (pod := state.pod(holder.uid)) is not None and _came_around_us(pod, over.node)
        ]
        strangers = _strangers(state, over) if over.unattributed_bytes else []
        causes = [
            # Events on nodes are in namespace default, for people who may read no other pods.
            f"{_count(outsiders)} bound without Headroom (kubectl headroom top pod -A --search "
            f"{over.node} says which)"
            if outsiders
            else "",
            f"{format_bytes(over.unattributed_bytes)} used by no pod "
            f"({_some([f'{each.command} {each.pid}' for each in strangers])})"
            if over.unattributed_bytes
            else "",
            f"{format_bytes(over.unobserved_pods_bytes)} used by pods without a reservation there"
            if over.unobserved_pods_bytes
            else "",
        ]
        if not any(causes):
            continue
        # Not all strangers: short ones come and go, and each would be told.
        who = sorted(pod.metadata.uid for pod in outsiders)
        who += [f"pid {each.pid}" for each in strangers[:1]]
        yield Notice(
            _node_subject(node),
            "GPUOvercommitted",
            f"Device {over.device} is committed {format_bytes(over.beyond_bytes)} beyond its "
            f"{format_bytes(over.allocatable_bytes)}: {', '.join(filter(None, causes))}. No pod is "
            "placed there until that has changed.",
            key="\n".join((over.device, *who)),
        )


def _strangers(state: ClusterState, over: Overcommit) -> list[UnattributedProcess]:
    """The largest first."""
    gpunode = state.gpunode(over.node)
    if gpunode is None or gpunode.status is None:
        return []
    found = [each for each in gpunode.status.unattributed_processes if each.device == over.device]
    return sorted(found, key=lambda each: -(each.used_bytes or 0))


def _unhealthy(state: ClusterState) -> Iterator[Notice]:
    snap = state.snapshot()
    for row, slot in np.argwhere(snap.columns.health_issue > 0).tolist():
        terms = snap.nodes[row].devices[slot]
        node = state.node(snap.nodes[row].name)
        if node is None or terms.health_issue is None:
            continue
        why = f": {terms.health_detail}" if terms.health_detail else ""
        yield Notice(
            _node_subject(node),
            "GPUFenced",
            f"No pod is placed on device {terms.device.uuid}, {terms.health_issue.sentence}{why}.",
            key="\n".join(
                (terms.device.uuid, terms.health_issue.code, terms.device.unhealthy_since)
            ),
        )


def _overusing(state: ClusterState) -> Iterator[Notice]:
    """Told once, and again when it is twice as much."""
    for over in state.overuses.lasting:
        pod = state.pod(over.uid)
        if pod is None:
            continue
        yield pod_notice(
            pod,
            "GPUMemoryOveruse",
            f"This pod uses {gib(over.measured_bytes, up=True)} of device {over.device} of "
            f"{over.node}, {gib(over.beyond_bytes, up=True)} more than the "
            f"{gib(over.requested_bytes, up=True)} that it asked "
            "for, and goes on to. It is charged what it uses, and other pods of the device "
            "may run out of memory; ask for more, or make it use less.",
            key=f"{over.device}\n{over.beyond_bytes.bit_length()}",
        )


def _node_subject(node: Node) -> Subject:
    return Subject("Node", "", node.metadata.name, node.metadata.uid)


def _count(pods: list[Pod]) -> str:
    return "1 pod" if len(pods) == 1 else f"{len(pods)} pods"


def _some(names: list[str]) -> str:
    if not names:
        return "it is not known by whom"
    more = len(names) - _MOST_NAMES
    return ", ".join(names[:_MOST_NAMES]) + (f" and {more} more" if more > 0 else "")
