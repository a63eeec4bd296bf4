"""Tracks bound pods whose request was changed after the bind.

The reservation stays unchanged, because the pod runs on devices on which the original request
fitted, and the changed request was never checked.
"""

from collections.abc import Iterable, Mapping

import msgspec

from headroom.contract.annotations import PLACEMENT, VRAM
from headroom.contract.gpunode import Reservation
from headroom.contract.kube import Pod
from headroom.contract.printable import plain
from headroom.core.tracker import LastSeen, Tracker, WeighedNode

#: Maximum number of characters of an adopted pod's annotation that its reservation keeps.
MAX_ASKED = 64


class _Written(msgspec.Struct, frozen=True):
    """The fields to read from the placement annotation that the Binding wrote."""

    node: str = ""
    #: The pod's VRAM annotation at the time of the bind, or null if it had none. Absent if it was
    #: not recorded.
    asked: str | msgspec.UnsetType | None = msgspec.UNSET


_decode = msgspec.json.Decoder(_Written).decode


def asked(pod: Pod) -> str:
    """Return the beginning of the pod's VRAM annotation, for the reservation of an adopted pod.

    The result is empty if the pod has no annotation.
    """
    return plain((pod.annotation(VRAM) or "")[:MAX_ASKED])


def edit(pod: Pod) -> str:
    """Return a message for the author of a pod that Headroom bound.

    It is empty if the request has not changed, or if the original request is unknown.
    """
    written = _written(pod)
    if written is None or written.asked is msgspec.UNSET or written.asked == pod.annotation(VRAM):
        return ""
    return _sentence(pod, written.asked)


def _sentence(pod: Pod, before: str | None) -> str:
    return (
        f"annotation {VRAM} was changed after the pod was bound, from {_quoted(before)} to "
        f"{_quoted(pod.annotation(VRAM))}, but the reservation is unchanged; "
        "to change it, delete the pod and create it again"
    )


def as_bound(pod: Pod) -> Pod:
    """Return the pod with the request that it had when it was bound."""
    if not edit(pod):
        return pod
    written = _written(pod)
    assert written is not None
    annotations = {k: v for k, v in (pod.metadata.annotations or {}).items() if k != VRAM}
    if isinstance(written.asked, str):
        annotations[VRAM] = written.asked
    metadata = msgspec.structs.replace(pod.metadata, annotations=annotations)
    return msgspec.structs.replace(pod, metadata=metadata)


class RequestDrift(Tracker):
    """The bound pods with a changed request. Written by the thread that owns the cluster state."""

    def __init__(self) -> None:
        self._changed: dict[str, tuple[Pod, str]] = {}

    def pod_seen(self, pod: Pod, managed: bool) -> None:
        self._note(pod, edit(pod) if managed else "")

    def pod_gone(self, uid: str, last: LastSeen | None) -> None:
        self._changed.pop(uid, None)

    def node_weighed(self, node: WeighedNode) -> None:
        if node.gpunode is not None:
            self.adopted(node.pods, node.gpunode.spec.reservations)

    def adopted(self, pods: Iterable[Pod], reservations: Mapping[str, Reservation]) -> None:
        """Compare the adopted pods of a node with the annotations recorded in their
        reservations."""
        for pod in pods:
            reservation = reservations.get(pod.metadata.uid)
            if reservation is not None and isinstance(reservation.asked, str):
                changed = asked(pod) != reservation.asked
                self._note(pod, _sentence(pod, reservation.asked or None) if changed else "")

    def _note(self, pod: Pod, sentence: str) -> None:
        if sentence and pod.node and not pod.ended:
            self._changed[pod.metadata.uid] = (pod, sentence)
        else:
            self._changed.pop(pod.metadata.uid, None)

    def of(self, uid: str) -> str:
        """Return the message about the pod, or an empty string if its request is unchanged."""
        return self._changed.get(uid, (None, ""))[1]

    def now(self) -> list[tuple[Pod, str]]:
        return list(self._changed.values())


def _written(pod: Pod) -> _Written | None:
    text = pod.annotation(PLACEMENT)
    if text is None:
        return None
    try:
        written = _decode(text)
    except (ValueError, RecursionError):
        return None
    return written if written.node == pod.node else None


def _quoted(text: str | None) -> str:
    if text is None:
        return "nothing"
    return f"{text[:40]!r}" + ("..." if len(text) > 40 else "")
