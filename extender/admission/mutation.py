"""Changes GPU pods when they are created, so that later decisions need only the pod.

The steps, in this order:

1. Remove annotations that only extenders may write.
2. Write the namespace's default as the pod's annotation, and record its origin.
3. Set the scheduler that calls Headroom, if the pod names none.
4. Add the extended resource of the in-tree mirror.
5. For pods that Headroom places: add the variable of pinned nodes, the variables that expose and
   limit the share, and the gate.

The steps never change a field that a user set, and they are idempotent. The API server may call the
webhook again if another webhook added containers: then these are handled too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from contract.annotations import (
    BYTES,
    DEVICES,
    FRACTION,
    GATED,
    MIRROR,
    SHARE,
    VRAM,
    VRAM_FROM,
    DeviceChoice,
    ShareWish,
    VramAnnotation,
    is_extender_annotation,
    parse_vram,
    render_vram,
)
from contract.gate import GATE, gate_container
from contract.kube import Container, EnvVar, Pod
from contract.pod_limits import exceeded
from extender.admission.context import STOCK_SCHEDULER, AdmissionContext, GpuNode
from extender.admission.device_amounts import cap_mib, mirrored_mib, mps_mib
from extender.admission.json_patch import Draft, Operation, Where, following
from extender.admission.pod_options import gated_wish, share_wish
from extender.placement.policy import Rules
from extender.placement.request import ContainerAsk, VramRequest, asks_for_gpu, understand
from extender.placement.visible_devices import VISIBLE_DEVICES, followed

BYTES_VARIABLE = "HEADROOM_VRAM_BYTES"
FRACTION_VARIABLE = "HEADROOM_VRAM_FRACTION"
#: Read by a hook of the container toolkit, in MiB. Above the limit, the driver fails allocations;
#: below the request, it does not evict memory.
CAP_VARIABLES = ("NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST")
MPS_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"

UNLIMITED = (
    f"{SHARE} is limit, but nothing can limit the pod: it needs an amount, for example '8Gi', and"
    " every eligible node must be able to enforce it (docs/admission.md)"
)
NO_IMAGE = "the gate has no image; set gate_image in Headroom's settings to the agent's image"


@dataclass(frozen=True, slots=True)
class Mutated:
    """The patch of a pod."""

    operations: tuple[Operation, ...] = ()
    #: Unexpected changes, and steps that failed, for the user who creates the pod.
    warnings: tuple[str, ...] = ()


def mutate(pod: Pod, context: AdmissionContext) -> Mutated:
    """Return the changes to a pod that is being created.

    It raises no errors: validation rejects pods that cannot be decoded, and gives the reason.
    """
    if not asks_for_gpu(pod, context.rules) or context.is_static(pod):
        return Mutated()
    if exceeded(pod):  # validation rejects it with the reason
        return Mutated()
    draft = Draft(pod)
    warnings = [*_remove_reserved(draft)]
    _default(draft, context)
    warnings += _scheduler(draft, context)
    request = understand(draft.pod, context.namespace.default_vram, context.rules)
    placed = not pod.node and context.asks_headroom(draft.pod.spec.scheduler_name)
    if isinstance(request, VramRequest):
        if context.wishes.mirror:
            warnings += _mirror(draft, request)
        if placed and not context.wishes.observes:
            warnings += _prepare_for_nodes(draft, request, context)
    return Mutated(tuple(draft.operations), tuple(warnings))


def _remove_reserved(draft: Draft) -> Iterator[str]:
    """Remove the annotations that Headroom wrote on another pod, which this one is a copy of."""
    reserved = {
        key: None
        for key in sorted(draft.pod.metadata.annotations or ())
        if is_extender_annotation(key)
    }
    draft.unannotate(reserved.keys())
    for key in reserved:
        yield f"annotation {key} was removed: Headroom writes it when it places the pod"


def _default(draft: Draft, context: AdmissionContext) -> None:
    """Write the namespace's default; a default by container only for the pod's containers."""
    text, pod = context.namespace.default_vram, draft.pod
    if text is None or pod.annotation(VRAM) is not None:
        return
    request = understand(pod, text, context.rules)
    if not isinstance(request, VramRequest):
        return
    vram = parse_vram(text)
    if vram.by_container:
        asking = {ask.name for ask in request.containers}
        own = {name: a for name, a in vram.by_container.items() if name in asking}
        if not own:
            return
        text = render_vram(VramAnnotation(by_container=own))
    draft.annotate(VRAM, text)
    draft.annotate(VRAM_FROM, f"namespace {context.namespace.name}")


def _scheduler(draft: Draft, context: AdmissionContext) -> Iterator[str]:
    named = draft.pod.spec.scheduler_name or STOCK_SCHEDULER
    if named == STOCK_SCHEDULER and context.scheduler is not None and not draft.pod.node:
        draft.schedule(context.scheduler)
    elif not context.asks_headroom(named) and named != STOCK_SCHEDULER:
        yield (
            f"spec.schedulerName {named!r:.80}: this scheduler does not call Headroom, so the pod"
            f" may get a GPU without enough memory; set schedulerName: {context.wishes.scheduler}"
        )


def _prepare_for_nodes(
    draft: Draft, request: VramRequest, context: AdmissionContext
) -> Iterator[str]:
    share = share_wish(draft.pod, context.namespace)
    wish = gated_wish(draft.pod, context.namespace)
    resources = [ask.resource for ask in request.asks]
    candidates: list[GpuNode] = []
    if share is ShareWish.LIMIT or context.has_choice(draft.pod, resources):
        candidates = context.candidates(draft.pod, resources)
    _pin(draft, request, candidates, context.rules)
    if share is not ShareWish.NONE:
        _expose_share(draft, request)
    if share is ShareWish.LIMIT:
        yield from _limit(draft, request, candidates)
    if wish is not False:
        yield from _gate(draft, context, candidates, wished=wish is True)


# Pinned.


def _pin(draft: Draft, request: VramRequest, candidates: Sequence[GpuNode], rules: Rules) -> None:
    """Set the variable from the placement of a pod whose eligible nodes are all pinned.

    Any other node would reject the pod, and a scheduler that does not call Headroom would start it
    with an empty value, which hides every GPU.
    """
    resources = {ask.resource for ask in request.asks}
    first = next((ask for ask in request.containers if ask.index is not None), None)
    if len(resources) != 1 or first is None or not candidates:
        return
    if not all(_pins(candidate, *resources) for candidate in candidates):
        return
    asking = [*_asking(draft, request)]
    if any(_chooses(draft.container(where), rules) for where in asking):
        return
    for where in asking:
        if not _names(draft, where, VISIBLE_DEVICES):
            # An init container has no placement of its own: it uses that of the other containers.
            index = first.index if where.init else where.index
            draft.variable(where, following(VISIBLE_DEVICES, f"{DEVICES}{index}"))


def _pins(candidate: GpuNode, resource: str) -> bool:
    """Return whether the node is pinned and shares its devices.

    Devices that are not shared are never assigned with the variable.
    """
    devices = candidate.devices(resource)
    return (
        candidate.choice is DeviceChoice.PINNED
        and bool(devices)
        and all(device.sharing != "none" for device in devices)
    )


def _chooses(container: Container, rules: Rules) -> bool:
    """Return whether the container sets the variable to another value, or may do so."""
    if any(each.name == VISIBLE_DEVICES for each in container.env or ()):
        return not followed([container])
    return rules.suspect_env_from and bool(container.env_from)


# The share.


def _expose_share(draft: Draft, request: VramRequest) -> None:
    for where in _asking(draft, request):
        if where.init:
            continue
        for name, annotation in ((BYTES_VARIABLE, BYTES), (FRACTION_VARIABLE, FRACTION)):
            if not _names(draft, where, name):
                draft.variable(where, following(name, f"{annotation}{where.index}"))


def _limit(draft: Draft, request: VramRequest, candidates: Sequence[GpuNode]) -> Iterator[str]:
    held = False
    for where, asks in _asking(draft, request).items():
        if where.init:
            continue
        if (mib := cap_mib(asks, candidates)) is not None:
            held = True
            # If the user set one of them, the other could contradict it.
            if not any(_names(draft, where, name) for name in CAP_VARIABLES):
                for name in CAP_VARIABLES:
                    draft.variable(where, EnvVar(name=name, value=str(mib)))
        if (mib := mps_mib(asks, candidates, request.processes)) is not None:
            held = True
            if not _names(draft, where, MPS_VARIABLE):
                draft.variable(where, EnvVar(name=MPS_VARIABLE, value=f"0={mib}M"))
    if not held:
        yield UNLIMITED


# The in-tree mirror.


def _mirror(draft: Draft, request: VramRequest) -> Iterator[str]:
    for where, asks in _asking(draft, request).items():
        limits = draft.container(where).resources
        if limits and MIRROR in (limits.limits or {}):
            continue
        mib = mirrored_mib(asks)
        if mib is None:
            name = draft.container(where).name
            yield (
                f"container {name!r:.80} does not count as {MIRROR}: its memory depends on its"
                " device. Example of an amount: '8Gi'"
            )
            continue
        draft.limit(where, MIRROR, str(mib))


# The gate.


def _gate(
    draft: Draft, context: AdmissionContext, candidates: Sequence[GpuNode], wished: bool
) -> Iterator[str]:
    """Add the gate if an annotation sets it, or if the pod is eligible for a gated node.

    In the second case all its eligible nodes must have an agent: without one, a gate never opens.
    """
    gated = [each.node.metadata.name for each in candidates if each.choice is DeviceChoice.GATED]
    if not (wished or gated):
        return
    if not context.wishes.gate_image:
        if wished:
            yield f"the pod gets no gate: {NO_IMAGE}"
        else:
            yield f"the pod gets no gate, so gated nodes like {gated[0]} reject it: {NO_IMAGE}"
        return
    unreported = [each.node.metadata.name for each in candidates if each.status is None]
    if unreported and not wished:
        yield (
            f"the pod gets no gate, so gated nodes like {gated[0]} reject it: it is also eligible"
            f" for {unreported[0]}, which has no agent to open a gate; set a nodeSelector, or"
            f" {GATED}: 'true'"
        )
        return
    gate = gate_container(context.wishes.gate_image)
    for index, container in enumerate(draft.pod.spec.init_containers or ()):
        if container.name == GATE:
            # The gate must be exactly this container, and the first one, even if another webhook
            # or the user changed it.
            draft.replace_first(index, gate)
            return
    draft.first(gate)


# Containers.


def containers(pod: Pod) -> Iterator[Where]:
    for index in range(len(pod.spec.init_containers or ())):
        yield Where(True, index)
    for index in range(len(pod.spec.containers or ())):
        yield Where(False, index)


def _asking(draft: Draft, request: VramRequest) -> dict[Where, list[ContainerAsk]]:
    """Return the containers that request GPUs, with their requests.

    Placements are recorded only for containers that are not init containers.
    """
    asks_of: dict[tuple[int | None, str], list[ContainerAsk]] = {}
    for ask in request.containers:
        asks_of.setdefault((ask.index, ask.name), []).append(ask)
    found: dict[Where, list[ContainerAsk]] = {}
    for where in containers(draft.pod):
        index = None if where.init else where.index
        if asks := asks_of.get((index, draft.container(where).name)):
            found[where] = asks
    return found


def _names(draft: Draft, where: Where, variable: str) -> bool:
    return any(each.name == variable for each in draft.container(where).env or ())
