"""What kubelets and Prometheus ask for: probes and metrics."""

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
        responses={503: {"content": {"text/plain": {}}, "description": "What is stuck"}},
    )
    def healthz() -> Response:
        """Whether the process answers, and each of its loops makes progress; 503 with the loops
        that have made none for 30 s."""
        stuck = context.stuck()
        return PlainTextResponse(f"{stuck or 'ok'}\n", 503 if stuck else 200)

    @routes.get(
        "/readyz",
        response_class=PlainTextResponse,
        responses={503: {"content": {"text/plain": {}}, "description": "What is missing"}},
    )
    def readyz() -> Response:
        """Whether decisions can be made; 503 with what is missing when not."""
        missing = context.unready()
        return PlainTextResponse(f"{missing or 'ok'}\n", 503 if missing else 200)

    @routes.get("/metrics", response_class=PlainTextResponse)
    def metrics(snap: Newest) -> Response:
        """For Prometheus."""
        told = context.telemetry.exposition(snap, not context.unready())
        return Response(told, media_type=CONTENT_TYPE_LATEST)

    return routes
