"""Reduces objects of the API server to the fields that Headroom reads.

The annotations of a pod may take 256 KiB. kubectl, service meshes and pipelines fill them with text
that no decision depends on. Only the size of such text is kept, because the API server rejects a
pod whose annotations exceed its limit.
"""

from typing import Any, TypeVar

from msgspec import Struct
from msgspec.structs import fields, replace

from headroom.contract.annotations import EXTENDER_ANNOTATIONS, PREFIX, STARTUP, USER_ANNOTATIONS
from headroom.contract.foreign_keys import MIRRORED, NODE_MARKS, VISIBLE_DEVICES, is_mark
from headroom.contract.gate import is_whole
from headroom.contract.kube import (
    COLLECTED,
    Container,
    InitContainer,
    Namespace,
    Node,
    ObjectMeta,
    Pod,
    PodCondition,
    Volume,
)
from headroom.contract.pod_limits import MAX_OWN_ANNOTATION_BYTES, annotation_bytes

#: Number of characters kept of another allocator's annotation, enough for a node name.
MAX_MARK_CHARS = 256
#: Maximum number of other allocators' annotations kept per object. A single annotation already
#: identifies the allocator.
MAX_MARKS = 16

_OURS_FIRST = frozenset((*EXTENDER_ANNOTATIONS, *USER_ANNOTATIONS))
#: Fields that only a gate needs, with their defaults.
_OF_GATES: dict[str, Any] = {
    name: field.default
    for field in fields(InitContainer)
    if (name := field.name) not in Container.__struct_fields__
}
T = TypeVar("T", bound=Struct)
C = TypeVar("C", bound=Container)


def kept_pod(pod: Pod) -> Pod:
    """Return the pod without the fields that nothing reads. The result is less than half as large.

    Annotations and environment variables that are not read are dropped.

    * A single volume that kube-scheduler checks is kept, to show that there are such volumes.
    * Unbound pods keep their whole status.
    * Bound pods keep only the condition that their node was lost. Until the pod has ended, only
      containers that have failed keep their states. The states of the init containers are kept,
      because they show whether the gate still holds the pod.
    * Pods that start alone also keep the fields that show the end of their start: the condition
      Ready, the states of all containers, and whether the containers have probes.
    """
    starts_alone = pod.annotation(STARTUP) is not None
    spec = replace(
        pod.spec,
        containers=_kept_containers(pod.spec.containers, starts_alone),
        init_containers=_kept_containers(pod.spec.init_containers, starts_alone),
        volumes=_one_claim(pod.spec.volumes),
    )
    status = pod.status
    if status is not None and pod.node:
        collected = [
            replace(each, message="")
            for each in status.conditions or ()
            if each.reason == COLLECTED
        ]
        ready = (
            [PodCondition(type="Ready", status="True")] if starts_alone and _is_ready(pod) else []
        )
        status = replace(status, conditions=[*collected[:1], *ready] or None)
        if status.phase not in ("Succeeded", "Failed") and not starts_alone:
            failed = [
                each
                for each in status.container_statuses or ()
                if (end := each.last_end) is not None and end.exit_code
            ]
            status = replace(status, container_statuses=failed or None)
    metadata = replace(kept_annotations(pod.metadata), finalizers=None)
    return replace(pod, metadata=metadata, spec=spec, status=status)


def kept_node(node: Node) -> Node:
    """Return the node without annotations that nothing reads.

    It keeps all labels, because pods may select any label.
    """
    metadata = replace(node.metadata, finalizers=None, owner_references=None)
    return replace(node, metadata=kept_annotations(metadata))


def kept_namespace(namespace: Namespace) -> Namespace:
    """Return the namespace with only Headroom's own annotations and labels."""
    metadata = namespace.metadata
    labels = {key: text for key, text in (metadata.labels or {}).items() if key.startswith(PREFIX)}
    metadata = replace(metadata, labels=labels or None, finalizers=None, owner_references=None)
    return replace(namespace, metadata=kept_annotations(metadata))


def unannotated(of: T) -> T:
    """Return the object without annotations and labels."""
    metadata: ObjectMeta = of.metadata  # type: ignore[attr-defined]
    return replace(of, metadata=replace(metadata, annotations=None, labels=None))


def kept_annotations(of: ObjectMeta) -> ObjectMeta:
    """Return the metadata with only the annotations that are read, and the size of the others.

    If Headroom's own annotations exceed the limit of a pod, the metadata keeps just enough of them
    to show this.
    """
    annotations = of.annotations
    if not annotations:
        return of
    kept: dict[str, str] = {}
    own_bytes = marks = 0
    for key in sorted(annotations, key=_OURS_FIRST.__contains__, reverse=True):
        if key.startswith(PREFIX) and own_bytes <= MAX_OWN_ANNOTATION_BYTES:
            kept[key] = annotations[key][: MAX_OWN_ANNOTATION_BYTES + 1]
            own_bytes += annotation_bytes({key: kept[key]})
        elif _is_read(key) and marks < MAX_MARKS:
            kept[key] = annotations[key][:MAX_MARK_CHARS]
            marks += 1
    if len(kept) == len(annotations) and kept == annotations:
        return of
    dropped_bytes = annotation_bytes(annotations) - annotation_bytes(kept)
    return replace(
        of,
        annotations=kept or None,
        foreign_annotation_bytes=of.foreign_annotation_bytes + dropped_bytes,
        foreign_annotations=of.foreign_annotations + len(annotations) - len(kept),
    )


def _is_read(key: str) -> bool:
    return key == MIRRORED or key in NODE_MARKS or is_mark(key)


def _one_claim(volumes: list[Volume] | None) -> list[Volume] | None:
    claims = (each for each in volumes or () if each.persistent_volume_claim or each.ephemeral)
    first = next(claims, None)
    return [first] if first else None


def _is_ready(pod: Pod) -> bool:
    conditions = (pod.status.conditions if pod.status else None) or ()
    return any(each.type == "Ready" and each.status == "True" for each in conditions)


def _kept_containers(containers: list[C] | None, with_probes: bool) -> list[C] | None:
    # A gate keeps all its fields, because they identify it.
    return containers and [
        each if is_whole(each) else _kept_container(each, with_probes) for each in containers
    ]


def _kept_container(container: C, with_probes: bool) -> C:
    return replace(
        container,
        env=container.env and [each for each in container.env if each.name == VISIBLE_DEVICES],
        ports=container.ports and [port for port in container.ports if port.host_port],
        readiness_probe=container.readiness_probe if with_probes else None,
        startup_probe=container.startup_probe if with_probes else None,
        **(_OF_GATES if isinstance(container, InitContainer) else {}),
    )
