"""Nodes and their devices, with every term of the equation."""

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
    Held,
    encoded,
    holds,
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
        description="Only nodes with this in their name, their reason or its details, or in a "
        "device's uuid, model, resource or fence, or in namespace/name of a pod there; in "
        "capitals or not.",
        examples=["a100"],
    ),
]
Troubled = Annotated[
    bool,
    Query(
        description="true: only nodes that take nothing, or with a device that is fenced or "
        "overcommitted.",
        examples=["true"],
    ),
]


class Order(Enum):
    NAME = "name"
    FULLEST = "fullest"


AskedOrder = Annotated[
    Order,
    Query(
        description="fullest: those that take nothing first, then those of which a device is "
        "fullest, or fenced.",
        examples=["fullest"],
    ),
]
_PPM = 1_000_000
#: Fuller than any device.
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
        held: Held = None,
    ) -> Response:
        """Every node with every term of the equation of every device. The next page goes on after
        the last place of this one, whatever has come or gone meanwhile."""
        tag = context.tag(snap)
        if holds(held, tag):
            return unchanged(tag)
        wanted, now_s = search.lower(), context.monotonic_s()

        def shows(node: NodeTerms) -> bool:
            return not (troubled and _is_sound(node, now_s)) and (not wanted or _has(node, wanted))

        rows = np.arange(len(snap.nodes))
        if troubled or wanted:
            rows = np.array([row for row, node in enumerate(snap.nodes) if shows(node)], int)
        places = _Places(snap) if order is Order.NAME else _by_fullness(snap)
        ordered = places.sorted(rows)
        begin = bisect_right(ordered, page.after, key=places.of) if page.after else 0
        end = len(ordered) if page.limit is None else min(begin + page.limit, len(ordered))
        shown, remaining = ordered[begin:end], len(ordered) - end
        more = places.of(shown[-1]) if remaining else None
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
    def one_node(name: NodeName, snap: Newest, held: Held = None) -> Response:
        """One node, as in the list of all."""
        tag = context.tag(snap)
        if holds(held, tag):
            return unchanged(tag)
        if name not in snap.row_of:
            raise HTTPException(
                404, f"node {name} is not known; GET /v1/nodes lists those that are"
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


class _Places(NamedTuple):
    """Where nodes stand in an order."""

    snap: Snapshot
    #: Of each row: what is looked at before its name, the smaller first.
    keys: tuple[Rows, ...] = ()

    def sorted(self, rows: Rows) -> list[int]:
        keys: list[NDArray[Any]] = [self.snap.name_rank, *reversed(self.keys)]
        found: list[int] = rows[np.lexsort([key[rows] for key in keys])].tolist()
        return found

    def of(self, row: int) -> str:
        """Sorts as text, and is unlike any other node's."""
        return "_".join([*(f"{key[row]:016d}" for key in self.keys), self.snap.nodes[row].name])


def _by_fullness(snap: Snapshot) -> _Places:
    """A device is as full as is committed of it; a fenced one counts as twice full."""
    columns = snap.columns
    allocatable_bytes = np.maximum(columns.allocatable_bytes, 1)
    taken_bytes = columns.allocatable_bytes.astype(np.float64) - columns.headroom_bytes
    taken = np.clip(_PPM * taken_bytes / allocatable_bytes, 0, _MOST_PPM).astype(np.int64)
    fullest = np.where(columns.health_issue > 0, 2 * _PPM, taken).max(axis=1, initial=0)
    return _Places(snap, ((snap.node_reason == 0).astype(np.int64), _MOST_PPM - fullest))


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
