"""Serves the probes and metrics of a process that has no other HTTP endpoints."""

from collections.abc import Callable, Mapping

from fastapi import FastAPI, HTTPException
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp

from headroom.runtime.loops import stuck_sentence
from headroom.runtime.server.auth import Guard
from headroom.runtime.server.http_limits import LimitedProtocol
from headroom.runtime.server.ports import Port
from headroom.runtime.server.tls import ServerTls
from headroom.runtime.settings.settings import Settings

_bearer = HTTPBearer(auto_error=False)
_NO_TOKEN = 'no token was sent; example: -H "Authorization: Bearer $(kubectl create token NAME)"'


def probes_app(
    title: str,
    not_ready: Callable[[], str],
    stuck: Callable[[], Mapping[str, float]],
    exposition: Callable[[bool], bytes],
    guard: Guard | None = None,
) -> FastAPI:
    """Return the ASGI application that serves the probes and the metrics.

    ``guard`` authorizes readers of the metrics. If it is None, every client may read them.
    """
    app = FastAPI(title=title, openapi_url=None)

    async def healthz(_: Request) -> Response:
        late = stuck_sentence(stuck())
        return PlainTextResponse(f"{late or 'ok'}\n", 503 if late else 200)

    async def readyz(_: Request) -> Response:
        missing = not_ready()
        return PlainTextResponse(f"{missing or 'ok'}\n", 503 if missing else 200)

    async def metrics(request: Request) -> Response:
        if guard is not None:
            bearer = await _bearer(request)
            if bearer is None:
                raise HTTPException(401, _NO_TOKEN, {"WWW-Authenticate": "Bearer"})
            await guard.check(request, bearer)
        text = await run_in_threadpool(exposition, not not_ready())
        return Response(text, media_type=CONTENT_TYPE_LATEST)

    for path, answer in (("healthz", healthz), ("readyz", readyz), ("metrics", metrics)):
        app.router.add_route(f"/{path}", answer, methods=["GET"])
    return app


def probes_port(
    title: str,
    settings: Settings,
    not_ready: Callable[[], str],
    stuck: Callable[[], Mapping[str, float]],
    exposition: Callable[[bool], bytes],
    guard: Guard | None,
) -> Port:
    """Return the debug port as the settings define it. It serves only probes and metrics."""
    app = probes_app(title, not_ready, stuck, exposition, guard)
    tls = ServerTls(settings.debug_tls) if settings.debug_tls else None
    return debug_port(settings, app, tls, "probes")


def debug_port(
    settings: Settings, app: ASGIApp, tls: ServerTls | None, name: str = "debug"
) -> Port:
    """Return the debug port as the settings define it."""
    return Port(name, settings.debug_at, settings.debug_port, app, LimitedProtocol, tls)
