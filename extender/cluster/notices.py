"""What somebody has to be told about a pod: each becomes a Kubernetes Event on it, once.

A notice is read off what is, not off what happened, so that a replica that starts late or misses
the moment tells it all the same; its key is the same on every replica.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from contract.annotations import PLACEMENT
from contract.kube import Pod
from contract.quantity import format_bytes
from extender.cluster.overcommits import Overcommit
from extender.cluster.state import ClusterState


@dataclass(frozen=True, slots=True)
class Notice:
    pod: Pod
    #: In the words of Kubernetes Events: what ``kubectl get events`` can be filtered by.
    reason: str
    message: str
    #: Tells one occurrence on a pod from the next.
    key: str


def notices(state: ClusterState) -> list[Notice]:
    return [*_overcommitting(state), *_edited(state)]


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
        if pod is None or pod.node != over.node or pod.annotation(PLACEMENT) is not None:
            continue
        yield Notice(
            pod,
            "Overcommitted",
            f"This pod was bound without Headroom, to a node without room for it: with it device "
            f"{over.device} of {over.node} is or may be committed "
            f"{format_bytes(over.beyond_bytes)} beyond its {format_bytes(over.allocatable_bytes)}. "
            "It is charged all the same; to have it placed where it fits, delete it and create it "
            "anew with the scheduler that asks Headroom.",
            key=over.node,
        )


def _edited(state: ClusterState) -> Iterator[Notice]:
    for pod, message in state.edits.now():
        yield Notice(pod, "RequestChangeIgnored", message, key=message)
