"""Whose request was changed after the pod was bound. What was promised then stands: the pod runs
on devices where that fitted, and what it says now was never fitted anywhere."""

from collections.abc import Iterable, Mapping

import msgspec

from contract.annotations import PLACEMENT, VRAM
from contract.gpunode import Reservation
from contract.kube import Pod

#: So much of an adopted pod's annotation is kept in its promise, characters.
MOST_ASKED = 64


class _Written(msgspec.Struct, frozen=True):
    """What is read again of the placement that the Binding wrote."""

    node: str = ""
    #: The pod's own annotation as it was fitted, null for none. Absent where that is not told.
    asked: str | msgspec.UnsetType | None = msgspec.UNSET


_decode = msgspec.json.Decoder(_Written).decode


def asked(pod: Pod) -> str:
    """What the promise of an adopted pod keeps of its annotation; empty for none."""
    return (pod.annotation(VRAM) or "")[:MOST_ASKED]


def edit(pod: Pod) -> str:
    """A sentence for the author of a pod that we bound; empty where nothing was changed, or nobody
    can tell."""
    written = _written(pod)
    if written is None or written.asked is msgspec.UNSET or written.asked == pod.annotation(VRAM):
        return ""
    return _sentence(pod, written.asked)


def _sentence(pod: Pod, before: str | None) -> str:
    return (
        f"{VRAM} was changed after the pod was bound, from {_quoted(before)} to "
        f"{_quoted(pod.annotation(VRAM))}; it stays charged as it was bound: "
        "to change what it is given, delete it and create it anew"
    )


def as_bound(pod: Pod) -> Pod:
    """The pod with the request that it was bound with."""
    if not edit(pod):
        return pod
    written = _written(pod)
    assert written is not None
    annotations = {k: v for k, v in (pod.metadata.annotations or {}).items() if k != VRAM}
    if isinstance(written.asked, str):
        annotations[VRAM] = written.asked
    metadata = msgspec.structs.replace(pod.metadata, annotations=annotations)
    return msgspec.structs.replace(pod, metadata=metadata)


class RequestDrift:
    """The bound pods that carry one. Written by the owner of the cluster state."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[Pod, str]] = {}

    def see(self, pod: Pod) -> None:
        self._note(pod, edit(pod))

    def adopted(self, pods: Iterable[Pod], reservations: Mapping[str, Reservation]) -> None:
        """Compare the pods of a node, bound by others, with what was kept as they were charged."""
        for pod in pods:
            reservation = reservations.get(pod.metadata.uid)
            if reservation is not None and isinstance(reservation.asked, str):
                changed = asked(pod) != reservation.asked
                self._note(pod, _sentence(pod, reservation.asked or None) if changed else "")

    def _note(self, pod: Pod, sentence: str) -> None:
        if sentence and pod.node and not pod.ended:
            self._told[pod.metadata.uid] = (pod, sentence)
        else:
            self._told.pop(pod.metadata.uid, None)

    def lose(self, uid: str) -> None:
        self._told.pop(uid, None)

    def of(self, uid: str) -> str:
        """The sentence; empty for none."""
        return self._told.get(uid, (None, ""))[1]

    def now(self) -> list[tuple[Pod, str]]:
        return list(self._told.values())


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
