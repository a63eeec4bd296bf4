"""Limits on one pod that requests GPUs, which bound the work that the pod's author can cause.

Kubernetes accepts pods of 1.5 MiB with thousands of containers. Headroom reads a pod many times,
fits it on every node and writes annotations to it. So admission and filter reject a pod beyond
these limits, and no memory is ever reserved for it. Below the limits all work is linear in the
pod's size. Pods that request no GPU have no limits here.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import starmap

import msgspec

from headroom.contract.annotations import PREFIX
from headroom.contract.kube import NodeSelectorRequirement, NodeSelectorTerm, Pod

#: Maximum number of containers and init containers together, including the gate that the webhook
#: adds.
MAX_CONTAINERS = 64
#: Maximum number of annotations, because the admission policies look at each of them
#: (deploy/base/admission.yaml).
MAX_ANNOTATIONS = 256
#: Maximum number of names in the limits or the requests of one container.
MAX_RESOURCES = 64
#: Maximum size in bytes of keys and values of annotations that begin with ``headroom.gpu/``.
MAX_OWN_ANNOTATION_BYTES = 32 << 10
#: Maximum number of tolerations, and of terms and requirements of required node affinity. Each of
#: them is compared with each node: 340 terms took the webhook 1.2 s in a cluster of 5,000 gated
#: nodes.
MAX_NODE_TERMS = 64
#: Maximum number of entries of the node selector and of values of required node affinity.
MAX_NODE_VALUES = 1024
#: Maximum size in bytes of keys and values of all annotations of an object, as the API server
#: counts them.
MAX_ANNOTATION_BYTES = 256 << 10
#: Bytes kept free for the annotations that Headroom writes: the placement, and the annotations that
#: requeue and touch a pod.
RESERVED_ANNOTATION_BYTES = 8 << 10
#: Maximum size in bytes of the whole pod as JSON. By default, etcd accepts at most 1.5 MiB.
MAX_POD_BYTES = 1 << 20
#: The part of ``RESERVED_ANNOTATION_BYTES`` for the annotations that requeue and touch a pod.
_REQUEUE_BYTES = 512


def exceeded(pod: Pod) -> str:
    """Return a sentence that names the first exceeded limit and the fix, or an empty string if
    there is none."""
    return next(filter(None, starmap(_sentence, _measured(pod))), "")


def _sentence(number: int, limit: int, what: str, help_text: str) -> str:
    if number <= limit:
        return ""
    return f"pod has {number} {what}, but at most {limit} are allowed with a GPU; {help_text}"


def _measured(pod: Pod) -> Iterator[tuple[int, int, str, str]]:
    """Yield number, limit, name and fix, beginning with the numbers that are cheapest to
    compute."""
    annotations = pod.metadata.annotations or {}
    yield (
        container_count(pod),
        MAX_CONTAINERS,
        "containers and init containers",
        "use several pods",
    )
    yield (
        len(annotations) + pod.metadata.foreign_annotations,
        MAX_ANNOTATIONS,
        "annotations",
        "remove some",
    )
    yield (
        pod.json_bytes,
        MAX_POD_BYTES,
        "bytes",
        "move values of variables and arguments into ConfigMaps",
    )
    yield (
        _most_resources(pod),
        MAX_RESOURCES,
        "resources in one container",
        "remove some",
    )
    yield (
        annotation_bytes({k: text for k, text in annotations.items() if k.startswith(PREFIX)}),
        MAX_OWN_ANNOTATION_BYTES,
        f"bytes in annotations {PREFIX}*",
        "shorten them",
    )
    requirements = _requirements(pod)
    yield (
        len(pod.spec.tolerations or ()) + len(_terms(pod)) + len(requirements),
        MAX_NODE_TERMS,
        "tolerations, and terms and expressions of node affinity",
        "label the nodes instead",
    )
    yield (
        len(pod.spec.node_selector or ()) + sum(len(each.values or ()) for each in requirements),
        MAX_NODE_VALUES,
        "node selector entries and node affinity values",
        "label the nodes instead",
    )
    yield (
        annotation_bytes(annotations) + pod.metadata.foreign_annotation_bytes,
        MAX_ANNOTATION_BYTES - RESERVED_ANNOTATION_BYTES,
        "bytes in annotations",
        "remove some, because Headroom adds its placement to them",
    )


def _most_resources(pod: Pod) -> int:
    containers = [*(pod.spec.containers or ()), *(pod.spec.init_containers or ())]
    found = [each.resources for each in containers if each.resources]
    amounts = [part for each in found for part in (each.limits, each.requests) if part]
    return max(map(len, amounts), default=0)


def sized(pod: Pod, json_bytes: int) -> Pod:
    """Return the pod, with ``json_bytes`` set if they exceed ``MAX_POD_BYTES``."""
    if json_bytes <= MAX_POD_BYTES:
        return pod
    return msgspec.structs.replace(pod, json_bytes=json_bytes)


def container_count(pod: Pod) -> int:
    return len(pod.spec.containers or ()) + len(pod.spec.init_containers or ())


def annotation_bytes(annotations: Mapping[str, str]) -> int:
    """Return the number of bytes of keys and values in UTF-8, as the API server counts them."""
    return sum(len(key.encode()) + len(text.encode()) for key, text in annotations.items())


def has_room_for(pod: Pod, written: Mapping[str, str]) -> bool:
    """Return whether ``written`` can be added to the pod's annotations.

    The API server limits their total size. Some space must stay free for the annotations that
    requeue and touch the pod.
    """
    after = {**(pod.metadata.annotations or {}), **written}
    after_bytes = annotation_bytes(after) + pod.metadata.foreign_annotation_bytes
    return after_bytes <= MAX_ANNOTATION_BYTES - _REQUEUE_BYTES


def _terms(pod: Pod) -> Sequence[NodeSelectorTerm]:
    affinity = pod.spec.affinity and pod.spec.affinity.node_affinity
    required = affinity and affinity.required_during_scheduling_ignored_during_execution
    return (required and required.node_selector_terms) or ()


def _requirements(pod: Pod) -> list[NodeSelectorRequirement]:
    return [
        requirement
        for term in _terms(pod)
        for requirement in (*(term.match_expressions or ()), *(term.match_fields or ()))
    ]
