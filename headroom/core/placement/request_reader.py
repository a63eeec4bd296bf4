"""Reads the requests of pods, and parses equal pods only once.

A pod's request is read many times: by filter and bind, and whenever the pod's node is weighed
before its reservation is written. Pods of one owner differ only in their names, so all of them
share one parsed request.
"""

from dataclasses import replace

import msgspec

from headroom.contract.kube import ObjectMeta, Pod
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import Unreadable, VramRequest, understand

#: Maximum number of different pods whose requests are kept.
MOST_PODS = 256
#: Pods with more bytes are parsed each time.
MOST_BYTES = 16 << 10


class RequestReader:
    """Returns what ``request.understand`` returns. Any thread may use it."""

    def __init__(self) -> None:
        #: The rules with which a request was parsed, and the request without names, by all content
        #: of the pod that it can depend on.
        self._parsed: dict[bytes, tuple[Rules, VramRequest]] = {}

    def read(
        self, pod: Pod, default_vram: str | None, rules: Rules, *, enforce_limits: bool = True
    ) -> VramRequest | Unreadable:
        """Return the pod's request. ``request.understand`` describes the parameters."""
        key = _content(pod, default_vram, enforce_limits)
        parsed = self._parsed.get(key)
        if parsed is not None and parsed[0] is rules:
            return _of(parsed[1], pod)
        request = understand(pod, default_vram, rules, enforce_limits=enforce_limits)
        if isinstance(request, VramRequest) and len(key) <= MOST_BYTES:
            if len(self._parsed) >= MOST_PODS:
                self._parsed.clear()
            self._parsed[key] = rules, _of(request, NAMELESS)
        return request


#: Stands for the pod of a kept request, so that no names of deleted pods are kept.
NAMELESS = Pod(metadata=ObjectMeta())
_encode = msgspec.msgpack.Encoder().encode


def _content(pod: Pod, default_vram: str | None, enforce_limits: bool) -> bytes:
    """Return everything on which the request of a pod depends, except the rules and the names."""
    metadata = pod.metadata
    return _encode(
        (
            pod.spec,
            metadata.annotations,
            metadata.foreign_annotations,
            metadata.foreign_annotation_bytes,
            pod.json_bytes,
            default_vram,
            enforce_limits,
        )
    )


def _of(request: VramRequest, pod: Pod) -> VramRequest:
    """Return the request as the request of another pod with the same content."""
    metadata = pod.metadata
    return replace(
        request,
        uid=metadata.uid,
        resource_version=metadata.resource_version,
        namespace=metadata.namespace,
        name=metadata.name,
    )
