"""Notices about pods and nodes. Each notice becomes one Kubernetes Event.

A notice is derived from the current state and not from a change of the state. So a replica that
starts late or misses the change still reports it. The key of a notice is the same on every replica,
and differs for each occurrence.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from headroom.contract.annotations import PLACEMENT, VRAM
from headroom.contract.commands import command
from headroom.contract.decision import decision_of
from headroom.contract.event_reasons import EventReason
from headroom.contract.gpunode import UnattributedProcess
from headroom.contract.kube import Node, Pod
from headroom.contract.quantity import gib
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.crowded_pods import crashed_pods
from headroom.core.overuse.tracker import Overcommit

#: Maximum number of names in one message. If there are more, the message states only their number.
_MAX_NAMES = 3


@dataclass(frozen=True, slots=True)
class Subject:
    """The object of an Event. ``namespace`` is empty for a node."""

    kind: str
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Notice:
    about: Subject
    reason: EventReason
    message: str
    #: A key that differs for each occurrence.
    key: str
    #: Whether the same Event is updated when the message changes.
    follows: bool = False
    #: The decision that the notice is about. Empty if there is none.
    decision_id: str = ""


def pod_subject(pod: Pod) -> Subject:
    metadata = pod.metadata
    return Subject("Pod", metadata.namespace, metadata.name, metadata.uid)


def pod_notice(pod: Pod, reason: EventReason, message: str, key: str) -> Notice:
    """Build a notice about a bound pod, with the id of the decision that placed it, if any."""
    return Notice(pod_subject(pod), reason, message, key, decision_id=decision_of(pod))


def notices(state: Cluster) -> Iterator[Notice]:
    """Yield all notices one by one, because there can be tens of thousands if a driver fails
    everywhere.

    The state may change between two notices.
    """
    yield from _overcommitting(state)
    yield from _edited(state)
    yield from _overcommitted_nodes(state)
    yield from _unhealthy(state)
    yield from _overusing(state)
    yield from _crashed(state)


def _overcommitting(state: Cluster) -> Iterator[Notice]:
    """Yield notices about unreserved pods on devices that had no headroom for them."""
    worst: dict[str, Overcommit] = {}
    for over in state.overcommits.now():
        for holder in over.holders:
            known = worst.get(holder.uid)
            if known is None or known.excess_bytes < over.excess_bytes:
                worst[holder.uid] = over
    for uid, over in worst.items():
        pod = state.pod(uid)
        if pod is None or not _is_unreserved(pod, over.node):
            continue
        yield pod_notice(
            pod,
            EventReason.OVERCOMMITTED,
            f"This pod is on a node without enough free GPU memory. It has no reservation, because "
            "it was bound in mode observe, before Headroom was installed, or by another scheduler. "
            f"Device {over.device} of node {over.node} is, or may become, overcommitted by "
            f"{gib(over.excess_bytes, up=True)} (allocatable: {gib(over.allocatable_bytes)}). "
            "Headroom charges the pod's memory anyway. To place the pod on a node where it fits, "
            "delete it and create it again with a scheduler that uses Headroom.",
            key=over.node,
        )


def _is_unreserved(pod: Pod, node: str) -> bool:
    return pod.node == node and pod.annotation(PLACEMENT) is None


def _edited(state: Cluster) -> Iterator[Notice]:
    for pod, message in state.edits.now():
        yield pod_notice(pod, EventReason.REQUEST_CHANGE_IGNORED, message, key=message)


def _overcommitted_nodes(state: Cluster) -> Iterator[Notice]:
    """Yield notices about devices overcommitted by unreserved pods or unattributed processes."""
    for over in state.overcommits.now():
        node = state.node(over.node)
        if node is None:
            continue
        unreserved = [
            pod
            for holder in over.holders
            if (pod := state.pod(holder.uid)) is not None and _is_unreserved(pod, over.node)
        ]
        processes = _unattributed(state, over) if over.unattributed_bytes else []
        to_list = f"to list: kubectl headroom top pod -A --search {over.node}"
        causes = [
            # Events on nodes are in namespace default, and their readers may not read other pods.
            f"{_count(unreserved)} without a reservation ({to_list})" if unreserved else "",
            f"{gib(over.unattributed_bytes, up=True)} used by processes outside of known pods "
            f"({_some([f'{each.command} {each.pid}' for each in processes])})"
            if over.unattributed_bytes
            else "",
            f"{gib(over.unreserved_pods_bytes, up=True)} used by "
            f"{_count(over.unreserved)} without a reservation ({to_list})"
            if over.unreserved_pods_bytes
            else "",
        ]
        if not any(causes):
            continue
        # Name only the largest process, because small processes start and exit often, and each of
        # them would be a new occurrence.
        causers = sorted(pod.metadata.uid for pod in unreserved)
        causers += [each.uid for each in over.unreserved[:1]]
        causers += [f"pid {each.pid}" for each in processes[:1]]
        yield Notice(
            _node_subject(node),
            EventReason.GPU_OVERCOMMITTED,
            f"Device {over.device} is overcommitted by {gib(over.excess_bytes, up=True)} "
            f"(allocatable: {gib(over.allocatable_bytes)}): {', '.join(filter(None, causes))}. "
            "No pod is placed on it until memory is freed.",
            key="\n".join((over.device, *causers)),
        )


def _unattributed(state: Cluster, over: Overcommit) -> list[UnattributedProcess]:
    """Return the unattributed processes on the device, largest first."""
    gpunode = state.gpunode(over.node)
    if gpunode is None or gpunode.status is None:
        return []
    found = [each for each in gpunode.status.unattributed_processes if each.device == over.device]
    return sorted(found, key=lambda each: -(each.used_bytes or 0))


def _unhealthy(state: Cluster) -> Iterator[Notice]:
    snap = state.snapshot()
    for row, slot in np.argwhere(snap.columns.health_issue > 0).tolist():
        terms = snap.nodes[row].devices[slot]
        node = state.node(snap.nodes[row].name)
        if node is None or terms.unhealthy is None:
            continue
        why = f" ({terms.health_detail})" if terms.health_detail else ""
        yield Notice(
            _node_subject(node),
            EventReason.GPU_UNHEALTHY,
            f"No pod is placed on device {terms.device.uuid}: {terms.unhealthy.sentence}{why}.",
            key="\n".join((terms.device.uuid, terms.unhealthy.code, terms.device.unhealthy_since)),
        )


def _overusing(state: Cluster) -> Iterator[Notice]:
    """Yield notices about pods that use more than they requested, and again whenever the excess
    doubles."""
    for over in state.overuses.lasting:
        pod = state.pod(over.uid)
        if pod is None:
            continue
        yield pod_notice(
            pod,
            EventReason.GPU_MEMORY_OVERUSE,
            f"This pod uses {gib(over.measured_bytes, up=True)} of device {over.device} of node "
            f"{over.node}, {gib(over.excess_bytes, up=True)} more than the "
            f"{gib(over.requested_bytes, up=True)} that it requested. Headroom charges what the "
            "pod uses, and other pods on the device may run out of memory. Request more in "
            f"annotation {VRAM}, or reduce the pod's use.",
            key=f"{over.device}\n{over.excess_bytes.bit_length()}",
        )


def _crashed(state: Cluster) -> Iterator[Notice]:
    """Yield notices about containers that failed on a device while it was overcommitted."""
    for pod, crash in crashed_pods(state):
        namespace, name = pod.metadata.namespace, pod.metadata.name

        def is_own(of: str, _: str, namespace: str = namespace) -> bool:
            return of == namespace

        crowding = crash.crowding
        yield pod_notice(
            pod,
            EventReason.CRASHED_ON_OVERCOMMITTED_GPU,
            f"C{crash.end.sentence[1:]}. CUDA probably reported out of memory, because "
            f"{crowding.gpu} of node {crowding.over.node} {crowding.span()}: "
            f"{crowding.causes(is_own, 'a pod of another namespace')}. To see what the pod got: "
            + command("kubectl", "headroom", "why", name, "-n", namespace),
            key=f"{crash.end.container}\n{crash.end.at_s}",
        )


def _node_subject(node: Node) -> Subject:
    return Subject("Node", "", node.metadata.name, node.metadata.uid)


def _count(pods: Sequence[object]) -> str:
    return "1 pod" if len(pods) == 1 else f"{len(pods)} pods"


def _some(names: list[str]) -> str:
    if not names:
        return "process unknown"
    more = len(names) - _MAX_NAMES
    return ", ".join(names[:_MAX_NAMES]) + (f" and {more} more" if more > 0 else "")
