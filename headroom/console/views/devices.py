"""One device: its memory accounting, the pods that hold it, its health and its sharing."""

from collections.abc import Callable, Iterator
from typing import Annotated

from fastapi import APIRouter, HTTPException, Path
from starlette.responses import Response

from headroom.console.facts.device_occupants import Held, holders
from headroom.console.facts.memory_caps import MemoryCap
from headroom.console.responses import UNKNOWN, Body, encoded, rounded_s, unknown_node
from headroom.console.times import Time
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, NewestWithHolds
from headroom.console.views.risks import RiskView, risk_of
from headroom.contract.timestamps import age
from headroom.core.overuse.decisions import overusing_pods
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.explain import because
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import reach
from headroom.runtime.server.auth import Sees, everything

NodeName = Annotated[str, Path(examples=["gpu-a"])]
Uuid = Annotated[str, Path(examples=["GPU-gpu-a-0"])]
#: Returns the age of a device's SM activity in seconds.
Aged = Callable[[DeviceTerms], float | None]


class HolderView(View):
    namespace: str
    name: str
    uid: str
    requested_bytes: int
    measured_bytes: int | None
    """Its use of the device; null if no report shows it."""
    observed: bool
    """Whether a report shows the pod on this device. If not, the pod is bound and may be on this
    device."""


class DeviceView(View):
    """The memory accounting of one device, in bytes: allocatable = memory - driver_reserve -
    node_reserve, and headroom = allocatable - reserved_total - unreserved_pods - unattributed.
    ``reserved_total`` is pods_reserved + pods_unconfirmed. ``pods_reserved`` counts pods observed
    on the device. ``pods_unconfirmed`` is the worst case of bound pods that no report shows yet.
    ``unreserved_pods`` is the use of pods without a reservation."""

    uuid: str
    driver_index: int | None
    """The index of the GPU in nvidia-smi; null if unknown. MIG devices have the index of their
    GPU."""
    gpu: str
    """Short name for people, unique on the node: the driver's index, or the start of the UUID for
    a MIG device or if the index is unknown. Paths and other views name a device by its UUID."""
    model: str
    kind: str
    """gpu or mig."""
    resource: str
    sharing: str
    """none, time-slicing or mps."""
    memory_id: str
    """Equal for devices that share one memory, such as MIG compute instances of one GPU instance.
    Each of them has the figures of the whole memory, so a sum must count only one of them."""
    memory_bytes: int
    """Physical memory."""
    driver_reserve_bytes: int
    node_reserve_bytes: int
    allocatable_bytes: int
    pods_reserved_bytes: int
    pods_unconfirmed_bytes: int
    reserved_total_bytes: int
    unreserved_pods_bytes: int
    """Use of pods without a reservation."""
    unattributed_bytes: int
    attributed: bool
    """Whether the agent reports which pod uses the memory. If not, unattributed use can be hidden
    behind the requests of idle pods."""
    headroom_bytes: int
    used_bytes: int
    sm_activity_ratio: float | None
    """SM activity that filter and score use, 0 to 1. It is not the device utilization."""
    sm_activity_source: str | None
    """"dcgm-history" for a quantile over a window; "dcgm", "gpm" or "nvml-process" for the last
    sample of the agent."""
    sm_activity_quantile: float | None
    """Quantile over the window; null for a single sample."""
    sm_activity_window_s: float | None
    """Length of the window; null for a single sample."""
    sm_activity_age_s: float | None
    """Age of the newest sample in the window."""
    replicas_free: int
    replicas_allocated: int
    replicas_unhealthy: int
    replicas_leaving: int
    """Number of allocated replicas that terminating pods hold."""
    next_pod_free_bytes: int
    """Memory free for the next pod that requests one replica, if it gets this device."""
    policy: str
    """Policy by which the device plugin is assumed to choose a device: distributed, packed or
    unknown; "steered" if the agent chooses instead."""
    candidate: bool
    """Whether the next pod that requests one replica could get this device, and the reason."""
    candidate_because: str
    cordoned: bool
    """Whether the device takes no new pods only because it is cordoned."""
    unhealthy: str | None
    unhealthy_detail: str | None
    holders: list[HolderView]
    hidden_holders: int
    """Number of other pods on the device, which the caller is not authorized to get."""


class UseView(View):
    """A container that the agent reports on the device."""

    container: str
    replica: str | None
    used_bytes: int | None
    source: str
    """Sources of the allocation and of the bytes."""


class CapView(View):
    """The limit of a pod's memory on one device, if there is one."""

    uid: str
    device: str
    enforcer: str | None
    """driver (it limits each container's cgroup, and the limit was read back), mig (the memory of
    its own instance) or mps (it limits each process); null if nothing limits the pod."""
    limit_bytes: int | None
    """Maximum bytes of the pod on the device; with mps, of each of its processes."""
    capped: bool
    """Whether a reading proves that the pod cannot allocate more."""
    message: str


class PodLimitView(View):
    """The limit of a pod on a device (headroom.gpu/vram-limit), beyond which it is evicted."""

    uid: str
    device: str
    limit_bytes: int
    memory_class: str
    """guaranteed (limit equals request) or burstable (limit above request)."""


class OveruseView(View):
    """A pod that uses more memory than it reserved on a device, and whether it is evicted."""

    namespace: str
    name: str
    uid: str
    device: str
    reserved_bytes: int
    used_bytes: int
    measured_free_bytes: int
    """Measured free memory of the device, and how much must stay free for its other pods."""
    needed_bytes: int
    limit_bytes: int | None
    """The limit of the pod on the device; null if it has none."""
    outcome: str
    """evicting (its grace period runs), next (selected but not decided yet), observed (would be
    evicted, but the mode is observe), ending, other (another pod of the device is evicted
    first), rejected (by the API server), protected (may not be evicted) or none (the other pods
    do not lack memory)."""
    decided_at: Time | None
    """When its eviction was decided; null if it is not to be evicted."""
    message: str


class HeldView(View):
    namespace: str
    name: str
    uid: str
    phase: str
    """waiting (reserved, but no Binding seen yet), unconfirmed (bound, but not observed on a
    device yet), starting (other pods that start alone must wait for it), running, ending (its
    memory is not free yet) or gone (deleted, and no sample shows its memory as free yet)."""
    reserved: bool
    """If false, it is bound without a reservation, and only its measured use counts."""
    requested_bytes: int
    measured_bytes: int | None
    """Its use of the device; null if no report shows it."""
    charged_bytes: int
    """Memory that counts for the pod on the device."""
    exceeds_by_bytes: int
    """Use above the request; 0 for a pod without a reservation."""
    since: Time | None
    """When the reservation was made (RFC 3339)."""
    priority: int | None
    containers: list[UseView]
    cap: CapView | None
    """Null if no report shows the pod on the device."""


class ProcessView(View):
    pid: int
    command: str
    used_bytes: int | None


class LimitView(View):
    """The GPU memory limits that the driver enforces on a container."""

    namespace: str
    name: str
    uid: str
    container: str
    used_bytes: int | None
    soft_bytes: int | None
    hard_bytes: int | None


class HealthView(View):
    healthy: bool
    detail: str | None
    since: Time | None


class DeviceBody(Body):
    node: str
    report_age_s: float | None
    device: DeviceView
    risk: RiskView | None
    """The most urgent risk, as in /v1/overview; null if there is none."""
    health: HealthView
    mig_parent: str | None
    """For MIG: the physical GPU, and the GPU instance whose memory compute instances share."""
    mig_gpu_instance: int | None
    mps_process_limit_bytes: int | None
    """For MPS: maximum memory of each process."""
    sharers: int
    """Number of devices that share the memory of this device, including itself."""
    numa_node: int | None
    pci_bus_id: str | None
    architecture: str | None
    compute_mode: str | None
    utilization_ratio: float | None
    """Share of the time in which any kernel ran. It is not the SM activity."""
    sm_occupancy_ratio: float | None
    replicas: int
    holders: list[HeldView]
    """Pods of all devices that share the memory, largest first."""
    unattributed_processes: list[ProcessView] | None
    """The largest processes that belong to no pod; null if the agent cannot attribute processes."""
    limits: list[LimitView]


routes = APIRouter()


@routes.get("/v1/nodes/{name}/devices/{uuid}", response_model=DeviceBody, responses=UNKNOWN)
def device(context: InContext, name: NodeName, uuid: Uuid, snap: NewestWithHolds) -> Response:
    """Return the pods that hold the device with their phase, unattributed processes, the health
    of the device, and how it is shared."""
    cluster = context.cluster
    row = snap.row_of.get(name)
    if row is None:
        raise unknown_node(name)
    on_node = snap.nodes[row].devices
    terms = next((each for each in on_node if each.device.uuid == uuid), None)
    if terms is None:
        known = ", ".join(each.device.uuid for each in on_node) or "none"
        raise HTTPException(404, f"node {name} has no device {uuid}; it reports: {known}")
    wall_s = context.wall_s()
    gpunode = cluster.gpunode(name)
    status = gpunode.status if gpunode else None
    reported = terms.device
    limits = [each for each in status.limits if each.device == uuid] if status else []
    unattributed = status.unattributed_processes if status else []
    return encoded(
        DeviceBody(
            **context.head(snap),
            node=name,
            report_age_s=rounded_s(age(status.observed_at, wall_s)) if status else None,
            device=device_view(terms, context.activity_age()),
            risk=risk_of(context, snap.nodes[row], terms),
            health=HealthView(
                healthy=reported.healthy,
                detail=reported.health_reason or None,
                since=reported.unhealthy_since or None,
            ),
            mig_parent=reported.parent,
            mig_gpu_instance=reported.gpu_instance,
            mps_process_limit_bytes=reported.memory_bytes // max(1, reported.replicas.total)
            if reported.sharing == "mps" and terms.believed
            else None,
            sharers=terms.sharers,
            numa_node=reported.numa_node,
            pci_bus_id=reported.pci_bus_id or None,
            architecture=reported.architecture or None,
            compute_mode=reported.compute_mode or None,
            utilization_ratio=reported.utilization_ratio,
            sm_occupancy_ratio=reported.sm_occupancy_ratio,
            replicas=reported.replicas.total,
            holders=[held_view(held) for held in holders(cluster, name, terms)],
            unattributed_processes=[
                ProcessView.of(each) for each in unattributed if each.device == uuid
            ]
            if terms.attributed
            else None,
            limits=[
                LimitView.of(each, used_bytes=each.used_bytes if each.used_bytes >= 0 else None)
                for each in limits
            ],
        )
    )


def device_view(terms: DeviceTerms, aged: Aged, sees: Sees = everything) -> DeviceView:
    device = terms.device
    seen = [holder for holder in terms.holders if sees(holder.namespace, holder.name)]
    activity = terms.activity
    return DeviceView(
        uuid=device.uuid,
        driver_index=device.index if device.index >= 0 else None,
        gpu=device.name,
        model=device.model,
        kind=device.kind,
        resource=device.resource,
        sharing=device.sharing,
        memory_id=_memory_id(terms),
        memory_bytes=device.memory_bytes,
        driver_reserve_bytes=device.reserved_bytes,
        node_reserve_bytes=terms.reserve_bytes,
        allocatable_bytes=terms.allocatable_bytes,
        pods_reserved_bytes=terms.reservation_bytes,
        pods_unconfirmed_bytes=terms.unconfirmed_bytes,
        reserved_total_bytes=terms.reservation_bytes + terms.unconfirmed_bytes,
        unreserved_pods_bytes=terms.unreserved_pods_bytes,
        unattributed_bytes=terms.unattributed_bytes,
        attributed=terms.attributed,
        headroom_bytes=terms.headroom_bytes,
        used_bytes=device.used_bytes,
        sm_activity_ratio=activity.ratio if activity else None,
        sm_activity_source=activity.source if activity else None,
        sm_activity_quantile=activity.quantile if activity else None,
        sm_activity_window_s=activity.window_s if activity else None,
        sm_activity_age_s=rounded_s(aged(terms)),
        replicas_free=device.replicas.free,
        replicas_allocated=device.replicas.allocated,
        replicas_unhealthy=device.replicas.unhealthy,
        replicas_leaving=terms.leaving,
        next_pod_free_bytes=terms.free_bytes,
        policy=terms.policy,
        candidate=reach(terms) == 1,
        candidate_because=because(terms),
        cordoned=terms.cordoned,
        unhealthy=terms.unhealthy.code if terms.unhealthy else None,
        unhealthy_detail=terms.health_detail or None,
        holders=[HolderView.of(holder) for holder in seen],
        hidden_holders=len(terms.holders) - len(seen),
    )


def _memory_id(terms: DeviceTerms) -> str:
    device = terms.device
    return f"{device.parent}/{device.gpu_instance}" if terms.sharers > 1 else device.uuid


def held_view(held: Held) -> HeldView:
    return HeldView.of(
        held,
        exceeds_by_bytes=held.charged_bytes - held.requested_bytes if held.reserved else 0,
        containers=[UseView.of(use) for use in held.uses],
        cap=CapView.of(held.cap) if held.cap else None,
    )


def overuse_views(
    context: Context, node: NodeTerms, sees: Sees = everything
) -> Iterator[OveruseView]:
    """Yield the pods that use more than they reserved and that the caller may see."""
    observes = context.settings().mode == "observe"
    for each in overusing_pods(context.cluster, node, context.monotonic_s(), observes):
        if sees(each.namespace, each.name):
            yield OveruseView.of(each, measured_free_bytes=each.free_bytes)


def cap_view(cap: MemoryCap) -> CapView:
    return CapView.of(cap)
