"""Parses the GPU request of a pod into bytes per device and replicas per resource.

A pod's containers do not all run at the same time. Native sidecars run beside the app containers.
An ordinary init container runs beside the sidecars that were started before it, and later
containers reuse its devices. So a request for one resource has *phases*, each of which is a set of
containers that hold GPUs at the same time. A pod never takes more of one device than its largest
phase.
"""

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice

import msgspec

from headroom.contract.annotations import (
    DEFAULT_VRAM,
    MAX_SM,
    ON_OVERUSE,
    POLICY,
    PPM,
    PROCESSES,
    STARTUP,
    STARTUP_TIMEOUT,
    STARTUP_TIMEOUT_S,
    VRAM,
    VRAM_FROM,
    VRAM_LIMIT,
    Amount,
    Bytes,
    ReplicaShare,
    ScoringPolicy,
    Share,
    VramAnnotation,
    parse_max_sm,
    parse_on_overuse,
    parse_policy,
    parse_processes,
    parse_startup,
    parse_startup_timeout,
    parse_vram,
    render_amount,
)
from headroom.contract.decision import decision_id
from headroom.contract.errors import BadAnnotation, BadQuantity, shortened
from headroom.contract.gate import is_gated
from headroom.contract.kube import Container, Pod
from headroom.contract.pod_limits import exceeded
from headroom.contract.quantity import implausible, parse_bytes
from headroom.contract.reasons import Reason
from headroom.contract.vram_limit import compared, parse_vram_limit
from headroom.core.placement.policy import Rules
from headroom.core.placement.visible_devices import Visible, visible

#: Maximum number of replicas that a container may request. No node has more.
MAX_COUNT = 1 << 16
#: The amount of a container that requests all allocatable memory of a device.
WHOLE = Share(PPM)


@dataclass(frozen=True, slots=True)
class ContainerAsk:
    """One GPU container, which requests ``count`` replicas of ``resource`` and ``amount`` of VRAM
    on each device."""

    #: Index among the pod's app containers, or None for an init container.
    index: int | None
    name: str
    resource: str
    count: int
    amount: Amount
    #: The source of the amount, which is "annotation", "namespace", "recommendation" or "replica".
    source: str
    #: Maximum VRAM that it may use on each device, or None if it has no limit.
    limit: Bytes | Share | None = None

    @property
    def amount_text(self) -> str:
        """The amount as users write it, or "1 replica" without an annotation."""
        return "1 replica" if isinstance(self.amount, ReplicaShare) else render_amount(self.amount)

    @property
    def limit_text(self) -> str:
        """The limit as users write it, or an empty string without a limit."""
        return render_amount(self.limit) if self.limit is not None else ""


class MemoryClass(Enum):
    """The class of a pod by its limit, like Kubernetes' classes of quality of service."""

    #: Its limit equals its request.
    GUARANTEED = "guaranteed"
    #: Its limit is higher than its request.
    BURSTABLE = "burstable"
    #: It has no limit.
    UNLIMITED = "unlimited"


class Portion(msgspec.Struct, frozen=True, gc=False):
    """One container of a phase, which takes ``amount`` on each device of its ``count`` replicas."""

    amount: Amount
    count: int


class Ask(msgspec.Struct, frozen=True, gc=False):
    """A pod's request for one resource."""

    resource: str
    #: Maximum number of replicas that the pod holds at the same time.
    count: int
    #: Maximum number of replicas that one container of the pod holds.
    widest: int
    #: Each phase is a tuple of portions that may all be on one shared device at the same time.
    phases: tuple[tuple[Portion, ...], ...]

    @property
    def most_on_device(self) -> int:
        """Maximum number of replicas of one device that the pod holds at the same time, if each
        container gets different devices."""
        return max(len(phase) for phase in self.phases)

    @property
    def takes_whole_devices(self) -> bool:
        """Whether a container requests all memory of a device, so that it must be alone there."""
        return any(portion.amount == WHOLE for phase in self.phases for portion in phase)


@dataclass(frozen=True, slots=True)
class VramRequest:
    """The parsed request of a pod. If ``asks`` is empty, the pod requests no GPU that Headroom
    manages."""

    uid: str
    resource_version: str
    namespace: str
    name: str
    containers: tuple[ContainerAsk, ...]
    asks: tuple[Ask, ...]
    policy: ScoringPolicy
    #: Limit of a device's SM activity in parts per million, or None if there is no limit.
    max_sm_ppm: int | None
    #: Number of processes per container, for MPS.
    processes: int
    #: The source that decides which devices the pod sees, on nodes that honor the variable
    #: NVIDIA_VISIBLE_DEVICES.
    visible: Visible = Visible.BY_PLUGIN
    #: Whether the pod has a gate, which lets it start only on a device with enough free memory.
    gated: bool = False
    #: The VRAM annotation of the pod, or None if it has none.
    annotated: str | None = None
    #: Number of seconds after which its start times out if it starts alone. Otherwise 0.
    start_timeout_s: int = 0
    #: Whether it may go to nodes on which kube-scheduler allocates its GPUs by DRA.
    may_use_dra: bool = False
    #: ``asks`` with the limits of the containers instead of their amounts. Empty without a limit.
    limit_asks: tuple[Ask, ...] = ()

    @property
    def memory_class(self) -> "MemoryClass":
        """The class of the pod, which docs/how-to/bursts.md explains."""
        if not self.limit_asks:
            return MemoryClass.UNLIMITED
        is_guaranteed = all(ask.limit == ask.amount for ask in self.containers)
        return MemoryClass.GUARANTEED if is_guaranteed else MemoryClass.BURSTABLE

    @property
    def starts_alone(self) -> bool:
        """Whether the pod fits only on devices where no other such pod is starting."""
        return self.start_timeout_s > 0

    @property
    def kind(self) -> "Kind":
        """All values of the request on which fit and score depend.

        Requests of the same kind have equal verdicts and scores. Only the choice between nodes with
        equal scores can differ.
        """
        return (
            *(self.asks, self.policy, self.max_sm_ppm, self.processes),
            *(self.visible, self.gated, self.starts_alone, self.may_use_dra),
        )

    @property
    def decision_id(self) -> str:
        """The decision id, which is the same on every replica and in every verb."""
        return decision_id(self.uid, self.resource_version)


Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Why the request of a pod cannot be parsed or is not accepted. Such a pod fits on no node.

    ``message`` is a sentence for the author of the pod.
    """

    reason: Reason
    message: str


_REASON_OF_KEY = {
    VRAM: Reason.BAD_VRAM,
    VRAM_LIMIT: Reason.BAD_VRAM_LIMIT,
    DEFAULT_VRAM: Reason.BAD_DEFAULT_VRAM,
    POLICY: Reason.BAD_POLICY,
    MAX_SM: Reason.BAD_MAX_SM,
    PROCESSES: Reason.BAD_PROCESSES,
    ON_OVERUSE: Reason.BAD_ON_OVERUSE,
    STARTUP: Reason.BAD_STARTUP,
    STARTUP_TIMEOUT: Reason.BAD_STARTUP_TIMEOUT,
}


def understand(
    pod: Pod, default_vram: str | None, rules: Rules, *, enforce_limits: bool = True
) -> VramRequest | Unreadable:
    """Parse the GPU request of ``pod``. Return ``Unreadable`` if it is not valid. Raises nothing.

    ``default_vram`` is the annotation ``headroom.gpu/default-vram`` of the namespace, or None if
    the namespace has no such annotation. Pods that exceed ``contract.pod_limits`` are unreadable,
    unless ``enforce_limits`` is False. A pod that requests no GPU that Headroom manages is never
    unreadable, whatever annotations it has.
    """
    try:
        gpu_containers = _gpu_containers(pod, rules)
        found = [*islice(gpu_containers, 1)]
        # Check this before parsing the other containers, because a pod can have thousands of them.
        if enforce_limits and found and (too_much := exceeded(pod)):
            return Unreadable(Reason.POD_TOO_LARGE, too_much)
        found += gpu_containers
    except BadQuantity as err:
        return Unreadable(Reason.BAD_POD, str(err))
    try:
        annotations = pod.metadata.annotations or {}
        relevant = annotations if found else {}
        policy, max_sm = relevant.get(POLICY), relevant.get(MAX_SM)
        if (on_overuse := relevant.get(ON_OVERUSE)) is not None:
            parse_on_overuse(on_overuse)
        annotated_processes = relevant.get(PROCESSES)
        processes = 1 if annotated_processes is None else parse_processes(annotated_processes)
        containers = _container_asks(relevant, found, default_vram, processes)
        containers = _limited(relevant, containers)
        if rules.reject_unannotated and any(ask.source == "replica" for ask in containers):
            return Unreadable(
                Reason.UNANNOTATED,
                f"pod asks for a GPU without annotation {VRAM}. Example: {VRAM}: 8Gi",
            )
        return VramRequest(
            uid=pod.metadata.uid,
            resource_version=pod.metadata.resource_version,
            namespace=pod.metadata.namespace,
            name=pod.metadata.name,
            containers=containers,
            asks=_asks(pod, containers),
            policy=rules.policy if policy is None else parse_policy(policy),
            max_sm_ppm=None if max_sm is None else parse_max_sm(max_sm),
            processes=processes,
            visible=_visible(pod, containers, rules),
            gated=is_gated(pod, rules.gate_image),
            annotated=annotations.get(VRAM),
            start_timeout_s=_start_timeout_s(relevant, rules),
            limit_asks=_limit_asks(pod, containers),
        )
    except BadAnnotation as err:
        return Unreadable(_REASON_OF_KEY[err.key], str(err))


def _start_timeout_s(annotations: Mapping[str, str], rules: Rules) -> int:
    """Return ``VramRequest.start_timeout_s``. Raises ``BadAnnotation``."""
    text = annotations.get(STARTUP_TIMEOUT)
    timeout_s = STARTUP_TIMEOUT_S if text is None else parse_startup_timeout(text)
    if (startup := annotations.get(STARTUP)) is None:
        return 0
    parse_startup(startup)
    return min(timeout_s, rules.max_startup_timeout_s)


def _visible(pod: Pod, asks: Sequence[ContainerAsk], rules: Rules) -> Visible:
    """Return the source that decides which devices the pod sees. Reject it if the resource is
    ambiguous."""
    found = visible([*(pod.spec.init_containers or ()), *(pod.spec.containers or ())], rules)
    # If there are several resources, it is unknown to which of them a device in the variable
    # belongs.
    several = len({ask.resource for ask in asks}) > 1
    return Visible.REJECTED if several and found is not Visible.BY_PLUGIN else found


def replicas_requested(pod: Pod, rules: Rules) -> dict[str, int]:
    """Return the sum of the replicas that all containers request by resource, at most
    ``MAX_COUNT``.

    A count that cannot be parsed counts as 1. The time is linear in the pod's size.
    """
    total: dict[str, int] = {}
    for _, container in _containers(pod):
        for resource, quantity in _requested(container).items():
            if rules.manages(resource):
                try:
                    count = _count(resource, quantity)
                except BadQuantity:
                    count = 1
                total[resource] = min(total.get(resource, 0) + count, MAX_COUNT)
    return {resource: count for resource, count in total.items() if count}


def asks_for_gpu(pod: Pod, rules: Rules) -> bool:
    """Return whether the pod requests a GPU that Headroom manages.

    Return True if a count cannot be parsed, because Headroom must reject such a pod.
    """
    try:
        return next(_gpu_containers(pod, rules), None) is not None
    except BadQuantity:
        return True


@dataclass(frozen=True, slots=True)
class _GpuContainer:
    """The replicas of one resource that a container requests, with the fields of
    ``ContainerAsk``."""

    index: int | None
    name: str
    resource: str
    count: int


def _gpu_containers(pod: Pod, rules: Rules) -> Iterator[_GpuContainer]:
    """Yield containers with managed resources, init containers first. Raises ``BadQuantity``."""
    return (
        _GpuContainer(index, container.name, resource, count)
        for index, container in _containers(pod)
        for resource, quantity in _requested(container).items()
        if rules.manages(resource) and (count := _count(resource, quantity))
    )


def _containers(pod: Pod) -> list[tuple[int | None, Container]]:
    """Return all containers, init containers first, with the index of each app container."""
    return [
        *((None, container) for container in pod.spec.init_containers or ()),
        *enumerate(pod.spec.containers or ()),
    ]


def _requested(container: Container) -> Mapping[str, str | int]:
    if container.resources is None:
        return {}
    # For extended resources the request equals the limit, and users often omit it.
    return {**(container.resources.limits or {}), **(container.resources.requests or {})}


def _count(resource: str, quantity: str | int) -> int:
    """Return the number of replicas. Raises ``BadQuantity`` if it is not a valid count."""
    try:
        count = parse_bytes(str(quantity))
    except BadQuantity as err:
        raise BadQuantity(f"{resource}: {quantity}", err.why) from err
    if not 0 <= count <= MAX_COUNT:
        raise BadQuantity(f"{resource}: {quantity}", f"a count is from 0 to {MAX_COUNT}")
    return count


def _container_asks(
    annotations: Mapping[str, str],
    found: Sequence[_GpuContainer],
    default_vram: str | None,
    processes: int,
) -> tuple[ContainerAsk, ...]:
    """Return the containers with their amounts.

    The amount comes from the pod's annotation, otherwise from the namespace's default, otherwise it
    is the share of a replica. An invalid default does not affect pods that have an annotation.

    Raises ``BadAnnotation``, also if the annotation names a container without a GPU. This is
    probably a typo, which would leave the intended container without an amount.
    """
    if not found:
        return ()
    own, vram, origin = annotations.get(VRAM), None, "namespace"
    if own is not None:
        vram = parse_vram(own)
        origin = _origin(annotations.get(VRAM_FROM, ""))
        _check_names(VRAM, own, vram, {container.name for container in found})
    elif default_vram is not None:
        vram = parse_vram(default_vram, DEFAULT_VRAM)
    asks: list[ContainerAsk] = []
    for each in found:
        amount: Amount | None = None if vram is None else vram.of(each.name)
        source = origin
        if amount is None:
            amount, source = ReplicaShare(processes), "replica"
        asks.append(ContainerAsk(each.index, each.name, each.resource, each.count, amount, source))
    return tuple(asks)


def _check_names(key: str, text: str, vram: VramAnnotation, names: Set[str]) -> None:
    """Raise ``BadAnnotation`` if the annotation names a container that requests no GPU."""
    if unknown := [name for name in vram.by_container if name not in names]:
        raise BadAnnotation(
            key,
            text,
            f"names container {shortened(unknown[0])}, but the GPU containers are: "
            f"{', '.join(sorted(names))}",
            f"{min(names)}=8Gi",
        )


def _limited(
    annotations: Mapping[str, str], containers: tuple[ContainerAsk, ...]
) -> tuple[ContainerAsk, ...]:
    """Return the containers with their limits. Raises ``BadAnnotation``.

    If one container had no limit, the use of the pod on a device would have no limit. So a limit
    must name all GPU containers.
    """
    text = annotations.get(VRAM_LIMIT)
    limits = None if text is None else parse_vram_limit(text)
    if text is None or limits is None:
        return containers
    _check_names(VRAM_LIMIT, text, limits, {container.name for container in containers})
    limited: list[ContainerAsk] = []
    for ask in containers:
        if isinstance(ask.amount, ReplicaShare):
            why = f"needs a request for container {ask.name}: add {VRAM}, for example {VRAM}: 8Gi"
            raise BadAnnotation(VRAM_LIMIT, text, why, "20Gi")
        if (limit := limits.of(ask.name)) is None:
            why = f"names no limit for container {ask.name}"
            raise BadAnnotation(VRAM_LIMIT, text, why, f"{text},{ask.name}={ask.amount_text}")
        if (difference := compared(limit, ask.amount)) is not None and difference < 0:
            why = implausible(limit.count_bytes) if isinstance(limit, Bytes) else ""
            why = why or f"is less than the request of container {ask.name}, {ask.amount_text}"
            raise BadAnnotation(VRAM_LIMIT, text, why, ask.amount_text)
        limited.append(replace(ask, limit=limit))
    return tuple(limited)


def _limit_asks(pod: Pod, containers: Sequence[ContainerAsk]) -> tuple[Ask, ...]:
    limits = [replace(ask, amount=ask.limit) for ask in containers if ask.limit is not None]
    return _asks(pod, limits) if limits else ()


def _origin(written_from: str) -> str:
    """Return the source of an amount that the webhook may have written to the pod."""
    if written_from.startswith("namespace "):
        return "namespace"
    return "recommendation" if written_from.startswith("VRAMProfile ") else "annotation"


def _asks(pod: Pod, containers: Sequence[ContainerAsk]) -> tuple[Ask, ...]:
    """Return one ask for each resource, with its phases."""
    init = pod.spec.init_containers or ()
    sidecars = {each.name for each in init if each.restart_policy == "Always"}
    asks: list[Ask] = []
    for resource in dict.fromkeys(ask.resource for ask in containers):
        own = [ask for ask in containers if ask.resource == resource]
        phases: list[list[ContainerAsk]] = []
        running_sidecars: list[ContainerAsk] = []
        for ask in own:  # init containers come first, in their order
            if ask.index is None and ask.name in sidecars:
                running_sidecars.append(ask)
            elif ask.index is None:
                phases.append([*running_sidecars, ask])
        phases.append([*running_sidecars, *(ask for ask in own if ask.index is not None)])
        portions = (tuple(Portion(ask.amount, ask.count) for ask in phase) for phase in phases)
        asks.append(
            Ask(
                resource=resource,
                count=max(sum(ask.count for ask in phase) for phase in phases),
                widest=max(ask.count for ask in own),
                phases=tuple(dict.fromkeys(portions)),
            )
        )
    return tuple(asks)
