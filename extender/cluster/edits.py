"""Whose request was changed after the pod was bound. What was promised then stands: the pod runs
on devices where that fitted, and what it says now was never fitted anywhere."""

import msgspec

from contract.annotations import PLACEMENT, VRAM
from contract.kube import Pod


class _Written(msgspec.Struct, frozen=True):
    """What is read again of the placement that the Binding wrote."""

    node: str = ""
    #: The pod's own annotation as it was fitted, null for none. Absent where that is not told.
    asked: str | msgspec.UnsetType | None = msgspec.UNSET


_decode = msgspec.json.Decoder(_Written).decode


def edit(pod: Pod) -> str:
    """A sentence for the pod's author; empty where nothing was changed, or nobody can tell."""
    written = _written(pod)
    if written is None or written.asked is msgspec.UNSET or written.asked == pod.annotation(VRAM):
        return ""
    return (
        f"{VRAM} was changed after the pod was bound, from {_quoted(written.asked)} to "
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


class Edits:
    """The bound pods that carry one. Written by the owner of the cluster state."""

    def __init__(self) -> None:
        self._pods: dict[str, Pod] = {}

    def see(self, pod: Pod) -> None:
        if pod.node and not pod.ended and edit(pod):
            self._pods[pod.metadata.uid] = pod
        else:
            self._pods.pop(pod.metadata.uid, None)

    def lose(self, uid: str) -> None:
        self._pods.pop(uid, None)

    def now(self) -> list[Pod]:
        return list(self._pods.values())


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
