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
    Body,
    ReasonView,
    encoded,
    reason_view,
)
from headroom.console.view import View
from headroom.console.view_context import InContext, Newest, shared
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.device_accounting import DeviceTerms, first_of_each_memory
from headroom.core.placement.snapshot import REASONS, NodeTerms, Snapshot
from headroom.core.placement.updated_nodes import UpdatedNodes


class ModelView(View):
    """All devices of one model. A pod counts once, even if it could get one of several devices.

    Memory that several devices share counts once in sums of bytes, under the model of the first of
    these devices.
    """

    model: str
    devices: int
    allocatable_bytes: int
    reservation_bytes: int
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


@routes.get("/v1/fleet", response_model=FleetBody)
def fleet(context: InContext, request: Request, snap: Newest) -> Response:
    """Return totals over all devices by GPU model, and the nodes that take no pods."""
    now_s = context.monotonic_s()
    return encoded(
        FleetBody(
            **context.head(snap),
            nodes=len(snap.nodes),
            closed=[reason_view(*each) for each in _closed(snap, now_s).most_common()],
            models=shared(request, ModelSums).of(context.cluster, snap, now_s),
            overcommitted_bytes=context.overcommitted_bytes(),
            pending_pods=len(context.cluster.unbound()),
        )
    )


#: The fields of ``ModelView`` after ``model``, which are also the fields of the sums.
_FIELDS = tuple(ModelView.model_fields)[1:]
#: Model -> its sums on one node, in the order of ``_FIELDS``.
_NodeSums = Mapping[str, list[int]]


class ModelSums:
    """Sums over all devices by model. Several threads may use it.

    The sums of each node are kept, because a large fleet has tens of thousands of devices, of which
    few change between two calls. May be used by several threads.
    """

    def __init__(self) -> None:
        self._lock = Lock()
        self._updated = UpdatedNodes()
        #: Node -> its sums.
        self._nodes: dict[str, _NodeSums] = {}

    def of(self, cluster: Cluster, snap: Snapshot, now_s: float) -> list[ModelView]:
        """Return the sums of each model, the largest first."""
        found: dict[str, list[list[int]]] = defaultdict(list)
        with self._lock:
            for row in self._updated.since_last(snap, now_s):
                node = snap.nodes[row]
                self._nodes[node.name] = _sums(cluster, node, _is_open(node, now_s))
            for name in self._nodes.keys() - snap.row_of.keys():
                del self._nodes[name]
            for of_node in self._nodes.values():
                for model, sums in of_node.items():
                    found[model].append(sums)
        models = [
            ModelView(
                model=model, **dict(zip(_FIELDS, map(sum, zip(*sums, strict=True)), strict=True))
            )
            for model, sums in found.items()
        ]
        return sorted(models, key=lambda each: (-each.allocatable_bytes, each.model))


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
        sums["reservation_bytes"] += terms.reservation_bytes
        sums["unattributed_bytes"] += terms.unattributed_bytes + terms.unreserved_pods_bytes
        sums["used_bytes"] += max(0, terms.device.used_bytes)
    for model, unconfirmed_bytes in unconfirmed_by_model(cluster, node).items():
        found[model]["reservation_bytes"] += unconfirmed_bytes
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
