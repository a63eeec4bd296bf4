"""Nodes and their devices, with the memory accounting of every device."""

from bisect import bisect_right
from collections.abc import Iterator
from enum import Enum
from typing import Annotated, Any, NamedTuple

import numpy as np
from fastapi import APIRouter, Depends, HTTPException, Path, Query
from numpy.typing import NDArray
from starlette.responses import Response

from extender.console.bodies import stamp
from extender.console.context import Context
from extender.console.node_views import NodeBody, NodesBody, NodeView, node_view
from extender.console.responses import (
    TAGGED,
    UNKNOWN,
    AskedPage,
    IfNoneMatch,
    encoded,
    is_current,
    listed,
    unchanged,
)
from extender.placement.device_accounting import DeviceTerms
from extender.placement.snapshot import NodeTerms, Rows, Snapshot

NodeName = Annotated[str, Path(examples=["gpu-a"])]
Search = Annotated[
    str,
    Query(
        max_length=256,
        description="Only nodes with this text in their name or reason, in the uuid, model, "
        "resource or health of a device, or in namespace/name of a pod. Ignores case.",
        examples=["a100"],
    ),
]
Troubled = Annotated[
    bool,
    Query(
        description="true: only nodes that take no pods, or have an unhealthy or overcommitted "
        "device.",
        examples=["true"],
    ),
]


class Order(Enum):
    NAME = "name"
    FULLEST = "fullest"


AskedOrder = Annotated[
    Order,
    Query(
        description="fullest: nodes that take no pods first, then by their fullest device; an "
        "unhealthy device counts as full.",
        examples=["fullest"],
    ),
]
_PPM = 1_000_000
#: Greater than the fullness of any device.
_MOST_PPM = 10**15


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    Newest = Annotated[Snapshot, Depends(context.newest)]

    def view(node: NodeTerms) -> NodeView:
        return node_view(node, context.cluster, context.monotonic_s(), context.wall_s())

    @routes.get("/v1/nodes", response_model=NodesBody, responses=TAGGED)
    def nodes(
        snap: Newest,
        page: AskedPage,
        search: Search = "",
        troubled: Troubled = False,
        order: AskedOrder = Order.NAME,
        etag: IfNoneMatch = None,
    ) -> Response:
        """List all nodes with the memory accounting of every device. The next page continues after
        the last node of this one, also if nodes appeared or disappeared meanwhile."""
        tag = context.tag(snap)
        if is_current(etag, tag):
            return unchanged(tag)
        wanted, now_s = search.lower(), context.monotonic_s()

        def shows(node: NodeTerms) -> bool:
            return not (troubled and _is_sound(node, now_s)) and (not wanted or _has(node, wanted))

        rows = np.arange(len(snap.nodes))
        if troubled or wanted:
            rows = np.array([row for row, node in enumerate(snap.nodes) if shows(node)], int)
        positions = _Sorting(snap) if order is Order.NAME else _by_fullness(snap)
        ordered = positions.sorted(rows)
        begin = bisect_right(ordered, page.after, key=positions.of) if page.after else 0
        end = len(ordered) if page.limit is None else min(begin + page.limit, len(ordered))
        shown, remaining = ordered[begin:end], len(ordered) - end
        more = positions.of(shown[-1]) if remaining else None
        body = NodesBody(
            generatedAt=stamp(context.wall_s()),
            snapshot_generation=snap.generation,
            matching=len(ordered),
            remaining=remaining,
            continue_=more,
            nodes=[],
            overcommitted_bytes=context.overcommitted_bytes(),
        )
        views = (view(snap.nodes[row]) for row in shown)
        return listed(body, "nodes", views, tag)

    @routes.get("/v1/nodes/{name}", response_model=NodeBody, responses=UNKNOWN | TAGGED)
    def one_node(name: NodeName, snap: Newest, etag: IfNoneMatch = None) -> Response:
        """Return one node, as in the list of nodes."""
        tag = context.tag(snap)
        if is_current(etag, tag):
            return unchanged(tag)
        if name not in snap.row_of:
            raise HTTPException(
                404, f"node {name} is not known; GET /v1/nodes lists the known nodes"
            )
        body = NodeBody(
            generatedAt=stamp(context.wall_s()),
            snapshot_generation=snap.generation,
            node=view(snap.nodes[snap.row_of[name]]),
        )
        return encoded(body, tag)

    return routes


def _is_sound(node: NodeTerms, now_s: float) -> bool:
    return (
        node.reason is None
        and node.fresh_until_s >= now_s
        and all(terms.health_issue is None and terms.headroom_bytes >= 0 for terms in node.devices)
    )


class _Sorting(NamedTuple):
    """An order of the nodes, and their positions in it."""

    snap: Snapshot
    #: Sort keys of each row that precede its name, ascending.
    keys: tuple[Rows, ...] = ()

    def sorted(self, rows: Rows) -> list[int]:
        keys: list[NDArray[Any]] = [self.snap.name_rank, *reversed(self.keys)]
        found: list[int] = rows[np.lexsort([key[rows] for key in keys])].tolist()
        return found

    def of(self, row: int) -> str:
        """Return the position of a row as text: it is unique and sorts like the nodes."""
        return "_".join([*(f"{key[row]:016d}" for key in self.keys), self.snap.nodes[row].name])


def _by_fullness(snap: Snapshot) -> _Sorting:
    """Order nodes by their fullest device; an unhealthy device counts as twice full."""
    columns = snap.columns
    allocatable_bytes = np.maximum(columns.allocatable_bytes, 1)
    taken_bytes = columns.allocatable_bytes.astype(np.float64) - columns.headroom_bytes
    taken = np.clip(_PPM * taken_bytes / allocatable_bytes, 0, _MOST_PPM).astype(np.int64)
    fullest = np.where(columns.health_issue > 0, 2 * _PPM, taken).max(axis=1, initial=0)
    return _Sorting(snap, ((snap.node_reason == 0).astype(np.int64), _MOST_PPM - fullest))


def _has(node: NodeTerms, wanted: str) -> bool:
    return any(wanted in word.lower() for word in _words(node))


def _words(node: NodeTerms) -> Iterator[str]:
    yield node.name
    if node.reason is not None:
        yield node.reason.sentence
    yield node.detail
    yield node.unmeasured
    for terms in node.devices:
        yield from _device_words(terms)


def _device_words(terms: DeviceTerms) -> Iterator[str]:
    yield terms.device.uuid
    yield terms.device.model
    yield terms.device.resource
    if terms.health_issue is not None:
        yield terms.health_issue.code
    yield terms.health_detail
    for holder in terms.holders:
        yield f"{holder.namespace}/{holder.name}"
