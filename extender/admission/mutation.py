"""What is written onto a pod when it is created, so that all else can be decided by the pod alone.

In this order, each where the pod asks for GPUs of ours: annotations go that only extenders write;
the default of its namespace is written down, with where it is from; a pod that names no scheduler
is given the one that asks Headroom. The rest is for pods that Headroom will place: the variable of
pinned nodes, variables that tell of the share and hold the container to it, the extended resource
of the in-tree mirror, the gate.

Nothing is changed that a user set. Done again, nothing changes: other webhooks may have added
containers in between, and then these are looked at as well.
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
#: Read by a hook of the container toolkit, in MiB: beyond the one the driver refuses, below the
#: other it does not evict.
CAP_VARIABLES = ("NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST")
MPS_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"

UNLIMITED = (
    f"{SHARE} is limit, and nothing holds the pod to its share: a limit takes an amount, for"
    " example '8Gi', and that every node it could go to can keep one (docs/admission.md)"
)
NO_IMAGE = "the gate has no image; right is gate_image in Headroom's settings: that of the agent"


@dataclass(frozen=True, slots=True)
class Mutated:
    operations: tuple[Operation, ...] = ()
    #: For whoever creates the pod: what was changed that they may not expect, or could not be done.
    warnings: tuple[str, ...] = ()


def mutate(pod: Pod, around: AdmissionContext) -> Mutated:
    """The changes to a pod that is being created. Raises nothing: what cannot be read is left to
    validation, which says why."""
    if not asks_for_gpu(pod, around.rules) or around.is_static(pod):
        return Mutated()
    if exceeded(pod):  # validation rejects it, and says why
        return Mutated()
    draft = Draft(pod)
    warnings = [*_without_ours(draft)]
    _default(draft, around)
    warnings += _scheduler(draft, around)
    request = understand(draft.pod, around.namespace.default_vram, around.rules)
    placed = not pod.node and around.asks_us(draft.pod.spec.scheduler_name)
    if isinstance(request, VramRequest):
        if around.wishes.mirror:
            warnings += _mirror(draft, request)
        if placed and not around.wishes.observes:
            warnings += _for_its_place(draft, request, around)
    return Mutated(tuple(draft.operations), tuple(warnings))


def _without_ours(draft: Draft) -> Iterator[str]:
    """Of a pod that was copied, with what had been written on the other one."""
    theirs = {
        key: None
        for key in sorted(draft.pod.metadata.annotations or ())
        if is_extender_annotation(key)
    }
    draft.unannotate(theirs.keys())
    for key in theirs:
        yield f"annotation {key} was removed: Headroom writes it when it places the pod"


def _default(draft: Draft, around: AdmissionContext) -> None:
    """A default by container is written for those that the pod has."""
    text, pod = around.namespace.default_vram, draft.pod
    if text is None or pod.annotation(VRAM) is not None:
        return
    request = understand(pod, text, around.rules)
    if not isinstance(request, VramRequest):
        return
    vram = parse_vram(text)
    if vram.by_container:
        asking = {ask.name for ask in request.containers}
        meant = {name: a for name, a in vram.by_container.items() if name in asking}
        if not meant:
            return
        text = render_vram(VramAnnotation(by_container=meant))
    draft.annotate(VRAM, text)
    draft.annotate(VRAM_FROM, f"namespace {around.namespace.name}")


def _scheduler(draft: Draft, around: AdmissionContext) -> Iterator[str]:
    named = draft.pod.spec.scheduler_name or STOCK_SCHEDULER
    if named == STOCK_SCHEDULER and around.scheduler is not None and not draft.pod.node:
        draft.schedule(around.scheduler)
    elif not around.asks_us(named) and named != STOCK_SCHEDULER:
        yield (
            f"spec.schedulerName {named!r:.80}: this scheduler does not ask Headroom, which charges"
            f" the pod where it ends, with or without room; right is {around.wishes.scheduler!r}"
        )


def _for_its_place(draft: Draft, request: VramRequest, around: AdmissionContext) -> Iterator[str]:
    share = share_wish(draft.pod, around.namespace)
    wish = gated_wish(draft.pod, around.namespace)
    resources = [ask.resource for ask in request.asks]
    places: list[GpuNode] = []
    if share is ShareWish.LIMIT or around.has_choice(draft.pod, resources):
        places = around.places(draft.pod, resources)
    _pin(draft, request, places, around.rules)
    if share is not ShareWish.NONE:
        _tell_share(draft, request)
    if share is ShareWish.LIMIT:
        yield from _limit(draft, request, places)
    if wish is not False:
        yield from _gate(draft, around, places, wished=wish is True)


# Pinned.


def _pin(draft: Draft, request: VramRequest, places: Sequence[GpuNode], rules: Rules) -> None:
    """Let the variable follow the placement of a pod that can go to pinned nodes alone.

    On any other node it would be refused, and a scheduler that does not ask us would start it with
    an empty value, which hides every GPU.
    """
    resources = {ask.resource for ask in request.asks}
    first = next((ask for ask in request.containers if ask.index is not None), None)
    if len(resources) != 1 or first is None or not places:
        return
    if not all(_pins(place, *resources) for place in places):
        return
    asking = [*_asking(draft, request)]
    if any(_chooses(draft.container(where), rules) for where in asking):
        return
    for where in asking:
        if not _names(draft, where, VISIBLE_DEVICES):
            # An init container has no placement of its own: it is where the others will be.
            index = first.index if where.init else where.index
            draft.variable(where, following(VISIBLE_DEVICES, f"{DEVICES}{index}"))


def _pins(place: GpuNode, resource: str) -> bool:
    """Devices that one pod has to itself are not given out by the variable."""
    devices = place.devices(resource)
    return (
        place.choice is DeviceChoice.PINNED
        and bool(devices)
        and all(device.sharing != "none" for device in devices)
    )


def _chooses(container: Container, rules: Rules) -> bool:
    """Whether its author set the variable otherwise, or may have."""
    if any(each.name == VISIBLE_DEVICES for each in container.env or ()):
        return not followed([container])
    return rules.suspect_env_from and bool(container.env_from)


# Who knows and keeps their share.


def _tell_share(draft: Draft, request: VramRequest) -> None:
    for where in _asking(draft, request):
        if where.init:
            continue
        for name, annotation in ((BYTES_VARIABLE, BYTES), (FRACTION_VARIABLE, FRACTION)):
            if not _names(draft, where, name):
                draft.variable(where, following(name, f"{annotation}{where.index}"))


def _limit(draft: Draft, request: VramRequest, places: Sequence[GpuNode]) -> Iterator[str]:
    held = False
    for where, asks in _asking(draft, request).items():
        if where.init:
            continue
        if (mib := cap_mib(asks, places)) is not None:
            held = True
            # Beside one of the user's the other could say that it is evicted before it is full.
            if not any(_names(draft, where, name) for name in CAP_VARIABLES):
                for name in CAP_VARIABLES:
                    draft.variable(where, EnvVar(name=name, value=str(mib)))
        if (mib := mps_mib(asks, places, request.processes)) is not None:
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
                f"container {name!r:.80} is not counted as {MIRROR}: how much it takes is known"
                " when its device is; right is an amount, for example '8Gi'"
            )
            continue
        draft.limit(where, MIRROR, str(mib))


# The gate.


def _gate(
    draft: Draft, around: AdmissionContext, places: Sequence[GpuNode], wished: bool
) -> Iterator[str]:
    """Where the pod or its namespace wishes it, and where the pod could go to a gated node, all
    others it could go to having an agent too: without one a gate never opens."""
    gated = [place.node.metadata.name for place in places if place.choice is DeviceChoice.GATED]
    if not (wished or gated):
        return
    if not around.wishes.gate_image:
        if wished:
            yield f"the pod gets no gate: {NO_IMAGE}"
        else:
            yield f"the pod gets no gate and is refused by gated nodes, as {gated[0]}: {NO_IMAGE}"
        return
    silent = [place.node.metadata.name for place in places if place.status is None]
    if silent and not wished:
        yield (
            f"the pod gets no gate and is refused by gated nodes, as {gated[0]}: it could go to"
            f" {silent[0]}, too, where no agent reports and no gate would open; right is a"
            f" nodeSelector, or {GATED}: 'true'"
        )
        return
    gate = gate_container(around.wishes.gate_image)
    for index, container in enumerate(draft.pod.spec.init_containers or ()):
        if container.name == GATE:
            # Whatever its author or others made of it: a gate is this container whole, and first.
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
    """The containers that request GPUs, with what they request. Only the placement of those that
    are not init containers is written down."""
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
