"""Probes for the kubelet, and metrics for Prometheus."""

from typing import Annotated

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import PlainTextResponse, Response

from extender.console.context import Context
from extender.placement.snapshot import Snapshot


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    Newest = Annotated[Snapshot, Depends(context.newest)]

    @routes.get(
        "/healthz",
        response_class=PlainTextResponse,
        responses={
            503: {"content": {"text/plain": {}}, "description": "Loops that make no progress"}
        },
    )
    def healthz() -> Response:
        """Return 200 if all loops of the process make progress, otherwise 503 with the loops that
        have made none for 30 s."""
        stuck = context.stuck()
        return PlainTextResponse(f"{stuck or 'ok'}\n", 503 if stuck else 200)

    @routes.get(
        "/readyz",
        response_class=PlainTextResponse,
        responses={
            503: {"content": {"text/plain": {}}, "description": "Why decisions cannot be made yet"}
        },
    )
    def readyz() -> Response:
        """Return 200 if decisions can be made, otherwise 503 with the reason."""
        missing = context.unready()
        return PlainTextResponse(f"{missing or 'ok'}\n", 503 if missing else 200)

    @routes.get("/metrics", response_class=PlainTextResponse)
    def metrics(snap: Newest) -> Response:
        """Return the metrics in the format of Prometheus."""
        text = context.telemetry.exposition(snap, not context.unready())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    return routes
