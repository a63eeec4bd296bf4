"""What a pod wishes for itself, or its namespace for it; the pod counts more."""

from collections.abc import Callable
from typing import TypeVar

from contract.annotations import GATED, SHARE, ShareWish, parse_gated, parse_share
from contract.errors import BadAnnotation
from contract.kube import Pod
from extender.admission.context import OfNamespace

T = TypeVar("T")


def gated_wish(pod: Pod, namespace: OfNamespace) -> bool | None:
    """None: nobody says, and the nodes decide."""
    return _wish(pod, namespace, GATED, parse_gated)


def share_wish(pod: Pod, namespace: OfNamespace) -> ShareWish:
    return _wish(pod, namespace, SHARE, parse_share) or ShareWish.NONE


def _wish(pod: Pod, namespace: OfNamespace, key: str, parse: Callable[[str], T]) -> T | None:
    """What cannot be read is no wish: validation refuses it on a pod and warns of a namespace's."""
    for text in (pod.annotation(key), namespace.annotations.get(key)):
        if text is not None:
            try:
                return parse(text)
            except BadAnnotation:
                return None
    return None
