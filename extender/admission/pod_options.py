"""Reads the options of a pod from its annotations, or else from those of its namespace."""

from collections.abc import Callable
from typing import TypeVar

from contract.annotations import GATED, SHARE, ShareWish, parse_gated, parse_share
from contract.errors import BadAnnotation
from contract.kube import Pod
from extender.admission.context import OfNamespace

T = TypeVar("T")


def gated_wish(pod: Pod, namespace: OfNamespace) -> bool | None:
    """Return whether the pod should get a gate; None if no annotation sets it."""
    return _wish(pod, namespace, GATED, parse_gated)


def share_wish(pod: Pod, namespace: OfNamespace) -> ShareWish:
    """Return how the pod's share of a device is exposed and limited; by default it is not."""
    return _wish(pod, namespace, SHARE, parse_share) or ShareWish.NONE


def _wish(pod: Pod, namespace: OfNamespace, key: str, parse: Callable[[str], T]) -> T | None:
    """Return the parsed annotation; None if it is missing or invalid.

    Validation rejects an invalid annotation of a pod, and warns about one of a namespace.
    """
    for text in (pod.annotation(key), namespace.annotations.get(key)):
        if text is not None:
            try:
                return parse(text)
            except BadAnnotation:
                return None
    return None
