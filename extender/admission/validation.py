"""What is refused, and what its author is warned of: our annotations, wherever they are written.

A pod is read by the very parser of the scheduler's verbs, so that what is let in here is never
called unreadable there. What makes pods (a Deployment, a Job, ...) is warned of only: its author
sees the mistake at ``kubectl apply``, and its pods are refused when they are created.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice

from contract.annotations import (
    DEFAULT_VRAM,
    DEVICE_CHOICE,
    GATED,
    MAINTENANCE,
    PREFIX,
    RESERVE,
    SHARE,
    USER_ANNOTATIONS,
    VRAM,
    VRAM_FROM,
    is_extender_annotation,
    parse_device_choice,
    parse_gated,
    parse_maintenance,
    parse_reserve,
    parse_share,
    parse_vram,
)
from contract.errors import BadAnnotation, shortened
from contract.gate import is_gated
from contract.kube import ObjectMeta, Pod
from extender.admission.context import AdmissionContext
from extender.admission.mutation import NO_IMAGE
from extender.placement.request import Unreadable, asks_for_gpu, understand

_PARSED: Mapping[str, Callable[[str], object]] = {GATED: parse_gated, SHARE: parse_share}
_OF_NAMESPACES: Mapping[str, Callable[[str], object]] = {
    DEFAULT_VRAM: lambda text: parse_vram(text, DEFAULT_VRAM),
    **_PARSED,
}
_OF_NODES: Mapping[str, Callable[[str], object]] = {
    DEVICE_CHOICE: parse_device_choice,
    MAINTENANCE: parse_maintenance,
    RESERVE: parse_reserve,
}


#: Warnings of one answer: an API server drops them from some 4 KiB on.
MAX_WARNINGS = 12
#: Of the name of an annotation, when looking for what was meant.
MAX_NAME_CHARS = 80

WOULD = "this pod would be refused if Headroom did not only observe"


@dataclass(frozen=True, slots=True)
class Validated:
    #: A sentence for the author; empty where it is let in.
    rejection: str = ""
    warnings: tuple[str, ...] = ()


def validate_pod(pod: Pod, before: Pod | None, around: AdmissionContext) -> Validated:
    """A pod that is created, or changed while no node has it; ``before`` is what it was.

    A change that leaves our annotations alone is let through, so that what was let in once can
    still be given up. A static pod runs whatever is said here.
    """
    if around.is_static(pod) or pod.metadata.deletion_timestamp:
        return Validated()
    if before is not None and (before.node or _ours(before.metadata) == _ours(pod.metadata)):
        return Validated()
    rejection = _rejection(pod, around)
    if around.wishes.observes:
        told = [f"{WOULD}: {rejection}"] if rejection else []
        return Validated(warnings=(*told, *_warnings(pod, around)))
    if (
        not rejection
        and before is None
        and _wishes_gate(pod)
        and not is_gated(pod, around.wishes.gate_image)
    ):
        rejection = f"annotation {GATED} is 'true' and the pod has no gate: {_why_no_gate(around)}"
    return Validated(rejection, tuple(_warnings(pod, around)))


def validate_template(
    kind: str, owner: ObjectMeta, pod: Pod, around: AdmissionContext
) -> Validated:
    """Something that makes pods like ``pod``; never refused."""
    warnings: list[str] = []
    if rejection := _rejection(pod, around):
        warnings.append(f"pods of this {kind} will be refused: {rejection}")
    if pod.annotation(VRAM) is None and VRAM in (owner.annotations or {}):
        warnings.append(
            f"annotation {VRAM} of the {kind} itself has no effect; "
            "right is that of its pod template, metadata.annotations there"
        )
    warnings.extend(
        f"annotation {key} is removed from its pods: only Headroom writes it"
        for key in sorted(_ours(pod.metadata))
        if is_extender_annotation(key)
    )
    return Validated(warnings=(*warnings, *_warnings(pod, around)))


def validate_annotations(kind: str, metadata: ObjectMeta) -> Validated:
    """What namespaces and nodes say; never refused, since there is more to them than GPUs."""
    parsers = _OF_NAMESPACES if kind == "Namespace" else _OF_NODES
    warnings: list[str] = []
    for key, text in sorted(_ours(metadata).items()):
        if key in parsers:
            try:
                parsers[key](text)
            except BadAnnotation as err:
                warnings.append(str(err))
    return Validated(warnings=tuple(warnings))


def _rejection(pod: Pod, around: AdmissionContext) -> str:
    if not asks_for_gpu(pod, around.rules):
        return ""
    request = understand(pod, around.namespace.default_vram, around.rules)
    if isinstance(request, Unreadable):
        whose = ""
        if pod.annotation(VRAM) is None and DEFAULT_VRAM in request.message:
            whose = f"namespace {around.namespace.name}: "
        elif (origin := pod.annotation(VRAM_FROM)) is not None and VRAM in request.message:
            whose = f"{origin:.80}: "
        return whose + request.message
    for key, parse in _PARSED.items():
        text = pod.annotation(key)
        try:
            if text is not None:
                parse(text)
        except BadAnnotation as err:
            return str(err)
    return ""


def _wishes_gate(pod: Pod) -> bool:
    try:
        return parse_gated(pod.annotation(GATED) or "false")
    except BadAnnotation:
        return False


def _why_no_gate(around: AdmissionContext) -> str:
    if not around.wishes.gate_image:
        return NO_IMAGE
    return (
        f"it is not placed by Headroom; right is schedulerName {around.wishes.scheduler!r}"
        " and no nodeName"
    )


def _warnings(pod: Pod, around: AdmissionContext) -> Iterator[str]:
    ours = [key for key in sorted(_ours(pod.metadata)) if not is_extender_annotation(key)]
    # No more are shown than an answer holds, and to find what was meant takes long.
    for key in islice((key for key in ours if key not in USER_ANNOTATIONS), MAX_WARNINGS):
        near = get_close_matches(key[:MAX_NAME_CHARS], USER_ANNOTATIONS, 1, 0.8)
        meant = f"; right is, for example, {near[0]}" if near else ""
        yield f"annotation {shortened(key)} has no effect: a pod has none of that name{meant}"
    if VRAM in ours and not asks_for_gpu(pod, around.rules):
        named = ", ".join(around.rules.resources)
        yield (
            f"annotation {VRAM} has no effect: no container asks for a GPU; right is, for example, "
            f"resources.limits {around.rules.resources[0]}: 1 ({named:.120})"
        )
    if VRAM in (pod.metadata.labels or {}):
        yield f"label {VRAM} has no effect; right is an annotation of that name"


def _ours(metadata: ObjectMeta) -> dict[str, str]:
    return {
        key: text for key, text in (metadata.annotations or {}).items() if key.startswith(PREFIX)
    }
