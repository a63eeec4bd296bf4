"""Replaces the request ``auto`` with the recommendation when a pod is created.

A recommendation comes from the profile of the pod's owner. The pod keeps this amount, and the
annotation in its template stays ``auto``.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import msgspec

from headroom.contract.annotations import (
    VRAM,
    VRAM_FROM,
    VRAM_LIMIT,
    VRAM_REQUESTED,
    Auto,
    Bytes,
    Share,
    VramAnnotation,
    is_auto,
    parse_auto,
    parse_vram,
    render_vram,
)
from headroom.contract.errors import BadAnnotation
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.contract.vram_limit import parse_vram_limit
from headroom.contract.vramprofile import VRAMProfile
from headroom.core.cluster.label_inventory import believed
from headroom.core.cluster.node_settings import node_settings
from headroom.core.placement.device_accounting import allocatable
from headroom.core.placement.request import VramRequest, understand
from headroom.core.recommend.estimate import placeable
from headroom.core.recommend.profile import Profile
from headroom.core.recommend.profile_status import restored
from headroom.webhook.context import AdmissionContext
from headroom.webhook.json_patch import Draft


@dataclass(frozen=True, slots=True)
class Automatic:
    """The amount that replaces ``auto``."""

    text: str
    #: The source of the amount, as a text for users.
    source: str
    warning: str = ""


def requests_auto(pod: Pod) -> bool:
    text = pod.annotation(VRAM)
    return text is not None and is_auto(text)


def replace_auto(draft: Draft, context: AdmissionContext) -> Iterator[str]:
    """Replace the request ``auto`` and yield warnings. If there is no amount to replace it with,
    ``auto`` stays and validation rejects the pod."""
    text = draft.pod.annotation(VRAM)
    if text is None or not is_auto(text):
        return
    if (found := automatic(draft.pod, context)) is None:
        return
    draft.annotate(VRAM_REQUESTED, text)
    draft.annotate(VRAM, found.text)
    draft.annotate(VRAM_FROM, found.source)
    if found.warning:
        yield found.warning
    if (more := _above(draft.pod, found.text, context)) is not None:
        draft.annotate(VRAM_FROM, f"{found.source}; {more}")
        yield f"annotation {VRAM} is auto, which became {found.text}: {more}"


def problem(pod: Pod, context: AdmissionContext, *, is_template: bool) -> str:
    """Return the reason why a pod with ``auto`` is rejected. In a template, only the text of the
    annotation is checked."""
    text = pod.annotation(VRAM) or ""
    try:
        parse_auto(text)
    except BadAnnotation as err:
        return str(err)
    if is_template:
        return ""
    namespace = context.namespace.name
    return str(
        BadAnnotation(
            VRAM,
            text,
            "has no recommendation yet: too few lives of this workload are recorded, or their use"
            f" still grew, and neither default= nor a default of namespace {namespace} is set",
            "auto,default=8Gi",
        )
    )


def automatic(pod: Pod, context: AdmissionContext) -> Automatic | None:
    """Return the amount for a pod with ``auto``, or None if there is none or if ``auto`` is
    invalid.

    The first of these amounts that exists is returned: the recommendation, ``default=``, the
    namespace's default, and the recommendation for other programs of the same owner.
    """
    try:
        auto = parse_auto(pod.annotation(VRAM) or "")
    except BadAnnotation:
        return None
    request = _bare_request(pod, context)
    if request is None or not request.containers:
        return None
    names = list(dict.fromkeys(ask.name for ask in request.containers))
    profile = context.profile_of(pod)
    largest = _largest(pod, request, context) if profile is not None else {}
    limits = _limits(pod)
    own = _recommended(profile, names, largest, context, others=False)
    if profile is not None and own.keys() == set(names):
        return Automatic(_text(own, auto, limits), f"VRAMProfile {profile.metadata.name}")
    if (default := _default(auto, context, names)) is not None:
        return default
    near = _recommended(profile, names, largest, context, others=True)
    if profile is not None and near.keys() == set(names):
        name = profile.metadata.name
        return Automatic(
            _text(near, auto, limits),
            f"VRAMProfile {name}, other programs",
            f"annotation {VRAM} is auto, and no lives of this program (image, command, arguments,"
            f" environment) are recorded: the amount is from other programs in VRAMProfile {name}",
        )
    return None


def _bare_request(pod: Pod, context: AdmissionContext) -> VramRequest | None:
    """Return the request of the pod without its memory annotations, or None if it cannot be
    read."""
    written = pod.metadata.annotations or {}
    annotations = {k: v for k, v in written.items() if k not in (VRAM, VRAM_LIMIT)}
    bare = _annotated(pod, annotations)
    request = understand(bare, None, replace(context.rules, reject_unannotated=False))
    return request if isinstance(request, VramRequest) else None


def _annotated(pod: Pod, annotations: Mapping[str, str]) -> Pod:
    metadata = msgspec.structs.replace(pod.metadata, annotations=annotations)
    return msgspec.structs.replace(pod, metadata=metadata)


def _largest(
    pod: Pod, request: VramRequest, context: AdmissionContext
) -> Mapping[str, Mapping[str, int]]:
    """Return the most bytes that a device can give a container, by container and device model. Only
    devices on nodes where the pod may run count. Containers without a known device are omitted."""
    found: dict[str, dict[str, int]] = {}
    asks = {ask.name: ask.resource for ask in request.containers}
    for node in context.candidates(pod, list(dict.fromkeys(asks.values()))):
        status = node.status or believed(node.node, context.rules)
        reserve_bytes = node_settings(node.node).reserve_bytes
        for device in status.devices if status else ():
            for name, resource in asks.items():
                if device.resource == resource and device.memory_bytes > 0:
                    models = found.setdefault(name, {})
                    amount = allocatable(device, reserve_bytes)
                    if device.sharing == "mps":  # the plugin limits each process
                        replica_bytes = device.memory_bytes // max(1, device.replicas.total)
                        amount = min(amount, replica_bytes * request.processes)
                    models[device.model] = max(models.get(device.model, 0), amount)
    return found


def _recommended(
    profile: VRAMProfile | None,
    names: list[str],
    largest: Mapping[str, Mapping[str, int]],
    context: AdmissionContext,
    *,
    others: bool,
) -> dict[str, int]:
    """Return the largest recommendation of all device models in bytes, by container.

    The pod has no device yet, so all models that it could get count (``largest``). If no life ran
    on any of these models, all models count. No amount is larger than the largest of these devices.
    With ``others``, the lives of all programs count.
    """
    if profile is None:
        return {}
    lives = restored(profile.status)
    found: dict[str, int] = {}
    for name in names:
        program = context.programs.get(name)
        fingerprint = program.fingerprint if program else ""
        amounts = {
            model: max(amounts)
            for container, model in lives.containers
            if container == name
            and (amounts := _amounts(lives, (container, model), fingerprint, context, others))
        }
        if (amount := placeable(amounts, largest.get(name, {}))) is not None:
            found[name] = amount
    return found


def _amounts(
    lives: Profile,
    key: tuple[str, str],
    fingerprint: str,
    context: AdmissionContext,
    others: bool,
) -> list[int]:
    container = lives.containers[key]
    programs = list(container.tracks) if others else [fingerprint]
    found = (container.recommendation(each, context.now_s).request_bytes for each in programs)
    return [amount for amount in found if amount is not None]


def _above(pod: Pod, text: str, context: AdmissionContext) -> str | None:
    """Return a text which states that recorded lives used more than this amount, or None if none of
    them did."""
    profile = context.profile_of(pod)
    try:
        amounts = parse_vram(text)
    except BadAnnotation:
        return None
    for (name, model), lives in restored(profile.status).containers.items() if profile else ():
        amount, (peak_bytes, count) = amounts.of(name), lives.highest()
        if isinstance(amount, Bytes) and peak_bytes > amount.count_bytes:
            used = f"used up to {gib(peak_bytes, up=True)} on {model}"
            return f"of {'1 life' if count == 1 else f'{count:,} lives'}, some {used}"
    return None


def _text(amounts: Mapping[str, int], auto: Auto, limits: VramAnnotation | None) -> str:
    limited = {name: _limited(amount, auto, limits, name) for name, amount in amounts.items()}
    if len(limited) == 1:
        return render_vram(VramAnnotation(everywhere=next(iter(limited.values()))))
    return render_vram(VramAnnotation(by_container=limited))


def _limited(
    amount_bytes: int, auto: Auto, limits: VramAnnotation | None, container: str
) -> Bytes | Share:
    """Return the amount within the options of ``auto`` and the limit of the container."""
    limit = limits.of(container) if limits else None
    most_bytes = auto.max_bytes
    if isinstance(limit, Bytes):
        most_bytes = min(most_bytes, limit.count_bytes)
    return Bytes(min(max(amount_bytes, auto.min_bytes), most_bytes))


def _limits(pod: Pod) -> VramAnnotation | None:
    """Return the pod's own limit, or None if it has none or if it is invalid."""
    text = pod.annotation(VRAM_LIMIT)
    try:
        return None if text is None else parse_vram_limit(text)
    except BadAnnotation:
        return None


def _default(auto: Auto, context: AdmissionContext, names: list[str]) -> Automatic | None:
    if auto.default is not None:
        text = render_vram(VramAnnotation(everywhere=auto.default))
        return Automatic(text, "default= of the request")
    text = context.namespace.default_vram or ""
    try:
        default = parse_vram(text)
    except BadAnnotation:
        return None
    if default.everywhere is not None:
        return Automatic(text, f"namespace {context.namespace.name}")
    own = {name: amount for name in names if (amount := default.of(name)) is not None}
    if own.keys() != set(names):
        return None
    return Automatic(
        render_vram(VramAnnotation(by_container=own)), f"namespace {context.namespace.name}"
    )
