"""Nodes and their devices, with the memory accounting of every device."""

from bisect import bisect_right
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Query
from numpy.typing import NDArray
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.facts.memory_caps import caps_on
from headroom.console.facts.pod_limits import pod_limits
from headroom.console.responses import (
    TAGGED,
    UNKNOWN,
    AskedPage,
    Body,
    IfNoneMatch,
    Page,
    Paged,
    encoded,
    is_current,
    joined,
    listed,
    rounded_s,
    unchanged,
    unknown_node,
)
from headroom.console.times import Time
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, NewestWithHolds
from headroom.console.views.device_view_cache import DeviceViews, shared_views
from headroom.console.views.devices import (
    CapView,
    DeviceView,
    NodeName,
    OveruseView,
    PodLimitView,
    cap_view,
    overuse_views,
)
from headroom.contract.device_choice import STEERING_UNKNOWN
from headroom.contract.reasons import Reason
from headroom.contract.timestamps import age
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.device_accounting import DeviceTerms, first_of_each_memory
from headroom.core.placement.explain import certainty
from headroom.core.placement.occupancy import Holder
from headroom.core.placement.snapshot import NodeTerms, Rows, Snapshot
from headroom.core.placement.unreserved_pods import unreserved_pods
from headroom.core.rules.eligible_nodes import cordoned, keeping_out, taint_text
from headroom.core.whatif.steering_whatif import steerable

Search = Annotated[
    str,
    Query(
        max_length=256,
        description="Only nodes with this text in their name or reason, in the UUID, model, "
        "resource or health of a device, or in namespace/name of a pod. Case is ignored.",
        examples=["a100"],
    ),
]
Troubled = Annotated[
    bool,
    Query(
        description="true: only nodes that take no pods, or have an unhealthy, cordoned or "
        "overcommitted device.",
        examples=["true"],
    ),
]


class Order(Enum):
    NAME = "name"
    FULLEST = "fullest"


AskedOrder = Annotated[
    Order,
    Query(
        description="fullest: nodes that take no pods first, then nodes by their fullest device. "
        "An unhealthy or cordoned device counts as filled to 200 %.",
        examples=["fullest"],
    ),
]
#: Pages of at most this many nodes are shared between readers.
MOST_SHARED = 100
#: Default and maximum number of nodes in a page. 5,000 nodes have 40 MB and take 1.5 s.
NODES, MOST_NODES = 500, 1000
_PPM = 1_000_000
#: Maximum value of a device's fullness. Positions are sorted as text with keys of 16 digits.
_MOST_PPM = 10**15


class UnreservedPodView(View):
    """A pod that uses memory of a device without a reservation."""

    namespace: str
    """Namespace and name are empty if neither the report nor the watch names the pod."""
    name: str
    uid: str
    device: str
    used_bytes: int


class NodeView(View):
    name: str
    reason: str | None
    """Why the node as a whole takes no pods; null if it depends on the device."""
    message: str | None
    detail: str | None
    """Evidence for the message, if the message does not include any."""
    observed_at: Time | None
    """When the agent took the newest sample (RFC 3339), by the clock of the node."""
    report_age_s: float | None
    fresh: bool
    """Whether the last report of its agent is recent enough."""
    initialised: bool
    """Whether Headroom has adopted the pods that were on the node before Headroom."""
    cordoned: bool
    """Whether the node is cordoned."""
    taints: list[str]
    """NoSchedule and NoExecute taints, as kubectl describe prints them."""
    unmeasured: str | None
    """"not measured" and the source of the capacity; null if an agent reports the node."""
    certainty: str | None
    """How certain it is which device the next pod gets: exact, slot-safe, predicted or steered;
    null if no device of the node is known."""
    devices: list[DeviceView]
    caps: list[CapView]
    """Memory limits of pods that a reading proves."""
    overuse: list[OveruseView]
    """The pods that use more memory than they reserved."""
    unreserved_pods: list[UnreservedPodView]
    """The pods that use memory of a device without a reservation, largest first on each device."""
    pod_limits: list[PodLimitView]
    """The pods that have a limit, on each device that they hold or could get. All other pods are
    unlimited."""


class NodesBody(Paged):
    nodes: list[NodeView]
    overcommitted_bytes: int
    """Sum over all nodes."""


class NodeBody(Body):
    node: NodeView
    steering_obstacle: str | None
    """The obstacle to steering the node, such as a missing permission; null if none is known, and
    for nodes that are steered."""


routes = APIRouter()


@routes.get("/v1/nodes", response_model=NodesBody, responses=TAGGED)
def nodes(
    context: InContext,
    request: Request,
    snap: NewestWithHolds,
    page: AskedPage,
    search: Search = "",
    troubled: Troubled = False,
    order: AskedOrder = Order.NAME,
    etag: IfNoneMatch = None,
) -> Response:
    """List all nodes with the memory accounting of every device. A page has 500 nodes by default,
    and at most 1,000. The next page continues after the last node of this page, even if nodes
    appeared or disappeared meanwhile."""
    tag = context.tag(snap)
    if is_current(etag, tag):
        return unchanged(tag)
    now_s, kept = context.monotonic_s(), shared_views(request)

    def found() -> tuple[NodesBody, Iterator[NodeView]]:
        body, rows = _page_of(context, snap, page, search, troubled, order, now_s)
        return body, (node_view(snap.nodes[row], context, kept) for row in rows)

    if page.limit is None or page.limit > MOST_SHARED:
        body, views = found()
        return listed(body, "nodes", views, tag)

    def compute() -> Response:
        body, views = found()
        return joined(body, "nodes", views, tag)

    return context.answers.of(request, now_s, compute)


def _page_of(
    context: Context,
    snap: Snapshot,
    page: Page,
    search: str,
    troubled: bool,
    order: Order,
    now_s: float,
) -> tuple[NodesBody, list[int]]:
    """Return the body without its nodes, and the rows of its nodes."""
    text = search.lower()

    def shows(node: NodeTerms) -> bool:
        return not (troubled and _has_no_trouble(node, now_s)) and (
            not text
            or _matches(node, text, now_s)
            or any(
                text in f"{each.namespace}/{each.name}".lower()
                for terms in node.devices
                for each in _unreserved_pods(context.cluster, node.name, terms)
            )
        )

    rows = np.arange(len(snap.nodes))
    if troubled or text:
        rows = np.array([row for row, node in enumerate(snap.nodes) if shows(node)], int)
    positions = _Sorting(snap) if order is Order.NAME else _by_fullness(snap, now_s)
    ordered = positions.sorted(rows)
    begin = bisect_right(ordered, page.after, key=positions.of) if page.after else 0
    end = min(begin + min(page.limit or NODES, MOST_NODES), len(ordered))
    shown, remaining = ordered[begin:end], len(ordered) - end
    more = positions.of(shown[-1]) if remaining else None
    body = NodesBody(
        **context.head(snap),
        matching=len(ordered),
        remaining=remaining,
        continue_=more,
        nodes=[],
        overcommitted_bytes=context.overcommitted_bytes(),
    )
    return body, shown


@routes.get("/v1/nodes/{name}", response_model=NodeBody, responses=UNKNOWN | TAGGED)
def one_node(
    context: InContext,
    request: Request,
    name: NodeName,
    snap: NewestWithHolds,
    etag: IfNoneMatch = None,
) -> Response:
    """Return one node as in the list of nodes, and the obstacle to steering it."""
    tag = context.tag(snap)
    if is_current(etag, tag):
        return unchanged(tag)
    if name not in snap.row_of:
        raise unknown_node(name)
    node = node_view(snap.nodes[snap.row_of[name]], context, shared_views(request))
    found = steerable(context.cluster, name)
    obstacle = found.obstacle if found and found.known else found and STEERING_UNKNOWN
    body = NodeBody(**context.head(snap), node=node, steering_obstacle=obstacle or None)
    return encoded(body, tag)


def _reason(node: NodeTerms, now_s: float) -> Reason | None:
    """Return why the node as a whole takes no pods, or None if it depends on the device."""
    return node.reason or (None if node.fresh_until_s >= now_s else Reason.STALE_REPORT)


def _has_no_trouble(node: NodeTerms, now_s: float) -> bool:
    return _reason(node, now_s) is None and (
        all(terms.health_issue is None and terms.headroom_bytes >= 0 for terms in node.devices)
    )


class _Sorting(NamedTuple):
    """An order of the nodes: first by ``keys``, then by name."""

    snap: Snapshot
    #: The first key has precedence. Each key has a number for each row, and the lowest comes first.
    keys: tuple[Rows, ...] = ()

    def sorted(self, rows: Rows) -> list[int]:
        keys: list[NDArray[Any]] = [self.snap.name_rank, *reversed(self.keys)]
        ordered: list[int] = rows[np.lexsort([key[rows] for key in keys])].tolist()
        return ordered

    def of(self, row: int) -> str:
        """Return the position of a row as text, for ``continue``. Positions sort like the nodes."""
        return "_".join([*(f"{key[row]:016d}" for key in self.keys), self.snap.nodes[row].name])


def _by_fullness(snap: Snapshot, now_s: float) -> _Sorting:
    """Sort nodes that have a reason first, then the other nodes by their fullest device.

    An unhealthy or cordoned device counts as filled to 200 %.
    """
    columns = snap.columns
    allocatable_bytes = np.maximum(columns.allocatable_bytes, 1)
    committed_bytes = columns.allocatable_bytes.astype(np.float64) - columns.headroom_bytes
    fullness_ppm = np.clip(_PPM * committed_bytes / allocatable_bytes, 0, _MOST_PPM).astype(
        np.int64
    )
    fullness_ppm = np.where(columns.health_issue > 0, 2 * _PPM, fullness_ppm)
    fullest_ppm = fullness_ppm.max(axis=1, initial=0)
    takes_pods = (snap.node_reason == 0) & (snap.fresh_until_s >= now_s)
    return _Sorting(snap, (takes_pods.astype(np.int64), _MOST_PPM - fullest_ppm))


def _matches(node: NodeTerms, text: str, now_s: float) -> bool:
    return any(text in word.lower() for word in _searchable(node, now_s))


def _searchable(node: NodeTerms, now_s: float) -> Iterator[str]:
    yield node.name
    if (reason := _reason(node, now_s)) is not None:
        yield reason.sentence
    yield node.detail
    yield node.unmeasured
    for terms in node.devices:
        yield from _searchable_of(terms)


def _unreserved_pods(cluster: Cluster, node: str, terms: DeviceTerms) -> tuple[Holder, ...]:
    if not terms.unreserved_pods_bytes:
        return ()
    gpunode = cluster.gpunode(node)
    status = gpunode.status if gpunode else None
    pods = (pod for use in (status.pods if status else ()) if (pod := cluster.pod(use.uid)))
    return unreserved_pods(status, terms, pods)


def _searchable_of(terms: DeviceTerms) -> Iterator[str]:
    yield terms.device.uuid
    yield terms.device.model
    yield terms.device.resource
    if terms.health_issue is not None:
        yield terms.health_issue.code
    yield terms.health_detail
    for holder in terms.holders:
        yield f"{holder.namespace}/{holder.name}"


def node_view(node: NodeTerms, context: Context, kept: DeviceViews) -> NodeView:
    cluster, aged = context.cluster, context.activity_age()
    gpunode = cluster.gpunode(node.name)
    status = gpunode.status if gpunode else None
    kube_node = cluster.node(node.name)
    reason = _reason(node, context.monotonic_s())
    return NodeView(
        name=node.name,
        reason=reason.code if reason else None,
        message=reason.sentence if reason else None,
        detail=node.detail or None,
        observed_at=status.observed_at if status else None,
        report_age_s=rounded_s(age(status.observed_at, context.wall_s())) if status else None,
        fresh=node.fresh_until_s >= context.monotonic_s(),
        initialised=gpunode.spec.initialised if gpunode else False,
        cordoned=kube_node is not None and cordoned(kube_node),
        taints=list(map(taint_text, keeping_out(kube_node))) if kube_node else [],
        unmeasured=node.unmeasured or None,
        certainty=certainty(node) if node.devices else None,
        devices=[kept.of(terms, aged) for terms in node.devices],
        caps=[
            cap_view(cap)
            for terms in node.devices
            for cap in caps_on(cluster, node.name, terms).values()
            if cap.capped
        ],
        overuse=list(overuse_views(context, node)),
        unreserved_pods=[
            UnreservedPodView(
                namespace=each.namespace,
                name=each.name,
                uid=each.uid,
                device=terms.device.uuid,
                used_bytes=each.measured_bytes or 0,
            )
            for terms in first_of_each_memory(node.devices)
            for each in _unreserved_pods(cluster, node.name, terms)
        ],
        pod_limits=[PodLimitView.of(each) for each in pod_limits(cluster, node)],
    )
