"""What kubelets, Prometheus and browsers ask for: probes, metrics and the page."""

from pathlib import Path
from typing import Annotated

from fastapi import APIRouter, Depends
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.responses import HTMLResponse, PlainTextResponse, Response

from extender.placement.snapshot import Snapshot
from extender.web.api.context import Context

_PAGE = Path(__file__).parents[1].joinpath("page.html").read_text(encoding="utf-8")


def router(context: Context) -> APIRouter:
    routes = APIRouter()
    Newest = Annotated[Snapshot, Depends(context.newest)]

    @routes.get("/", response_class=HTMLResponse, include_in_schema=False)
    def page() -> str:
        return _PAGE

    @routes.get("/healthz", response_class=PlainTextResponse)
    def healthz() -> str:
        """Whether the process answers at all."""
        return "ok\n"

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
