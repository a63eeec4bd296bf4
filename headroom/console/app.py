"""The debug API and its page: read-only views of the cluster state, on a separate port.

Most handlers are plain functions, which run and encode their answers on threads. They read
immutable data. The snapshot is taken before they run, on the event loop, because only the event
loop may make one. To add a group of views, add a module with ``routes``, and list it in ``_VIEWS``.
"""

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.security import APIKeyHeader, HTTPAuthorizationCredentials, HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import BaseRoute

from headroom.console.openapi import describe_answers
from headroom.console.view_context import Context, InContext, Newest
from headroom.console.views import (
    capacity,
    costs,
    decisions,
    defrag,
    devices,
    drift,
    events,
    explain,
    fleet,
    fleet_map,
    history,
    idle,
    nodes,
    overview,
    page_files,
    pending,
    pods,
    pools,
    quotas,
    recommendations,
    score,
    snapshot,
    status,
    teams,
    timeline,
    whatif,
)
from headroom.contract.console import HEADER
from headroom.runtime.server.problem_details import use_problem_details

_VIEWS = (
    *(page_files, overview, fleet, fleet_map, nodes, devices, pending, explain, score, capacity),
    *(
        costs,
        pods,
        pools,
        teams,
        timeline,
        whatif,
        decisions,
        defrag,
        drift,
        idle,
        quotas,
        recommendations,
        events,
        status,
        snapshot,
    ),
    history,
)
_REJECTIONS: dict[int | str, dict[str, Any]] = {
    401: {"description": "The API server does not authenticate the caller"},
    403: {"description": "The caller may not read this"},
    503: {"description": "The API server cannot be asked whether the caller may read this"},
}
_probes = APIRouter()
_metrics = APIRouter()


@_probes.get(
    "/healthz",
    response_class=PlainTextResponse,
    responses={503: {"content": {"text/plain": {}}, "description": "Loops that make no progress"}},
)
def healthz(context: InContext) -> Response:
    """Return 200 if all loops of the process make progress, otherwise 503 with the loops that
    have made none for 30 s."""
    stuck = context.stuck()
    return PlainTextResponse(f"{stuck or 'ok'}\n", 503 if stuck else 200)


@_probes.get(
    "/readyz",
    response_class=PlainTextResponse,
    responses={
        503: {"content": {"text/plain": {}}, "description": "Why decisions cannot be made yet"}
    },
)
def readyz(context: InContext) -> Response:
    """Return 200 if decisions can be made, otherwise 503 with the reason."""
    not_ready_because = context.unready()
    return PlainTextResponse(f"{not_ready_because or 'ok'}\n", 503 if not_ready_because else 200)


@_metrics.get("/metrics", response_class=PlainTextResponse)
def metrics(context: InContext, snap: Newest) -> Response:
    """Return the metrics in the format of Prometheus."""
    with context.scrapes.of(snap):
        text = context.telemetry.exposition(not context.unready())
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def console_app(context: Context, more: APIRouter | None = None) -> FastAPI:
    """Return the ASGI application of the console, which describes itself in /openapi.json.

    ``more`` are routes of an extender in the same process, which the guard checks too.
    """
    app = FastAPI(
        title="Headroom debug API",
        description="Explains where pods are placed and why, from the data that decided.",
        version="v1",
        # The usual viewers load files from the internet, which closed networks cannot reach.
        docs_url=None,
        redoc_url=None,
        # A redirect would name the host that the client wrote into its Host header.
        redirect_slashes=False,
    )
    app.state.context = context
    app.state.kept = {}
    guarded = context.guard is not None
    app.router.routes += _routes(guarded, context.open_metrics)
    if more is not None:
        app.include_router(more, **(_CHECKED if guarded else {}))
    use_problem_details(app, context.replica, lambda: context.settings().mode)
    describe_answers(app)
    return app


@cache
def _routes(guarded: bool, open_metrics: bool) -> Sequence[BaseRoute]:
    """Return the routes of probes and views, which all applications of a process share.

    The guard checks all routes except the routes of probes and the page, which have no data of the
    cluster. With ``open_metrics``, it does not check the metrics. FastAPI prepares the routes at
    the first request, which takes 0.1 s.
    """
    router = APIRouter()
    checked = _CHECKED if guarded else {}
    router.include_router(_probes)
    router.include_router(_metrics, **({} if open_metrics else checked))
    for module in _VIEWS:
        router.include_router(module.routes, **({} if module is page_files else checked))
    return router.routes


_Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))]
_Session = Annotated[str | None, Security(APIKeyHeader(name=HEADER, auto_error=False))]


async def _check(context: InContext, request: Request, bearer: _Bearer, session: _Session) -> None:
    """Raise ``HTTPException`` if the caller may not read the view. Runs before every view."""
    assert context.guard is not None
    await context.guard.check(request, bearer, session)


#: How routes are included that only authorized callers may read.
_CHECKED: dict[str, Any] = {"dependencies": [Depends(_check)], "responses": _REJECTIONS}
