"""Applies the default limit and the maximum limit of a namespace to its GPU pods.

Both are like ``default`` and ``max`` of a LimitRange. A pod without a limit gets the default, or
else the maximum, as its annotation when it is created. So later changes of the namespace do not
affect pods that exist.
"""

from headroom.contract.annotations import (
    DEFAULT_VRAM_LIMIT,
    MAX_VRAM_LIMIT,
    VRAM,
    VRAM_LIMIT,
    Bytes,
    ReplicaShare,
    Share,
    VramAnnotation,
    render_amount,
    render_vram,
)
from headroom.contract.errors import BadAnnotation
from headroom.contract.kube import Pod
from headroom.contract.vram_limit import compared, parse_max_vram_limit, parse_vram_limit
from headroom.core.placement.request import VramRequest
from headroom.webhook.context import AdmissionContext, NamespaceMetadata
from headroom.webhook.json_patch import Draft


def write_limit(draft: Draft, request: VramRequest, context: AdmissionContext) -> bool:
    """Write the namespace's limit on a pod that requests an amount and sets no limit. Return
    whether it was written."""
    if draft.pod.annotation(VRAM_LIMIT) is not None:
        return False
    try:
        default = _default(context.namespace)
    except BadAnnotation:
        return False  # validation rejects the pod
    limits: dict[str, Bytes | Share] = {}
    for ask in request.containers:
        limit = default.of(ask.name) if default is not None else None
        if limit is None or isinstance(ask.amount, ReplicaShare):
            return False
        difference = compared(limit, ask.amount)
        limits[ask.name] = ask.amount if difference is not None and difference < 0 else limit
    if not limits:
        return False
    first, *others = limits.values()
    is_one = all(each == first for each in others)
    written = VramAnnotation(everywhere=first) if is_one else VramAnnotation(by_container=limits)
    draft.annotate(VRAM_LIMIT, render_vram(written))
    return True


def _default(namespace: NamespaceMetadata) -> VramAnnotation | None:
    """Return the limit of pods without a limit, or None if they have none. Raises
    ``BadAnnotation``."""
    text = namespace.annotations.get(DEFAULT_VRAM_LIMIT)
    default = None if text is None else parse_vram_limit(text, DEFAULT_VRAM_LIMIT)
    most = _most(namespace)
    return VramAnnotation(everywhere=most) if default is None and most is not None else default


def _most(namespace: NamespaceMetadata) -> Bytes | Share | None:
    text = namespace.annotations.get(MAX_VRAM_LIMIT)
    return None if text is None else parse_max_vram_limit(text, MAX_VRAM_LIMIT)


def violation(pod: Pod, request: VramRequest, context: AdmissionContext) -> str:
    """Return why the pod does not comply with the limits of its namespace, or an empty string.

    A pod template has not got the namespace's limit yet, so a template without a limit complies.
    """
    name = context.namespace.name
    text = pod.annotation(VRAM_LIMIT)
    try:
        most = _most(context.namespace)
        if text is None:
            _default(context.namespace)
    except BadAnnotation as err:
        return f"namespace {name}: {err}"
    if most is None:
        return ""
    maximum = f"the maximum of namespace {name}, {render_amount(most)} ({MAX_VRAM_LIMIT})"
    for ask in request.containers:
        if isinstance(ask.amount, ReplicaShare):
            return (
                f"container {ask.name:.80} requests no amount of GPU memory, and pods of namespace "
                f"{name} need one, because it sets {MAX_VRAM_LIMIT}. Example: {VRAM}: "
                f"{render_amount(most)}"
            )
        written = [(VRAM, pod.annotation(VRAM) or ask.amount_text, ask.amount)]
        if text is not None and ask.limit is None:
            why = f"is not allowed: {maximum}, applies to every pod"
            return str(BadAnnotation(VRAM_LIMIT, text, why, render_amount(most)))
        if text is not None and ask.limit is not None:
            written.append((VRAM_LIMIT, text, ask.limit))
        for key, value, amount in written:
            difference = compared(amount, most)
            if difference is None:
                why = f"cannot be compared with {maximum}: write an amount if it is an amount, and"
                why += " a share if it is a share"
                return str(BadAnnotation(key, value, why, render_amount(most)))
            if difference > 0:
                return str(BadAnnotation(key, value, f"is above {maximum}", render_amount(most)))
    return ""
