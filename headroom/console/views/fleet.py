"""Totals of the fleet by GPU model, and the reasons why nodes take no pods."""

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from threading import Lock

import numpy as np
from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.facts.gpu_pods import unconfirmed_by_model
from headroom.console.responses import (
    TAGGED,
    Body,
    IfNoneMatch,
    ReasonView,
    is_current,
    joined,
    reason_view,
    unchanged,
)
from headroom.console.view import View
from headroom.console.view_context import InContext, Newest, shared
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.device_accounting import DeviceTerms, first_of_each_memory
from headroom.core.placement.per_node import PerNode, Sums
from headroom.core.placement.snapshot import REASONS, NodeTerms, Snapshot


class ModelView(View):
    """All devices of one model. A pod counts once, even if it could get one of several devices.

    Memory that several devices share counts once in sums of bytes, under the model of the first of
    these devices.
    """

    model: str
    devices: int
    allocatable_bytes: int
    reserved_total_bytes: int
    unattributed_bytes: int
    """Use by no known pod and by pods without a reservation."""
    used_bytes: int
    headroom_bytes: int
    """Headroom of devices that take pods. An overcommitted device counts as 0."""
    replicas_free: int
    unhealthy: int
    cordoned: int
    overcommitted: int


class FleetBody(Body):
    nodes: int
    closed: list[ReasonView]
    """Why nodes take no pods, with the number of nodes, most frequent first."""
    models: list[ModelView]
    """Models with the most devices first."""
    overcommitted_bytes: int
    pending_pods: int


routes = APIRouter()


@routes.get("/v1/fleet", response_model=FleetBody, responses=TAGGED)
def fleet(context: InContext, request: Request, snap: Newest, etag: IfNoneMatch = None) -> Response:
    """Return totals over all devices by GPU model, and the nodes that take no pods."""
    pending_pods = len(context.cluster.unbound())
    tag = context.tag(snap, pending_pods)
    if is_current(etag, tag):
        return unchanged(tag)
    now_s = context.monotonic_s()

    def compute() -> Response:
        body = FleetBody(
            **context.head(snap),
            nodes=len(snap.nodes),
            closed=[reason_view(*each) for each in _closed(snap, now_s).most_common()],
            models=[],
            overcommitted_bytes=context.overcommitted_bytes(),
            pending_pods=pending_pods,
        )
        return joined(body, "models", shared_sums(request).of(context.cluster, snap, now_s), tag)

    return context.answers.of(request, now_s, compute)


#: The fields of ``ModelView`` after ``model``, which are also the fields of the sums.
_FIELDS = tuple(ModelView.model_fields)[1:]
#: Model -> its sums on one node, in the order of ``_FIELDS``.
_NodeSums = Mapping[str, list[int]]


class ModelSums:
    """Sums over all devices by model. Several threads may use it.

    The totals are kept, because a large fleet has tens of thousands of devices and few of them
    change between two calls. Only the sums of nodes that changed are subtracted and added again.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._nodes = PerNode[_NodeSums]()
        self._sums = Sums[str, int]()

    def of(self, cluster: Cluster, snap: Snapshot, now_s: float) -> list[ModelView]:
        """Return the sums of each model, largest first."""
        with self._lock:
            self._update(cluster, snap, now_s)
            models = [
                ModelView(model=model, **dict(zip(_FIELDS, totals, strict=True)))
                for model, totals in self._sums.totals.items()
            ]
        return sorted(models, key=lambda each: (-each.allocatable_bytes, each.model))

    def _update(self, cluster: Cluster, snap: Snapshot, now_s: float) -> None:
        changes = self._nodes.update(
            snap,
            lambda node: (node.devices, _is_open(node, now_s)),
            lambda node, _, is_open: _sums(cluster, node, is_open),
            now_s,
        )
        for _, before, after in changes:
            self._sums.replace(before, after)


def shared_sums(request: Request) -> ModelSums:
    """Return the sums of all nodes, which all readers of the application share."""
    return shared(request, ModelSums)


def _sums(cluster: Cluster, node: NodeTerms, is_open: bool) -> _NodeSums:
    """Return the sums of a node. Memory that devices share counts once, for the first device."""
    found: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(_FIELDS, 0))
    for terms in node.devices:
        sums = found[terms.device.model]
        sums["devices"] += 1
        sums["replicas_free"] += terms.device.replicas.free if _takes_pods(terms, is_open) else 0
        sums["unhealthy"] += terms.unhealthy is not None
        sums["cordoned"] += terms.cordoned
        sums["overcommitted"] += terms.headroom_bytes < 0
    for terms in first_of_each_memory(node.devices):
        sums = found[terms.device.model]
        sums["allocatable_bytes"] += terms.allocatable_bytes
        sums["reserved_total_bytes"] += terms.reservation_bytes
        sums["unattributed_bytes"] += terms.unattributed_bytes + terms.unreserved_pods_bytes
        sums["used_bytes"] += max(0, terms.device.used_bytes)
    for model, unconfirmed_bytes in unconfirmed_by_model(cluster, node).items():
        found[model]["reserved_total_bytes"] += unconfirmed_bytes
    for terms in _taking_pods(node, is_open):
        found[terms.device.model]["headroom_bytes"] += max(0, terms.headroom_bytes)
    return {model: list(sums.values()) for model, sums in found.items()}


def headroom_bytes(snap: Snapshot, now_s: float) -> int:
    """Return the sum of ``ModelView.headroom_bytes`` of a snapshot, which may be hypothetical."""
    return sum(
        max(0, terms.headroom_bytes)
        for node in snap.nodes
        for terms in _taking_pods(node, _is_open(node, now_s))
    )


def _is_open(node: NodeTerms, now_s: float) -> bool:
    return node.reason is None and node.fresh_until_s >= now_s


def _taking_pods(node: NodeTerms, is_open: bool) -> Iterator[DeviceTerms]:
    """Yield one device for each memory: the first, if any device with this memory takes pods."""
    return first_of_each_memory([each for each in node.devices if _takes_pods(each, is_open)])


def _takes_pods(terms: DeviceTerms, is_open: bool) -> bool:
    return is_open and terms.health_issue is None


def _closed(snap: Snapshot, now_s: float) -> Counter[Reason]:
    """Count the nodes that take no pods by reason."""
    counts = np.bincount(snap.node_reason, minlength=len(REASONS)).tolist()
    closed = Counter({why: n for why, n in zip(REASONS, counts, strict=True) if why and n})
    stale = (snap.node_reason == 0) & (snap.fresh_until_s < now_s)
    return closed + Counter({Reason.STALE_REPORT: int(stale.sum())})
