"""Counts how many more pods of one size fit now, and shows where memory is free or stranded."""

from collections import Counter
from collections.abc import Iterator, Sequence
from threading import Lock
from typing import Annotated

import numpy as np
from fastapi import APIRouter, HTTPException, Query
from starlette.requests import Request
from starlette.responses import Response

from headroom.bounded_dict import Bounded
from headroom.console.responses import (
    AskView,
    Body,
    ReasonView,
    ask_view,
    listed,
    obstacle_view,
    reason_view,
)
from headroom.console.view import View
from headroom.console.view_context import InContext, Newest, shared
from headroom.console.views.requested_pods import made_up, of_size, understood, usual_resource
from headroom.contract.annotations import parse_vram
from headroom.contract.errors import BadAnnotation, shortened
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.capacity import (
    Space,
    capacity_summary,
    device_classes,
    node_spaces,
    space,
)
from headroom.core.placement.dra_nodes import by_headroom
from headroom.core.placement.fit import Verdicts
from headroom.core.placement.request import Kind
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.rules.eligible_nodes import AMOUNTS, eligible_nodes
from headroom.core.whatif.held_memory import verdicts_on
from headroom.core.whatif.node_whatif import pod_counts


class SpaceView(View):
    """The memory and replicas on the nodes that a pod of one size may run on."""

    open_nodes: int
    """Number of nodes with a device of the resource that take pods, and that take none."""
    closed_nodes: int
    fitting_nodes: int
    """Number of nodes on which one more pod fits."""
    need_bytes: int | None
    """The least memory that one pod takes on an open node; null if no open node has a healthy
    device of the resource."""
    headroom_bytes: int
    """Headroom of healthy devices of the resource on open nodes, and on closed nodes."""
    closed_bytes: int
    stranded_bytes: int
    """The part of the headroom that no such pod can use, because the device has no free replica,
    or its node has fewer free replicas than the pod requests."""
    replicas_free: int
    """Number of free replicas on open nodes, and how many of them are on devices that lack memory
    for the pod."""
    replicas_stranded: int
    largest_fitting_bytes: int | None
    """The largest request per device that fits; null if reasons other than memory reject the
    pod."""


class DeviceClassView(View):
    model: str
    memory_bytes: int
    devices: int
    nodes: int
    largest_fitting_bytes: int | None
    """The largest request that fits on a node with such a device; null if all these nodes reject
    the pod for a reason other than memory."""


class CapacityNodeView(View):
    name: str
    pods: int
    """Number of pods that fit there now. If ``counted`` is false, this is 1, a lower bound."""
    counted: bool
    reason: str | None
    """Why one pod does not fit; null if it fits."""
    message: str | None
    headroom_bytes: int
    stranded_bytes: int
    replicas_free: int
    replicas_stranded: int


class CapacityBody(Body):
    request: AskView
    pods: int
    """Number of pods that fit now if they are placed one after another, before any is observed."""
    pods_at_least: bool
    """Whether ``pods`` is a lower bound, because not every node was counted."""
    fullness: str
    """fits (one more pod fits), fragmented (enough memory is free in total, but not on any one
    node), full, or closed (no node with such a device takes pods)."""
    message: str
    space: SpaceView
    classes: list[DeviceClassView]
    reasons: list[ReasonView]
    ineligible: list[ReasonView]
    """Nodes that such a pod cannot use, because they are cordoned or have a taint that it does not
    tolerate."""
    not_checked: list[str]
    """Checks of kube-scheduler and the API server that this answer does not include."""
    nodes: list[CapacityNodeView]
    """The nodes by name; empty unless ``by_node=true`` is requested."""


Vram = Annotated[
    str,
    Query(
        max_length=256,
        description="As in headroom.gpu/vram. Default: the memory share of one replica.",
        examples=["8Gi"],
    ),
]
Gpus = Annotated[int, Query(ge=1, le=1024, description="GPUs of each pod.", examples=[1])]
Resource = Annotated[
    str, Query(max_length=256, description="Extended resource.", examples=["nvidia.com/gpu"])
]
Tolerate = Annotated[
    str,
    Query(
        max_length=1024,
        description="Keys of taints that the pods tolerate, separated by commas. Taints of GPU "
        "resources are always tolerated.",
        examples=["dedicated"],
    ),
]
ByNode = Annotated[
    bool, Query(description="true: list every node with its capacity.", examples=["true"])
]
MostNodes = Annotated[
    int,
    Query(
        ge=0,
        le=100_000,
        description="Number of nodes on which pods are counted, starting with the nodes that have "
        "the most free memory. On any other node, one pod counts if it fits. 500 nodes take "
        "about half a second.",
        examples=[500],
    ),
]

#: Maximum number of nodes and sizes of pods for which counts are kept.
_MOST_COUNTS = 2000


class PodCounts:
    """Keeps how many pods of a size fit on a node until the node changes, because most nodes do not
    change between two readers. Several threads may use it."""

    def __init__(self) -> None:
        self._lock = Lock()
        #: The terms of the node, and the number of pods, by the kind of request and the node.
        self._counts: Bounded[tuple[Kind, str], tuple[NodeTerms, int]] = Bounded(_MOST_COUNTS)

    def of(self, cluster: Cluster, verdicts: Verdicts, positions: Sequence[int]) -> dict[int, int]:
        """Return the number of pods that fit at each of these positions in the verdicts."""
        nodes = {i: verdicts.snap.nodes[int(verdicts.rows[i])] for i in positions}
        kind = verdicts.request.kind
        with self._lock:
            known = {i: self._counts.get((kind, node.name)) for i, node in nodes.items()}
        found = {i: each[1] for i, each in known.items() if each and each[0] is nodes[i]}
        counted = dict(pod_counts(cluster, verdicts, [i for i in positions if i not in found]))
        with self._lock:
            for i, count in counted.items():
                self._counts[kind, nodes[i].name] = nodes[i], count
        return found | counted


routes = APIRouter()


@routes.get("/v1/capacity", response_model=CapacityBody)
def capacity(
    context: InContext,
    http: Request,
    snap: Newest,
    vram: Vram = "",
    count: Gpus = 1,
    resource: Resource = "",
    tolerate: Tolerate = "",
    by_node: ByNode = False,
    most_nodes: MostNodes = 500,
) -> Response:
    """Count how many more pods of one size fit now, placed one after another as filter places them.
    Report whether the cluster is full or fragmented, the largest request that fits, and what is
    stranded: memory without replicas, and replicas without memory."""
    cluster = context.cluster
    try:
        if vram:
            parse_vram(vram)
    except BadAnnotation as err:
        text = f"query vram: {shortened(err.value)} {err.why}. Example: {err.example}"
        raise HTTPException(422, text) from err
    pod = made_up(
        "asked", vram, count, resource or usual_resource(cluster), "", tolerate.split(",")
    )
    request = by_headroom(of_size(understood(cluster, pod, "query resource")))
    snap = context.seen_by(pod, snap)
    eligible = eligible_nodes(pod, snap, cluster.node)
    verdicts = verdicts_on(cluster, request, snap, eligible.rows, context.monotonic_s())
    free_space = space(verdicts)
    fitting = np.flatnonzero(verdicts.fits)
    free_bytes = snap.node_headroom_bytes[verdicts.rows[fitting]]
    by_free_bytes = fitting[np.argsort(-free_bytes, kind="stable")].tolist()
    counts = shared(http, PodCounts)
    pods = counts.of(cluster, verdicts, by_free_bytes[:most_nodes])
    # Each node that was not counted adds one pod.
    total = sum(pods.values()) + len(by_free_bytes[most_nodes:])
    at_least = len(by_free_bytes) > most_nodes
    body = CapacityBody(
        **context.head(snap),
        request=ask_view(request.containers[0]),
        pods=total,
        pods_at_least=at_least,
        fullness=free_space.fullness,
        message=capacity_summary(free_space, total, at_least),
        space=space_view(free_space),
        classes=[DeviceClassView.of(each) for each in device_classes(verdicts)],
        reasons=_reasons(verdicts),
        ineligible=[obstacle_view(*pair) for pair in eligible.counts()],
        not_checked=[AMOUNTS, "ResourceQuotas"],
        nodes=[],
    )
    views = _by_node(verdicts, pods) if by_node else iter(())
    return listed(body, "nodes", views)


def _reasons(verdicts: Verdicts) -> list[ReasonView]:
    """Count the nodes on which the pod does not fit by reason, most frequent first."""
    counts = Counter(verdicts.reason(i) for i in range(len(verdicts.rows)))
    return [reason_view(reason, n) for reason, n in counts.most_common() if reason is not None]


def _by_node(verdicts: Verdicts, pods: dict[int, int]) -> Iterator[CapacityNodeView]:
    """Yield the nodes by name. ``pods`` maps the index of each counted node to its number of
    pods."""
    names = [verdicts.snap.nodes[row].name for row in verdicts.rows.tolist()]
    spaces = node_spaces(verdicts)
    for i in sorted(range(len(names)), key=names.__getitem__):
        reason = verdicts.reason(i)
        yield CapacityNodeView(
            name=names[i],
            pods=pods.get(i, int(reason is None)),
            counted=i in pods or reason is not None,
            reason=reason.code if reason else None,
            message=reason.sentence if reason else None,
            headroom_bytes=int(spaces.headroom_bytes[i]),
            stranded_bytes=int(spaces.stranded_bytes[i]),
            replicas_free=int(spaces.replicas_free[i]),
            replicas_stranded=int(spaces.replicas_stranded[i]),
        )


def space_view(found: Space) -> SpaceView:
    return SpaceView.of(found)
