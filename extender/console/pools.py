"""Totals of node pools, or of the nodes with one value of a label, by GPU model."""

from collections import Counter

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from extender.console.fleet import ModelView, shared_sums
from extender.console.fleet_map import Label, group_of
from extender.console.pods import shared_rows
from extender.console.responses import Body, encoded
from extender.console.view_context import InContext, Newest


class PoolView(ModelView):
    #: The value of the label; empty for nodes without it.
    pool: str
    #: Nodes with a device of the model.
    nodes: int
    #: Bound pods on devices of the model.
    pods: int


class PoolsBody(Body):
    #: The most allocatable memory first.
    pools: list[PoolView]


routes = APIRouter()


@routes.get("/v1/pools", response_model=PoolsBody)
def pools(context: InContext, request: Request, snap: Newest, label: Label = "") -> Response:
    """Return totals of each pool and GPU model; with ``label``, of each of its values."""
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
    sums = shared_sums(request).grouped(snap, context.monotonic_s(), groups.__getitem__)
    views = [
        PoolView(pool=key[0], model=key[1], nodes=nodes[key], pods=pods[key], **each)
        for key, each in sums.items()
    ]
    views.sort(key=lambda each: (-each.allocatable_bytes, each.pool, each.model))
    return encoded(PoolsBody(**context.head(snap), pools=views))
