"""Bodies of nodes and devices."""

from collections.abc import Callable

from pydantic import BaseModel

from contract.reasons import Reason
from extender.console.bodies import Body, Paged
from extender.console.visible_pods import Sees, everything
from extender.placement.device_accounting import DeviceTerms
from extender.placement.explain import because, certainty
from extender.placement.snapshot import NodeTerms
from extender.placement.snapshot_builder import reach
from extender.state.cluster_state import ClusterState
from extender.state.eligible_nodes import cordoned, keeping_out, taint_text
from extender.state.heartbeats import age


class HolderView(BaseModel):
    namespace: str
    name: str
    uid: str
    requested_bytes: int
    measured_bytes: int | None
    #: Whether a report shows the pod on this device. False: it is bound and may be on this device.
    observed: bool


class DeviceView(BaseModel):
    """The memory accounting of one device, in bytes: allocatable = memory - reserved - reserve, and
    headroom = allocatable - reservation - unconfirmed - unobserved_pods - unattributed.
    Reservations are of pods observed on the device. Unconfirmed is the worst case of bound pods
    that no report shows yet. Unobserved_pods is the use of pods without a reservation."""

    uuid: str
    index: int
    model: str
    kind: str
    resource: str
    sharing: str
    memory_bytes: int
    reserved_bytes: int
    reserve_bytes: int
    allocatable_bytes: int
    reservation_bytes: int
    unconfirmed_bytes: int
    unobserved_pods_bytes: int
    unattributed_bytes: int
    #: Whether the agent reports which pod uses the memory. If not, requests of idle pods can hide
    #: unattributed use.
    attributed: bool
    headroom_bytes: int
    used_bytes: int
    #: SM activity that filter and score use, 0 to 1; this is not device utilization.
    sm_activity_ratio: float | None
    #: "dcgm-history" for a quantile over a window; "dcgm", "gpm" or "nvml-process" for the agent's
    #: last sample.
    sm_activity_source: str | None
    #: Null for a single sample.
    sm_activity_quantile: float | None
    #: Null for a single sample.
    sm_activity_window_s: float | None
    #: Age of the newest sample in the window.
    sm_activity_age_s: float | None
    replicas_free: int
    replicas_allocated: int
    replicas_unhealthy: int
    #: Number of allocated replicas that terminating pods hold.
    replicas_leaving: int
    #: Memory free for the next pod that requests one replica, if it gets this device.
    free_bytes: int
    #: Assumed policy by which the device plugin chooses a device: distributed, packed, unknown or
    #: any; steered if the agent chooses instead.
    policy: str
    #: Whether the next pod that requests one replica could get this device, and why.
    candidate: bool
    candidate_because: str
    unhealthy: str | None
    unhealthy_detail: str | None
    holders: list[HolderView]
    #: Number of further pods on the device that the caller may not get.
    hidden_holders: int


class NodeView(BaseModel):
    name: str
    #: Why the node as a whole takes no pods; null if its devices decide.
    reason: str | None
    message: str | None
    #: Evidence for the message, if it does not include any.
    detail: str | None
    observed_at: str | None
    report_age_s: float | None
    #: Whether the last report of its agent is recent enough.
    fresh: bool
    initialised: bool
    #: Whether the node is cordoned.
    cordoned: bool
    #: As printed by kubectl describe; only NoSchedule and NoExecute taints.
    taints: list[str]
    #: "not measured" and the source of the capacity, if no agent reports the node.
    unmeasured: str | None
    #: How certain the device of the next pod is: exact, slot-safe, predicted, any, pinned or
    #: steered; null if the node has no report.
    certainty: str | None
    devices: list[DeviceView]


class NodesBody(Paged):
    nodes: list[NodeView]
    #: Total over all nodes.
    overcommitted_bytes: int


class NodeBody(Body):
    node: NodeView


#: Returns the age of a device's SM activity in seconds.
Aged = Callable[[DeviceTerms], float | None]


def device_view(terms: DeviceTerms, aged: Aged, sees: Sees = everything) -> DeviceView:
    device = terms.device
    seen = [holder for holder in terms.holders if sees(holder.namespace, holder.name)]
    activity = terms.activity
    return DeviceView(
        uuid=device.uuid,
        index=device.index,
        model=device.model,
        kind=device.kind,
        resource=device.resource,
        sharing=device.sharing,
        memory_bytes=device.memory_bytes,
        reserved_bytes=device.reserved_bytes,
        reserve_bytes=terms.reserve_bytes,
        allocatable_bytes=terms.allocatable_bytes,
        reservation_bytes=terms.reservation_bytes,
        unconfirmed_bytes=terms.unconfirmed_bytes,
        unobserved_pods_bytes=terms.unobserved_pods_bytes,
        unattributed_bytes=terms.unattributed_bytes,
        attributed=terms.attributed,
        headroom_bytes=terms.headroom_bytes,
        used_bytes=device.used_bytes,
        sm_activity_ratio=activity.ratio if activity else None,
        sm_activity_source=activity.source if activity else None,
        sm_activity_quantile=activity.quantile if activity else None,
        sm_activity_window_s=activity.window_s if activity else None,
        sm_activity_age_s=_rounded(aged(terms)),
        replicas_free=device.replicas.free,
        replicas_allocated=device.replicas.allocated,
        replicas_unhealthy=device.replicas.unhealthy,
        replicas_leaving=terms.leaving,
        free_bytes=terms.free_bytes,
        policy=terms.policy,
        candidate=reach(terms) == 1,
        candidate_because=because(terms),
        unhealthy=terms.health_issue.code if terms.health_issue else None,
        unhealthy_detail=terms.health_detail or None,
        holders=[
            HolderView(
                namespace=holder.namespace,
                name=holder.name,
                uid=holder.uid,
                requested_bytes=holder.requested_bytes,
                measured_bytes=holder.measured_bytes,
                observed=holder.observed,
            )
            for holder in seen
        ],
        hidden_holders=len(terms.holders) - len(seen),
    )


def node_view(node: NodeTerms, cluster: ClusterState, now_s: float, wall_s: float) -> NodeView:
    gpunode = cluster.gpunode(node.name)
    status = gpunode.status if gpunode else None
    kube_node = cluster.node(node.name)
    fresh = node.fresh_until_s >= now_s
    reason = node.reason or (None if fresh else Reason.STALE_REPORT)
    return NodeView(
        name=node.name,
        reason=reason.code if reason else None,
        message=reason.sentence if reason else None,
        detail=node.detail or None,
        observed_at=status.observed_at if status else None,
        report_age_s=_rounded(age(status.observed_at, wall_s)) if status else None,
        fresh=fresh,
        initialised=gpunode.spec.initialised if gpunode else False,
        cordoned=kube_node is not None and cordoned(kube_node),
        taints=list(map(taint_text, keeping_out(kube_node))) if kube_node else [],
        unmeasured=node.unmeasured or None,
        certainty=certainty(node) if node.devices else None,
        devices=[
            device_view(terms, lambda t: cluster.activities.age_s(t, now_s, wall_s))
            for terms in node.devices
        ],
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
