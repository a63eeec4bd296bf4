"""Reserved and measured memory, predicted and actual devices of every pod."""

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from extender.console.context import Context
from extender.console.drift_report import DriftBody, drift_body, drift_views
from extender.console.responses import (
    TAGGED,
    IfNoneMatch,
    is_current,
    listed,
    unchanged,
)
from extender.placement.snapshot import Snapshot

Pods = Annotated[
    bool,
    Query(
        description="false: only the counts and the misses, without the pods.", examples=["false"]
    ),
]


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    Newest = Annotated[Snapshot, Depends(context.newest)]

    @routes.get("/v1/drift", response_model=DriftBody, responses=TAGGED)
    def drift(snap: Newest, pods: Pods = True, etag: IfNoneMatch = None) -> Response:
        """List every pod with a reservation: its reserved and used memory, its predicted and actual
        devices. Count the predictions by result, and list the misses."""
        watched = context.cluster.observations
        tag = context.tag(snap, *dict(watched.totals).values(), len(watched.misses))
        if is_current(etag, tag):
            return unchanged(tag)
        body = drift_body(context.cluster, snap.generation, context.wall_s(), context.monotonic_s())
        views = drift_views(context.cluster) if pods else iter(())
        return listed(body, "pods", views, tag)

    return routes
