"""Totals by GPU model for each node pool, or for each value of a node label."""

from collections import Counter, defaultdict
from collections.abc import Mapping
from itertools import islice

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from headroom.console.facts.gpu_pods import requested_bytes
from headroom.console.responses import Body, encoded
from headroom.console.view_context import Context, InContext, Newest
from headroom.console.views.fleet import ModelView, shared_sums
from headroom.console.views.fleet_map import Label, group_of
from headroom.console.views.pods import shared_rows
from headroom.contract.kube import Pod
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import Snapshot
from headroom.core.rules.eligible_nodes import eligibility_key, eligible_nodes

#: Waiting pods are counted for at most this many different selectors, affinities and tolerations,
#: because checking each of them on all nodes takes some milliseconds in a large cluster.
MOST_SELECTORS = 50

#: (value of the label, model)
_Pool = tuple[str, str]


class PoolView(ModelView):
    pool: str
    """The value of the label; empty for nodes without the label."""
    nodes: int
    """Number of nodes with a device of the model."""
    pods: int
    """Number of bound pods on devices of the model."""
    waiting_pods: int
    """Number of pending pods that may run on a node of the pool with such a device, and the bytes
    that they request. A pod counts in each such pool. A share of a device counts as 0 bytes."""
    waiting_bytes: int


class PoolsBody(Body):
    pools: list[PoolView]
    """Sorted by allocatable memory, most first."""


routes = APIRouter()


@routes.get("/v1/pools", response_model=PoolsBody)
def pools(context: InContext, request: Request, snap: Newest, label: Label = "") -> Response:
    """Return totals of each pool and GPU model, or with ``label`` of each value of the label."""
    return context.answers.of(
        request, context.monotonic_s(), lambda: _answer(context, request, snap, label)
    )


def _answer(context: Context, request: Request, snap: Snapshot, label: str) -> Response:
    groups = {node.name: group_of(context, node.name, label) for node in snap.nodes}
    nodes = Counter(
        (groups[node.name], model)
        for node in snap.nodes
        for model in {terms.device.model for terms in node.devices}
    )
    pods = Counter(
        (groups[pod.node], pod.model)
        for pod in shared_rows(request).of(context.cluster, snap)
        if pod.node in groups
    )
    waiting_pods, waiting_bytes = _waiting(context, snap, groups)
    sums = shared_sums(request).grouped(
        context.cluster, snap, context.monotonic_s(), groups.__getitem__
    )
    views = [
        PoolView(
            pool=key[0],
            model=key[1],
            nodes=nodes[key],
            pods=pods[key],
            waiting_pods=waiting_pods[key],
            waiting_bytes=waiting_bytes[key],
            **each,
        )
        for key, each in sums.items()
    ]
    views.sort(key=lambda each: (-each.allocatable_bytes, each.pool, each.model))
    return encoded(PoolsBody(**context.head(snap), pools=views))


def _waiting(
    context: Context, snap: Snapshot, groups: Mapping[str, str]
) -> tuple[Counter[_Pool], Counter[_Pool]]:
    """Return the number of pending pods that may run in each pool, and the bytes that they request.

    ``groups`` maps each node to the value of the label.
    """
    alike: dict[tuple[bytes, frozenset[str]], list[tuple[Pod, int]]] = defaultdict(list)
    for pod in context.cluster.unbound():
        asked = context.cluster.understand(pod)
        if isinstance(asked, VramRequest):
            resources = frozenset(each.resource for each in asked.asks)
            alike[eligibility_key(pod), resources].append((pod, requested_bytes(asked)))
    pods, amounts = Counter[_Pool](), Counter[_Pool]()
    for (_, resources), found in islice(alike.items(), MOST_SELECTORS):
        rows = eligible_nodes(found[0][0], snap, context.cluster.node).rows.tolist()
        places = {
            (groups[snap.nodes[row].name], terms.device.model)
            for row in rows
            for terms in snap.nodes[row].devices
            if terms.device.resource in resources
        }
        for place in places:
            pods[place] += len(found)
            amounts[place] += sum(count_bytes for _, count_bytes in found)
    return pods, amounts
