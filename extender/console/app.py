"""The debug API and its page: read-only views of the cluster state, on a separate port.

Most handlers are plain functions, which run and encode their answers on threads. They read
immutable data. The snapshot is taken before they run, on the event loop, because only the event
loop may make one. To add a group of views, add a module with a ``router`` function, and list it in
``_GROUPS``.
"""

from collections.abc import Awaitable, Callable, Sequence
from typing import Annotated, Any

from fastapi import Depends, FastAPI, Security
from fastapi.security import HTTPAuthorizationCredentials, HTTPBearer
from starlette.requests import Request

from extender.console import (
    capacity,
    decisions,
    devices,
    drift,
    events,
    explain,
    fleet,
    inputs,
    journal,
    nodes,
    page_files,
    pending,
    probes,
    score,
    snapshot,
    status,
    whatif,
)
from extender.console.auth import Guard
from extender.console.body_limits import BodySizeLimit
from extender.console.context import Context
from extender.console.mode import ModeHeader
from extender.console.problem_details import use_problem_details

_GROUPS = (
    page_files,
    probes,
    fleet,
    nodes,
    devices,
    pending,
    explain,
    score,
    capacity,
    whatif,
    decisions,
    drift,
    events,
    status,
    inputs,
    snapshot,
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
    return _app(context, (*_GROUPS, journal) if with_journal else _GROUPS)


def extender_app(context: Context) -> FastAPI:
    """Return the ASGI application of the extender's second port: probes, metrics, journal."""
    return _app(context, (probes, journal))


def _app(context: Context, groups: Sequence[Any]) -> FastAPI:
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
        app.include_router(group.router(context))
    use_problem_details(app, context.replica)
    app.add_middleware(BodySizeLimit)
    app.add_middleware(ModeHeader, mode=lambda: context.settings().mode)
    return app


def _guarded(guard: Guard) -> Callable[..., Awaitable[None]]:
    """Return a dependency of every view; it runs before the view."""
    Shown = Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))]

    async def guarded(request: Request, shown: Shown) -> None:
        await guard.check(request, shown)

    return guarded
