"""The debug API and its page: read-only views of what decides, on a port of their own.

Handlers are plain functions, which run on threads and encode their answers there. What they read is
immutable; the snapshot is taken before them, on the event loop, which alone may make one. A new
group of views is a module of ``web.api`` with a ``router``, and a line here.
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
from extender.console.body_limits import Bounded
from extender.console.context import Context
from extender.console.mode import SaysMode
from extender.console.problem_details import tell_problems

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
    401: {"description": "Nobody known to the API server"},
    403: {"description": "Who may not read this"},
    503: {"description": "The API server cannot be asked who may"},
}


def console_app(context: Context, *, with_journal: bool = False) -> FastAPI:
    """The ASGI application of the console; it describes itself in /openapi.json. ``with_journal``:
    there is an extender in the same process, whose journal others may follow."""
    return _app(context, (*_GROUPS, journal) if with_journal else _GROUPS)


def extender_app(context: Context) -> FastAPI:
    """The ASGI application of the extender's second port: probes, metrics, journal."""
    return _app(context, (probes, journal))


def _app(context: Context, groups: Sequence[Any]) -> FastAPI:
    guard = context.guard
    app = FastAPI(
        dependencies=[] if guard is None else [Depends(_guarded(guard))],
        responses={} if guard is None else _REJECTIONS,
        title="Headroom debug API",
        description="Why pods are where they are, from the objects that decided.",
        version="v1",
        # The usual viewers are loaded from elsewhere, which a closed network does not have.
        docs_url=None,
        redoc_url=None,
    )
    for group in groups:
        app.include_router(group.router(context))
    tell_problems(app, context.replica)
    app.add_middleware(Bounded)
    app.add_middleware(SaysMode, mode=lambda: context.settings().mode)
    return app


def _guarded(guard: Guard) -> Callable[..., Awaitable[None]]:
    """A dependency of every view, which comes before the view looks at anything."""
    Shown = Annotated[HTTPAuthorizationCredentials | None, Security(HTTPBearer(auto_error=False))]

    async def guarded(request: Request, shown: Shown) -> None:
        await guard.check(request, shown)

    return guarded
