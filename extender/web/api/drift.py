"""Promised beside measured, predicted beside actual."""

from collections.abc import Iterator
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from extender.placement.snapshot import Snapshot
from extender.web.api.answers import (
    TABLE_TOO,
    TAGGED,
    AskedForm,
    Form,
    Held,
    holds,
    listed,
    unchanged,
)
from extender.web.api.context import Context
from extender.web.api.tables import Field, Table, gib
from extender.web.drift import DriftBody, DriftView, drift_body, drift_views

Pods = Annotated[
    bool, Query(description="false: only the counts and the misses.", examples=["false"])
]


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    Newest = Annotated[Snapshot, Depends(context.newest)]

    @routes.get("/v1/drift", response_model=DriftBody, responses=TABLE_TOO | TAGGED)
    def drift(
        snap: Newest, pods: Pods = True, form: AskedForm = Form.JSON, held: Held = None
    ) -> Response:
        """Every pod with a promise: what it was promised and what it uses, where it was predicted
        to be and where it is; how many predictions were right, and the misses one by one."""
        watched = context.cluster.observations
        tag = context.tag(snap, *dict(watched.totals).values(), len(watched.misses))
        if holds(held, tag):
            return unchanged(tag)
        body = drift_body(context.cluster, snap.generation, context.wall_s(), context.monotonic_s())
        views = drift_views(context.cluster) if pods else iter(())
        return listed(form, body, "pods", views, _TABLE, tag)

    return routes


def _rows(pod: DriftView) -> Iterator[tuple[Field, ...]]:
    """A line for each device that the pod is on, and one for a pod that is on none yet."""
    which = pod.namespace, pod.name, pod.node, pod.result
    predicted = ",".join(pod.choice or pod.predicted)
    for device in pod.observed:
        measured = gib(device.promised_bytes), gib(device.measured_bytes)
        yield (*which, device.uuid, *measured, gib(pod.overuse_bytes), predicted, pod.message)
    if not pod.observed:
        yield (*which, None, None, None, None, predicted, pod.message)


_TABLE: Table[DriftView] = Table(
    (
        "NAMESPACE",
        "POD",
        "NODE",
        "PREDICTION",
        "IS-ON",
        "PROMISED(GiB)",
        "MEASURED(GiB)",
        "OVERUSE(GiB)",
        "PREDICTED",
        "MISSED-BECAUSE",
    ),
    _rows,
)
