"""Nodes and devices as the debug API shows them."""

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
from extender.state.heartbeats import age
from extender.state.selectors import cordoned, keeping_out, taint_text


class HolderView(BaseModel):
    namespace: str
    name: str
    uid: str
    requested_bytes: int
    measured_bytes: int | None
    #: False: bound, and this device is one of those that it may be on.
    observed: bool


class DeviceView(BaseModel):
    """The equation of one device: allocatable = memory - reserved - reserve, and
    headroom = allocatable - promised - awaited - strays - unowned. Promised is to pods seen there;
    awaited what pods on their way add at the worst."""

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
    #: Whether the agent told whose the memory is; if not, requests of idle pods can hide strangers.
    attributed: bool
    headroom_bytes: int
    used_bytes: int
    #: What decides: "dcgm-history", a quantile over a window; or the agent's last sample, by who
    #: took it: "dcgm", "gpm" or "nvml-process". Never device utilisation.
    sm_activity_ratio: float | None
    sm_activity_source: str | None
    #: Null for a single sample.
    sm_activity_quantile: float | None
    sm_activity_window_s: float | None
    #: Of the newest sample in it.
    sm_activity_age_s: float | None
    replicas_free: int
    replicas_allocated: int
    replicas_unhealthy: int
    #: Of those allocated, how many are held by pods that are ending.
    replicas_leaving: int
    #: What is left for a pod that asks for one replica, if it is given this device.
    free_bytes: int
    #: How the plugin is taken to choose: distributed, packed, unknown, any; or
    #: steered, where the agent chooses in its stead.
    policy: str
    #: Whether the next pod for one replica could be given this device, and why.
    candidate: bool
    candidate_because: str
    unhealthy: str | None
    unhealthy_detail: str | None
    holders: list[HolderView]
    #: Other pods that hold memory of it, which the reader may not get.
    hidden_holders: int


class NodeView(BaseModel):
    name: str
    #: Why the node as a whole takes no pods; null when its devices decide.
    reason: str | None
    message: str | None
    #: What shows it, where the message does not say.
    detail: str | None
    observed_at: str | None
    report_age_s: float | None
    #: Whether its agent was heard of lately enough.
    fresh: bool
    initialised: bool
    #: Whether kubectl cordon closed it to new pods.
    cordoned: bool
    #: As kubectl describe prints them; only those that keep pods away that do not tolerate them.
    taints: list[str]
    #: "not measured" and where its capacity was learned, if no agent reports it.
    unmeasured: str | None
    #: Of the device that the next pod gets: exact, slot-safe, predicted, any or pinned; null where
    #: the node has not reported.
    certainty: str | None
    devices: list[DeviceView]


class NodesBody(Paged):
    nodes: list[NodeView]
    #: Of all nodes.
    overcommitted_bytes: int


class NodeBody(Body):
    node: NodeView


#: How old the SM activity of a device is, in seconds.
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
