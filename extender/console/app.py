"""The debug API and its page: read-only views of the cluster state, on a separate port.

Most handlers are plain functions, which run and encode their answers on threads. They read
immutable data. The snapshot is taken before they run, on the event loop, because only the event
loop may make one. To add a group of views, add a module with a ``router`` function, and list it in
``_VIEWS``.
"""

from collections.abc import Awaitable, Callable
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from extender.console import (
    capacity,
    decisions,
    devices,
    drift,
    events,
    explain,
    fleet,
    journal,
    nodes,
    page_files,
    pending,
    score,
    snapshot,
    status,
    whatif,
)
from extender.console.auth import Guard
from extender.console.context import Context
from extender.console.problem_details import use_problem_details
from extender.placement.snapshot import Snapshot

_Group = Callable[[Context], APIRouter]

_VIEWS = (
    *(page_files, fleet, nodes, devices, pending, explain, score, capacity, whatif, decisions),
    *(drift, events, status, snapshot),
)
_REJECTIONS: dict[int | str, dict[str, Any]] = {
    401: {"description": "The API server does not authenticate the caller"},
    403: {"description": "The caller may not read this"},
    503: {"description": "The API server cannot be asked whether the caller may read this"},
}


def console_app(context: Context, *, with_journal: bool = False) -> FastAPI:
    """Return the ASGI application of the console, which describes itself in /openapi.json.

    ``with_journal``: serve the journal too, because an extender runs in the same process.
    """
    more = (journal.router,) if with_journal else ()
    return _app(context, probes, *(module.router for module in _VIEWS), *more)


def extender_app(context: Context) -> FastAPI:
    """Return the ASGI application of the extender's second port: probes, metrics, journal."""
    return _app(context, probes, journal.router)


def _app(context: Context, *groups: _Group) -> FastAPI:
    guard = context.guard
    app = FastAPI(
        dependencies=[] if guard is None else [Depends(_guarded(guard))],
        responses={} if guard is None else _REJECTIONS,
        title="Headroom debug API",
        description="Explains where pods are placed and why, from the data that decided.",
        version="v1",
        # The usual viewers load files from the internet, which closed networks cannot reach.
        docs_url=None,
        redoc_url=None,
    )
    for group in groups:
        app.include_router(group(context))
    use_problem_details(app, context.replica, lambda: context.settings().mode)
    return app


def _guarded(guard: Guard) -> Callable[..., Awaitable[None]]:
    """Return a dependency of every view; it runs before the view."""
    Shown = Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))]

    async def guarded(request: Request, shown: Shown) -> None:
        await guard.check(request, shown)

    return guarded


def probes(context: Context) -> APIRouter:
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
