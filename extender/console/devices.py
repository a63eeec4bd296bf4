"""One device: the pods that hold it, unattributed processes, its health and its sharing."""

from typing import Annotated

from fastapi import APIRouter, Depends, HTTPException, Path
from pydantic import BaseModel
from starlette.responses import Response

from contract.gpunode import ContainerLimit, Device, UnattributedProcess
from extender.console.bodies import Body, stamp
from extender.console.context import Context
from extender.console.node_views import DeviceView, device_view
from extender.console.occupant_bodies import HeldView, held_view
from extender.console.responses import UNKNOWN, encoded
from extender.placement.snapshot import Snapshot
from extender.state.device_occupants import holders
from extender.state.heartbeats import age


class ProcessView(BaseModel):
    pid: int
    command: str
    used_bytes: int | None


class LimitView(BaseModel):
    """The GPU memory limits that the driver enforces on a container."""

    namespace: str
    name: str
    uid: str
    container: str
    used_bytes: int | None
    soft_bytes: int | None
    hard_bytes: int | None


class HealthView(BaseModel):
    healthy: bool
    detail: str | None
    since: str | None


class DeviceBody(Body):
    node: str
    report_age_s: float | None
    device: DeviceView
    health: HealthView
    #: MIG: the physical GPU, and the GPU instance whose memory compute instances share.
    mig_parent: str | None
    mig_gpu_instance: int | None
    #: MPS: maximum memory of each process.
    mps_process_limit_bytes: int | None
    #: Number of devices that share its memory, including this one.
    sharers: int
    numa_node: int | None
    pci_bus_id: str | None
    architecture: str | None
    compute_mode: str | None
    #: Share of the time in which any kernel ran; this is not SM activity.
    utilization_ratio: float | None
    sm_occupancy_ratio: float | None
    replicas: int
    #: The largest first; of all devices that share the memory.
    holders: list[HeldView]
    #: The largest processes that belong to no pod; null if the agent cannot attribute processes.
    unattributed_processes: list[ProcessView] | None
    limits: list[LimitView]


NodeName = Annotated[str, Path(examples=["gpu-a"])]
Uuid = Annotated[str, Path(examples=["GPU-gpu-a-0"])]


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    Newest = Annotated[Snapshot, Depends(context.newest)]
    cluster = context.cluster

    @routes.get(
        "/v1/nodes/{name}/devices/{uuid}",
        response_model=DeviceBody,
        responses=UNKNOWN,
    )
    def device(name: NodeName, uuid: Uuid, snap: Newest) -> Response:
        """Return the pods that hold the device with their phase, unattributed processes, the health
        of the device, and how it is shared."""
        row = snap.row_of.get(name)
        if row is None:
            raise HTTPException(
                404, f"node {name} is not known; GET /v1/nodes lists the known nodes"
            )
        of_node = snap.nodes[row].devices
        terms = next((each for each in of_node if each.device.uuid == uuid), None)
        if terms is None:
            known = ", ".join(each.device.uuid for each in of_node) or "none"
            raise HTTPException(404, f"node {name} has no device {uuid}; it reports: {known}")
        now_s, at_s = context.monotonic_s(), context.wall_s()
        gpunode = cluster.gpunode(name)
        status = gpunode.status if gpunode else None
        of = terms.device
        limits = [each for each in status.limits if each.device == uuid] if status else []
        unattributed = status.unattributed_processes if status else []
        report_age_s = age(status.observed_at, at_s) if status else None
        return encoded(
            DeviceBody(
                generatedAt=stamp(at_s),
                snapshot_generation=snap.generation,
                node=name,
                report_age_s=None if report_age_s is None else round(report_age_s, 3),
                device=device_view(terms, lambda t: cluster.activities.age_s(t, now_s, at_s)),
                health=_health_view(of),
                mig_parent=of.parent,
                mig_gpu_instance=of.gpu_instance,
                mps_process_limit_bytes=of.memory_bytes // max(1, of.replicas.total)
                if of.sharing == "mps" and terms.believed
                else None,
                sharers=terms.sharers,
                numa_node=of.numa_node,
                pci_bus_id=of.pci_bus_id or None,
                architecture=of.architecture or None,
                compute_mode=of.compute_mode or None,
                utilization_ratio=of.utilization_ratio,
                sm_occupancy_ratio=of.sm_occupancy_ratio,
                replicas=of.replicas.total,
                holders=[held_view(held) for held in holders(cluster, name, terms)],
                unattributed_processes=[_process_view(p) for p in unattributed if p.device == uuid]
                if terms.attributed
                else None,
                limits=[_limit_view(limit) for limit in limits],
            )
        )

    return routes


def _health_view(device: Device) -> HealthView:
    return HealthView(
        healthy=device.healthy,
        detail=device.health_reason or None,
        since=device.unhealthy_since or None,
    )


def _process_view(process: UnattributedProcess) -> ProcessView:
    return ProcessView(pid=process.pid, command=process.command, used_bytes=process.used_bytes)


def _limit_view(limit: ContainerLimit) -> LimitView:
    return LimitView(
        namespace=limit.namespace,
        name=limit.name,
        uid=limit.uid,
        container=limit.container,
        used_bytes=limit.used_bytes if limit.used_bytes >= 0 else None,
        soft_bytes=limit.soft_bytes,
        hard_bytes=limit.hard_bytes,
    )
