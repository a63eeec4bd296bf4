"""The debug API and its page: read-only views of the cluster state, on a separate port.

Most handlers are plain functions, so FastAPI runs them and encodes their answers on worker threads.
They read only immutable data: the snapshot is taken on the event loop before they run, because only
the event loop may create one. To add a group of views, add a module with ``routes``, and list it in
``_VIEWS``.
"""

from collections.abc import Sequence
from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Depends, FastAPI, Security
from fastapi.routing import APIRoute
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
    index,
    nodes,
    overview,
    page_files,
    pending,
    pods,
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
from headroom.runtime.server.known_parameters import known_parameters
from headroom.runtime.server.problem_details import use_problem_details

_VIEWS = (
    *(overview, fleet, fleet_map, nodes, devices, pending, explain, score, capacity),
    *(
        costs,
        pods,
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
    503: {"description": "The API server cannot be reached to authorize the caller"},
}
_probes = APIRouter()
_metrics = APIRouter()


@_probes.get(
    "/healthz",
    response_class=PlainTextResponse,
    responses={503: {"content": {"text/plain": {}}, "description": "The loops that are stuck"}},
)
def healthz(context: InContext) -> Response:
    """Return 200 if all loops of the process make progress. Otherwise return 503 and name the loops
    that made no progress for 30 s."""
    stuck = context.stuck()
    return PlainTextResponse(f"{stuck or 'ok'}\n", 503 if stuck else 200)


@_probes.get(
    "/readyz",
    response_class=PlainTextResponse,
    responses={
        503: {"content": {"text/plain": {}}, "description": "The reason why it is not ready"}
    },
)
def readyz(context: InContext) -> Response:
    """Return 200 if decisions can be made, otherwise 503 with the reason."""
    not_ready_because = context.unready()
    return PlainTextResponse(f"{not_ready_because or 'ok'}\n", 503 if not_ready_because else 200)


@_metrics.get("/metrics", response_class=PlainTextResponse)
def metrics(context: InContext, snap: Newest) -> Response:
    """Return the metrics in the Prometheus text format."""
    with context.scrapes.of(snap):
        text = context.telemetry.exposition(not context.unready())
    return Response(text, media_type=CONTENT_TYPE_LATEST)


def console_app(context: Context, more: APIRouter | None = None) -> FastAPI:
    """Return the ASGI application of the console, which describes itself in /openapi.json.

    ``more`` has the routes of an extender in the same process. The guard checks them too.
    """
    app = FastAPI(
        title="Headroom debug API",
        description="Explains where pods are placed and why, from the data behind each decision.",
        version="v1",
        # The default viewers load files from the internet, which closed networks cannot reach.
        docs_url=None,
        redoc_url=None,
        # A redirect would repeat the host name that the client sent in its Host header.
        redirect_slashes=False,
    )
    app.state.context = context
    app.state.kept = {}
    guarded = context.guard is not None
    app.router.routes += _routes(guarded, context.open_metrics)
    if more is not None:
        app.include_router(more, **_views(guarded))
    app.state.views = [
        route
        for router in (*(m.routes for m in (index, *_VIEWS)), _probes, _metrics, more)
        for route in (router.routes if router else ())
        if isinstance(route, APIRoute)
    ]
    views = app.state.views
    use_problem_details(app, context.replica, lambda: context.settings().mode, views)
    describe_answers(app)
    return app


@cache
def _routes(guarded: bool, open_metrics: bool) -> Sequence[BaseRoute]:
    """Return the routes of probes and views, which all applications of a process share.

    The guard checks every route except the probes, the page and the list of views, which contain no
    cluster data. With
    ``open_metrics``, it does not check the metrics either. Applications share the routes because
    FastAPI prepares them at the first request, which takes 0.1 s.
    """
    router = APIRouter()
    checked = _CHECKED if guarded else {}
    router.include_router(_probes)
    router.include_router(index.routes, dependencies=[_KNOWN])
    router.include_router(_metrics, **({} if open_metrics else checked))
    router.include_router(page_files.routes)
    for module in _VIEWS:
        router.include_router(module.routes, **_views(guarded))
    return router.routes


_Bearer = Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))]
_Session = Annotated[str | None, Security(APIKeyHeader(name=HEADER, auto_error=False))]


async def _check(context: InContext, request: Request, bearer: _Bearer, session: _Session) -> None:
    """Raise ``HTTPException`` if the caller may not read the view. Runs before every view."""
    assert context.guard is not None
    await context.guard.check(request, bearer, session)


#: Arguments of ``include_router`` for routes that only authorized callers may read.
_CHECKED: dict[str, Any] = {"dependencies": [Depends(_check)], "responses": _REJECTIONS}
_KNOWN = Depends(known_parameters)


def _views(guarded: bool) -> dict[str, Any]:
    """Return the arguments of ``include_router`` for views. The guard runs first, so that its
    answer does not depend on the parameters."""
    if not guarded:
        return {"dependencies": [_KNOWN]}
    return {**_CHECKED, "dependencies": [*_CHECKED["dependencies"], _KNOWN]}
