"""Changes GPU pods when they are created, so that later decisions need only the pod.

The steps, in this order:

1. Remove annotations that only extenders may write.
2. Write the namespace's default as the pod's annotation, and record its origin. Write the
   namespace's limit as the pod's annotation.
3. Set the scheduler that calls Headroom, if the pod names none.
4. Add the extended resources of the in-tree mirror and of quotas.
5. For pods that Headroom places, add the variables that expose and limit the share, and the gate.

The steps never change a field that a user set, except for what quotas count, and they are
idempotent. The API server may call the webhook again if another webhook has added containers. Then
the added containers are handled too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from headroom.contract.annotations import (
    BYTES,
    FRACTION,
    GATED,
    LIMIT_BYTES,
    LIMIT_FRACTION,
    MIRROR,
    SHARE,
    VRAM,
    VRAM_FROM,
    Bytes,
    DeviceChoice,
    ShareMode,
    VramAnnotation,
    is_extender_annotation,
    parse_vram,
    render_vram,
)
from headroom.contract.gate import GATE, GATE_RESOURCES, PORT, gate_container
from headroom.contract.kube import EnvVar, Pod
from headroom.contract.pod_limits import exceeded
from headroom.contract.quantity import format_bytes
from headroom.core.placement.request import ContainerAsk, VramRequest, asks_for_gpu, understand
from headroom.core.rules.pod_requests import amount, larger, spec_requests
from headroom.webhook.automatic import replace_auto
from headroom.webhook.context import STOCK_SCHEDULER, AdmissionContext, GpuNode
from headroom.webhook.counted_vram import count, declared_amount
from headroom.webhook.json_patch import Draft, Operation, Where, following
from headroom.webhook.mib import cap_mib, mirrored_mib, mps_mib
from headroom.webhook.namespace_limits import write_limit

BYTES_VARIABLE = "HEADROOM_VRAM_BYTES"
FRACTION_VARIABLE = "HEADROOM_VRAM_FRACTION"
LIMIT_VARIABLES = (
    ("HEADROOM_VRAM_LIMIT_BYTES", LIMIT_BYTES),
    ("HEADROOM_VRAM_LIMIT_FRACTION", LIMIT_FRACTION),
)
#: Variables in MiB that a hook of the container toolkit reads. The driver rejects allocations above
#: the limit, and does not evict memory below the request.
CAP_VARIABLES = ("NVIDIA_GPU_MEMORY_LIMIT", "NVIDIA_GPU_MEMORY_REQUEST")
MPS_VARIABLE = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"

_UNLIMITED = f"{SHARE} is limit, but nothing can limit the pod: "
NO_AMOUNT = f"{_UNLIMITED}it needs an amount, for example '8Gi' (docs/how-to/limit-memory.md)"
NOT_ENFORCED = (
    f"{_UNLIMITED}not every eligible node can enforce it; set a nodeSelector "
    "(docs/how-to/limit-memory.md)"
)
#: Maximum CPU and memory of the gate. The CPU manager would assign whole cores to the gate, and so
#: choose a NUMA node before the GPU is chosen.
_MOST_CPU, _MOST_MEMORY_BYTES = Decimal("0.5"), Decimal(1 << 30)
#: Annotations of Istio and Linkerd with the outbound ports that bypass the proxy. The gate's port
#: must bypass it, because their CNI plugins redirect connections before the proxy starts, and the
#: proxy starts after the gate.
_SKIPPED_PORTS = (
    "traffic.sidecar.istio.io/excludeOutboundPorts",
    "config.linkerd.io/skip-outbound-ports",
)
NO_IMAGE = (
    "the gate has no image; ask your administrator to set gate_image in Headroom's settings to the "
    "agent's image"
)


@dataclass(frozen=True, slots=True)
class Mutated:
    """The patch of a pod."""

    operations: tuple[Operation, ...] = ()
    #: Warnings for the user who creates the pod about unexpected changes and failed steps.
    warnings: tuple[str, ...] = ()
    #: The changed pod, or None if there are no changes.
    pod: Pod | None = None


def mutate(pod: Pod, context: AdmissionContext) -> Mutated:
    """Return the changes to a pod that is being created.

    It raises no errors. The caller validates the changed pod, and validation rejects values that
    cannot be read or counted.
    """
    if context.is_static(pod) or not asks_for_gpu(pod, context.rules):
        return Mutated()
    if exceeded(pod):
        return Mutated()
    draft = Draft(pod)
    warnings = [*_remove_extender_annotations(draft)]
    _replace_gates(draft, context)
    _default(draft, context)
    warnings += replace_auto(draft, context)
    warnings += _scheduler(draft, context)
    request = understand(draft.pod, context.namespace.default_vram, context.rules)
    if isinstance(request, VramRequest) and write_limit(draft, request, context):
        request = understand(draft.pod, context.namespace.default_vram, context.rules)
    placed = not pod.node and context.asks_headroom(draft.pod.spec.scheduler_name)
    if isinstance(request, VramRequest):
        if context.settings.mirror:
            warnings += _mirror(draft, request)
        if context.settings.counts:
            count(draft, _gpu_containers(draft, request), context)
        if placed and not context.settings.observes:
            warnings += _prepare_for_nodes(draft, request, context)
    return Mutated(tuple(draft.operations), tuple(warnings), draft.pod)


def mutate_template(pod: Pod, context: AdmissionContext) -> Mutated:
    """Return the changes to a Job that waits in a queue of Kueue. ``pod`` is built from the
    template of the Job.

    Kueue counts the requests of the template before any pod exists. So the template gets the
    request that its pods will have in quotas, from the namespace's default or the current
    recommendation.
    """
    if not context.settings.counts or not asks_for_gpu(pod, context.rules) or exceeded(pod):
        return Mutated()
    expected = Draft(pod)
    _default(expected, context)
    warnings = tuple(replace_auto(expected, context))
    request = understand(expected.pod, context.namespace.default_vram, context.rules)
    draft = Draft(pod, root="/spec/template")
    if isinstance(request, VramRequest):
        count(draft, _gpu_containers(draft, request), context)
    return Mutated(tuple(draft.operations), warnings)


def _remove_extender_annotations(draft: Draft) -> Iterator[str]:
    """Remove annotations that only extenders may write, and yield a warning for each.

    A pod has them if its manifest was copied from a pod that Headroom placed.
    """
    keys = [
        key for key in sorted(draft.pod.metadata.annotations or ()) if is_extender_annotation(key)
    ]
    draft.unannotate(keys)
    for key in keys:
        yield f"annotation {key} was removed: Headroom writes it when it places the pod"


def _default(draft: Draft, context: AdmissionContext) -> None:
    """Write the namespace's default amount on a pod without an amount.

    If the default has an amount per container, only the entries for the pod's GPU containers are
    written.
    """
    text, pod = context.namespace.default_vram, draft.pod
    if text is None or pod.annotation(VRAM) is not None:
        return
    request = understand(pod, text, context.rules)
    if not isinstance(request, VramRequest):
        return
    vram = parse_vram(text)
    if vram.by_container:
        containers = {ask.name for ask in request.containers}
        own = {name: a for name, a in vram.by_container.items() if name in containers}
        if not own:
            return
        text = render_vram(VramAnnotation(by_container=own))
    draft.annotate(VRAM, text)
    draft.annotate(VRAM_FROM, f"namespace {context.namespace.name}")


def _scheduler(draft: Draft, context: AdmissionContext) -> Iterator[str]:
    """Set the scheduler of a pod without a scheduler. Warn if the pod's scheduler does not call
    Headroom."""
    named = draft.pod.spec.scheduler_name or STOCK_SCHEDULER
    if named == STOCK_SCHEDULER and context.scheduler is not None and not draft.pod.node:
        draft.schedule(context.scheduler)
    elif not context.asks_headroom(named) and named != STOCK_SCHEDULER:
        yield (
            f"spec.schedulerName {named!r:.80}: this scheduler does not call Headroom, so the pod"
            f" may get a GPU without enough memory; set schedulerName: {context.settings.scheduler}"
        )


def _prepare_for_nodes(
    draft: Draft, request: VramRequest, context: AdmissionContext
) -> Iterator[str]:
    share, gated = context.share_mode(draft.pod), context.gate_option(draft.pod)
    resources = [ask.resource for ask in request.asks]
    candidates: list[GpuNode] = []
    if share is ShareMode.LIMIT or context.has_gated_node(draft.pod, resources):
        candidates = context.candidates(draft.pod, resources)
    if share is not ShareMode.NONE:
        _expose_share(draft, request)
    if share is ShareMode.LIMIT:
        yield from _limit(draft, request, candidates)
    if gated is not False:
        yield from _gate(draft, context, candidates, requested=gated is True)


# The share.


def _expose_share(draft: Draft, request: VramRequest) -> None:
    for where, requests in _gpu_containers(draft, request).items():
        if where.init:
            continue
        variables = [(BYTES_VARIABLE, BYTES), (FRACTION_VARIABLE, FRACTION)]
        if any(each.limit is not None for each in requests):
            variables += LIMIT_VARIABLES
        for name, annotation in variables:
            if not _has_variable(draft, where, name):
                draft.variable(where, following(name, f"{annotation}{where.index}"))


def _limit(draft: Draft, request: VramRequest, candidates: Sequence[GpuNode]) -> Iterator[str]:
    is_limited = False
    for where, requests in _gpu_containers(draft, request).items():
        if where.init:
            continue
        if (caps := cap_mib(requests, candidates)) is not None:
            is_limited = True
            # If the user has set one of the variables, the other could contradict it.
            if not any(_has_variable(draft, where, name) for name in CAP_VARIABLES):
                for name, cap in zip(CAP_VARIABLES, caps, strict=True):
                    draft.variable(where, EnvVar(name=name, value=str(cap)))
        if (mib := mps_mib(requests, candidates, request.processes)) is not None:
            is_limited = True
            if not _has_variable(draft, where, MPS_VARIABLE):
                draft.variable(where, EnvVar(name=MPS_VARIABLE, value=f"0={mib}M"))
    if not is_limited:
        asks = [ask for found in _gpu_containers(draft, request).values() for ask in found]
        amounts = [each for ask in asks for each in (ask.amount, ask.limit) if each is not None]
        yield NOT_ENFORCED if all(isinstance(each, Bytes) for each in amounts) else NO_AMOUNT


# The in-tree mirror.


def _mirror(draft: Draft, request: VramRequest) -> Iterator[str]:
    for where, requests in _gpu_containers(draft, request).items():
        declared = declared_amount(draft.container(where), MIRROR)
        mib = mirrored_mib(requests)
        if mib is None:
            if declared:
                continue
            name = draft.container(where).name
            yield (
                f"container {name!r:.80} does not count as {MIRROR}: its memory depends on its"
                " device. Example of an amount: '8Gi'"
            )
            continue
        if declared != mib:
            draft.limit(where, MIRROR, str(mib))


# The gate.


def _gate(
    draft: Draft, context: AdmissionContext, candidates: Sequence[GpuNode], requested: bool
) -> Iterator[str]:
    """Add the gate if an annotation sets it, or if the pod is eligible for a gated node.

    In the second case, all eligible nodes must have an agent, because a gate never opens without
    one.
    """
    gated = [each.node.metadata.name for each in candidates if each.choice is DeviceChoice.GATED]
    if not (requested or gated):
        return
    if not context.settings.gate_image:
        if requested:
            yield f"the pod gets no gate: {NO_IMAGE}"
        else:
            yield f"the pod gets no gate, so gated nodes like {gated[0]} reject it: {NO_IMAGE}"
        return
    unreported = [each.node.metadata.name for each in candidates if each.status is None]
    if unreported and not requested:
        yield (
            f"the pod gets no gate, so gated nodes like {gated[0]} reject it: it is also eligible"
            f" for {unreported[0]}, which has no agent to open a gate; set a nodeSelector, or"
            f" {GATED}: 'true'"
        )
        return
    if not any(each.name == GATE for each in draft.pod.spec.init_containers or ()):
        draft.first(_gate_beside(draft.pod, context))
    for key in _SKIPPED_PORTS:
        ports = [each for each in (draft.pod.annotation(key) or "").split(",") if each.strip()]
        if str(PORT) not in ports:
            draft.annotate(key, ",".join([*ports, str(PORT)]))


def _replace_gates(draft: Draft, context: AdmissionContext) -> None:
    """Replace an init container with the gate's name by the webhook's own gate, and make it the
    first init container.

    So neither a user nor another webhook can create a container that counts as the gate.
    """
    init = draft.pod.spec.init_containers or ()
    found = next((index for index, each in enumerate(init) if each.name == GATE), None)
    if found is not None and context.settings.gate_image:
        draft.replace_first(found, _gate_beside(draft.pod, context))


def _gate_beside(pod: Pod, context: AdmissionContext) -> dict[str, Any]:
    """Return the gate, which requests as much CPU, memory and storage as the other containers, up
    to a maximum.

    So a LimitRange that accepts the other containers accepts the gate too. The pod as a whole
    requests no more than before, because the gate ends before the other containers start.
    """
    requests = {name: amount(quantity) for name, quantity in GATE_RESOURCES.items()}
    for each in (*(pod.spec.init_containers or ()), *(pod.spec.containers or ())):
        if each.name != GATE:
            requests = larger(requests, spec_requests(each))
    resources = {
        "cpu": f"{int(min(requests['cpu'], _MOST_CPU) * 1000)}m",
        "memory": format_bytes(int(min(requests["memory"], _MOST_MEMORY_BYTES))),
    }
    if storage_bytes := int(requests.get("ephemeral-storage", 0)):
        resources["ephemeral-storage"] = format_bytes(storage_bytes)
    return gate_container(context.settings.gate_image, resources)


# Containers.


def _gpu_containers(draft: Draft, request: VramRequest) -> dict[Where, list[ContainerAsk]]:
    """Return the containers that request GPUs, with their requests.

    Requests of init containers have no index, because their placements are not recorded.
    """
    requests_of: dict[tuple[int | None, str], list[ContainerAsk]] = {}
    for ask in request.containers:
        requests_of.setdefault((ask.index, ask.name), []).append(ask)
    init, main = draft.pod.spec.init_containers or (), draft.pod.spec.containers or ()
    named: dict[Where, tuple[int | None, str]] = {
        Where(True, index): (None, each.name) for index, each in enumerate(init)
    }
    named |= {Where(False, index): (index, each.name) for index, each in enumerate(main)}
    return {where: requests_of[name] for where, name in named.items() if name in requests_of}


def _has_variable(draft: Draft, where: Where, variable: str) -> bool:
    return any(each.name == variable for each in draft.container(where).env or ())
