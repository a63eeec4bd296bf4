"""Validates Headroom's annotations on pods, workloads, namespaces and nodes.

The same code parses pods here and in kube-scheduler's calls, so an admitted pod is never unreadable
there. Workloads (Deployment, Job, ...) only get warnings, so that users see the error when they run
``kubectl apply``. Their pods are rejected when they are created.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headroom.contract.annotations import (
    CORDON,
    CORDON_EXAMPLE,
    DEFAULT_VRAM,
    DEFAULT_VRAM_LIMIT,
    DEVICE_CHOICE,
    GATED,
    MAINTENANCE,
    MAX_VRAM_LIMIT,
    PREFIX,
    RESERVE,
    SCHEDULER,
    SHARE,
    UNIFIED_MEMORY,
    USER_ANNOTATIONS,
    VRAM,
    VRAM_FROM,
    VRAM_LIMIT,
    Bytes,
    VramAnnotation,
    is_auto,
    is_extender_annotation,
    parse_auto,
    parse_cordon,
    parse_device_choice,
    parse_gated,
    parse_maintenance,
    parse_reserve,
    parse_share,
    parse_unified_memory,
    parse_vram,
)
from headroom.contract.dra import implicit_gpu_resources
from headroom.contract.errors import BadAnnotation, shortened
from headroom.contract.gate import GATE, is_gated
from headroom.contract.kube import ObjectMeta, Pod
from headroom.contract.pod_limits import exceeded
from headroom.contract.quantity import below_context, implausible
from headroom.contract.unread_annotations import without_effect
from headroom.contract.vram_limit import parse_max_vram_limit, parse_vram_limit
from headroom.core.placement.request import Unreadable, asks_for_gpu, understand
from headroom.webhook.automatic import problem, requests_auto
from headroom.webhook.context import AdmissionContext
from headroom.webhook.counted_vram import miscounted
from headroom.webhook.mutation import NO_IMAGE
from headroom.webhook.namespace_limits import violation
from headroom.webhook.unplaceable import needs_attention

_POD_PARSERS: Mapping[str, Callable[[str], object]] = {GATED: parse_gated, SHARE: parse_share}
_NAMESPACE_PARSERS: Mapping[str, Callable[[str], object]] = {
    DEFAULT_VRAM: lambda text: parse_vram(text, DEFAULT_VRAM),
    DEFAULT_VRAM_LIMIT: lambda text: parse_vram_limit(text, DEFAULT_VRAM_LIMIT),
    MAX_VRAM_LIMIT: lambda text: parse_max_vram_limit(text, MAX_VRAM_LIMIT),
    **_POD_PARSERS,
}
_NODE_PARSERS: Mapping[str, Callable[[str], object]] = {
    CORDON: parse_cordon,
    DEVICE_CHOICE: parse_device_choice,
    MAINTENANCE: parse_maintenance,
    RESERVE: parse_reserve,
    UNIFIED_MEMORY: parse_unified_memory,
}


#: Prefixes of the UUIDs of GPUs and of MIG devices.
UUID_PREFIXES = ("GPU-", "MIG-")

WOULD = "in mode enforce, this pod would be rejected"


@dataclass(frozen=True, slots=True)
class Validated:
    """The result of a validation."""

    #: The reason why the object is rejected. Empty if it is admitted.
    rejection: str = ""
    warnings: tuple[str, ...] = ()


def validate_pod(pod: Pod, before: Pod | None, context: AdmissionContext) -> Validated:
    """Validate a pod that is created, or changed before it is bound. ``before`` is the old version
    of a changed pod.

    A change that does not affect Headroom's annotations is always admitted. Otherwise an invalid
    pod that was admitted earlier could not be deleted. Static pods are admitted, because the
    kubelet runs them anyway.
    """
    if context.is_static(pod) or pod.metadata.deletion_timestamp:
        return Validated()
    if before is not None and (
        before.node or _headroom_annotations(before.metadata) == _headroom_annotations(pod.metadata)
    ):
        return Validated()
    rejection = _rejection(pod, context)
    # A quota must count all pods, so invalid pods must not be admitted without being counted.
    if context.settings.observes and not (context.counts and asks_for_gpu(pod, context.rules)):
        would = [f"{WOULD}: {rejection}"] if rejection else []
        return Validated(warnings=(*would, *_warnings(pod, context)))
    if (
        not rejection
        and before is None
        and _requests_gate(pod)
        and not is_gated(pod, context.settings.gate_image)
    ):
        rejection = (
            f"annotation {GATED} is 'true' and the pod has no gate: {_why_no_gate(pod, context)}"
        )
    return Validated(rejection, tuple(_warnings(pod, context)))


def validate_oversized(pod: Pod, context: AdmissionContext) -> Validated:
    """Return the result for a pod that has more containers than a GPU pod may have."""
    if not asks_for_gpu(pod, context.rules):
        return Validated()
    rejection = exceeded(pod)
    if context.settings.observes and not context.counts:
        return Validated(warnings=(f"{WOULD}: {rejection}",))
    return Validated(rejection)


def validate_template(
    kind: str, owners: Sequence[ObjectMeta], pod: Pod, context: AdmissionContext
) -> Validated:
    """Validate the pod template of a workload. It is never rejected.

    ``owners`` has the metadata of the workload, and of the template of the Jobs of a CronJob.
    """
    warnings: list[str] = []
    if rejection := _rejection(pod, context, is_template=True):
        warnings.append(f"pods of this {kind} will be rejected: {rejection}")
    if pod.annotation(VRAM) is None:
        wheres = (f"the {kind} itself", "the template of its Jobs")
        warnings.extend(
            f"annotation {VRAM} of {where} has no effect; "
            "set it in metadata.annotations of the pod template"
            for owner, where in zip(owners, wheres, strict=False)
            if VRAM in (owner.annotations or {})
        )
    warnings.extend(
        f"annotation {key} is removed from its pods: only Headroom writes it"
        for key in sorted(_headroom_annotations(pod.metadata))
        if is_extender_annotation(key)
    )
    return Validated(warnings=(*warnings, *_warnings(pod, context)))


def validate_annotations(
    kind: str, metadata: ObjectMeta, before: ObjectMeta | None, context: AdmissionContext
) -> Validated:
    """Validate the annotations of a namespace or node. ``before`` is the old metadata of a changed
    object.

    In mode enforce, a change of an annotation to an invalid value is rejected, because such a
    default would reject all later pods of the namespace. All other changes are admitted, and so is
    a new node, because namespaces and nodes are used for more than GPUs.
    """
    parsers = _NAMESPACE_PARSERS if kind == "Namespace" else _NODE_PARSERS
    old = {} if before is None else _headroom_annotations(before)
    may_reject = not context.settings.observes and (kind == "Namespace" or before is not None)
    rejection = ""
    warnings: list[str] = []
    for key, text in sorted(_headroom_annotations(metadata).items()):
        if key not in parsers:
            continue
        error = _annotation_error(parsers[key], key, text)
        if not error:
            warnings.extend(_implausible(key, text))
        elif may_reject and old.get(key) != text:
            rejection = rejection or error
        else:
            warnings.append(error)
    labels = (SCHEDULER,) if kind == "Namespace" else ()
    warnings.extend(without_effect(metadata.annotations, parsers, f" on a {kind}", labels))
    return Validated(rejection, tuple(warnings))


def _annotation_error(parse: Callable[[str], object], key: str, text: str) -> str:
    """Return why the value is invalid, or an empty string if it is valid."""
    try:
        parse(text)
    except BadAnnotation as err:
        return str(err)
    return _too_small(key, text)


def _too_small(key: str, text: str) -> str:
    """Return why an amount lacks its unit, or an empty string if no amount does."""
    why = next(filter(None, map(implausible, _amounts(key, text))), "")
    return str(BadAnnotation(key, text, why, "512Mi" if key == RESERVE else "8Gi")) if why else ""


def _rejection(pod: Pod, context: AdmissionContext, *, is_template: bool = False) -> str:
    """Return the reason why a GPU pod is invalid, or an empty string if it is valid or requests no
    GPU."""
    implicit = implicit_gpu_resources(pod)
    if pod.annotation(VRAM) is not None and implicit and not context.is_exempt:
        return (
            f"annotation {VRAM}: DRA allocates {implicit[0]} in whole devices, and counts no "
            f"amount; request {context.rules.resources[0]}: 1 instead, or convert the pod to "
            "claims (headroom convert --to dra), or remove the annotation"
        )
    if not asks_for_gpu(pod, context.rules):
        return ""
    too_small = _too_small_request(pod, context)
    if requests_auto(pod):
        return too_small or problem(pod, context, is_template=is_template)
    request = understand(pod, context.namespace.default_vram, context.rules)
    if isinstance(request, Unreadable):
        source = ""
        if pod.annotation(VRAM) is None and DEFAULT_VRAM in request.message:
            source = f"namespace {context.namespace.name}: "
        elif (origin := pod.annotation(VRAM_FROM)) is not None and VRAM in request.message:
            source = f"{origin:.80}: "
        return source + request.message
    if too_small:
        return too_small
    for key, parse in _POD_PARSERS.items():
        text = pod.annotation(key)
        try:
            if text is not None:
                parse(text)
        except BadAnnotation as err:
            return str(err)
    if wrong := _too_small_limit(pod) or violation(pod, request, context):
        return wrong
    counts = context.counts and not (is_template or implicit)
    return miscounted(pod, request) if counts else ""


def _too_small_limit(pod: Pod) -> str:
    """Return why the pod's limit lacks its unit, or an empty string if it does not."""
    text = pod.annotation(VRAM_LIMIT)
    return "" if text is None else _too_small(VRAM_LIMIT, text)


def _too_small_request(pod: Pod, context: AdmissionContext) -> str:
    """Return why the pod's own amount, or else its namespace's default, lacks its unit."""
    if (text := pod.annotation(VRAM)) is not None:
        origin = pod.annotation(VRAM_FROM)
        why = _too_small(VRAM, text)
        return f"{origin:.80}: {why}" if why and origin is not None else why
    default = context.namespace.default_vram
    why = "" if default is None else _too_small(DEFAULT_VRAM, default)
    return f"namespace {context.namespace.name}: {why}" if why else ""


def _requests_gate(pod: Pod) -> bool:
    """Return whether the pod's own annotation requests a gate."""
    try:
        return parse_gated(pod.annotation(GATED) or "false")
    except BadAnnotation:
        return False


def _why_no_gate(pod: Pod, context: AdmissionContext) -> str:
    if not context.settings.gate_image:
        return NO_IMAGE
    first, *others = [each.name for each in pod.spec.init_containers or ()] or [""]
    if GATE in others:
        return (
            f"another webhook put init container {first!r:.80} before it; set the"
            " reinvocationPolicy of that webhook to Never"
        )
    name = context.settings.scheduler
    return f"Headroom does not place it; set schedulerName: {name} and no nodeName"


def _warnings(pod: Pod, context: AdmissionContext) -> Iterator[str]:
    user_keys = [
        key
        for key in sorted(_headroom_annotations(pod.metadata))
        if not is_extender_annotation(key)
    ]
    yield from without_effect(pod.metadata.annotations, USER_ANNOTATIONS)
    if (text := pod.annotation(VRAM)) is not None:
        origin = pod.annotation(VRAM_FROM)
        source = "" if origin is None else f"{origin:.80}: "
        yield from (f"{source}{warning}" for warning in _implausible(VRAM, text))
    if VRAM in user_keys and not asks_for_gpu(pod, context.rules):
        named = ", ".join(context.rules.resources)
        yield (
            f"annotation {VRAM} has no effect: no container requests a GPU. Example: "
            f"resources.limits {context.rules.resources[0]}: 1 ({named:.120})"
        )
    if VRAM_LIMIT in user_keys and not asks_for_gpu(pod, context.rules):
        yield f"annotation {VRAM_LIMIT} has no effect: no container requests a GPU"
    yield from needs_attention(pod, context)
    if VRAM in (pod.metadata.labels or {}):
        yield f"label {VRAM} has no effect; set an annotation of that name"


def _implausible(key: str, text: str) -> Iterator[str]:
    """Yield a warning if a valid value is probably a mistake, such as an index or a number without
    a unit."""
    if key == CORDON:
        wrong = sorted(each for each in parse_cordon(text) if not each.startswith(UUID_PREFIXES))
        if wrong:
            error = f"names {shortened(wrong[0])}, which is not the UUID of a GPU"
            yield str(BadAnnotation(key, text, error, CORDON_EXAMPLE))
        return
    amounts = () if key == RESERVE else _amounts(key, text)
    why = next(filter(None, map(below_context, amounts)), "")
    if why:
        yield str(BadAnnotation(key, text, why, "8Gi"))


def _amounts(key: str, text: str) -> list[int]:
    """Return the amounts in bytes that an annotation contains. The list is empty if the annotation
    is invalid."""
    try:
        if key == RESERVE:
            return [parse_reserve(text)]
        if key in (VRAM_LIMIT, DEFAULT_VRAM_LIMIT, MAX_VRAM_LIMIT):
            limit = parse_vram_limit(text, key) or VramAnnotation()
            amounts = [limit.everywhere, *limit.by_container.values()]
        elif key not in (VRAM, DEFAULT_VRAM):
            return []
        elif is_auto(text):
            auto = parse_auto(text)
            amounts = [Bytes(auto.max_bytes), auto.default]
        else:
            vram = parse_vram(text, key)
            amounts = [vram.everywhere, *vram.by_container.values()]
    except BadAnnotation:
        return []
    return [amount.count_bytes for amount in amounts if isinstance(amount, Bytes)]


def _headroom_annotations(metadata: ObjectMeta) -> dict[str, str]:
    return {
        key: text for key, text in (metadata.annotations or {}).items() if key.startswith(PREFIX)
    }
