"""Probes and metrics of processes that serve nothing else on a port."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from fastapi import FastAPI, HTTPException
from fastapi.security import HTTPBearer
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from extender.config.ports import MetricsAccess
from extender.config.settings import Settings
from extender.console.auth import Guard
from extender.console.reviews import KubeReviews
from extender.kube.client import KubeApi, load_configuration
from extender.server.http_limits import PeerProtocol
from extender.server.ports import Port
from extender.server.tls import ServerTls

_bearer = HTTPBearer(auto_error=False)
_NO_TOKEN = 'no token was sent; example: -H "Authorization: Bearer $(kubectl create token NAME)"'


@contextmanager
def metrics_guard(settings: Settings) -> Iterator[Guard | None]:
    """Yield what authorizes readers of the metrics; None if every client may read them."""
    if settings.debug_open or settings.metrics_access is MetricsAccess.OPEN:
        yield None
        return
    # Separate connections: requests of readers must not use those of the process's own work.
    api = KubeApi(load_configuration(), connect_timeout_s=2.0, read_timeout_s=3.0)
    try:
        yield Guard(KubeReviews(api), time.monotonic)
    finally:
        api.close()


def probes_app(
    title: str,
    not_ready: Callable[[], str],
    stuck: Callable[[], dict[str, float]],
    exposition: Callable[[bool], bytes],
    guard: Guard | None = None,
) -> FastAPI:
    """Return the ASGI application, which serves probes and metrics.

    ``guard`` authorizes readers of the metrics; None: every client may read them.
    """
    app = FastAPI(title=title, openapi_url=None)

    async def healthz(_: Request) -> Response:
        late = ", ".join(f"{name} ({s:.0f} s)" for name, s in stuck().items())
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
        return Response(exposition(not not_ready()), media_type=CONTENT_TYPE_LATEST)

    for path, answer in (("healthz", healthz), ("readyz", readyz), ("metrics", metrics)):
        app.router.add_route(f"/{path}", answer, methods=["GET"])
    return app


def probes_port(
    title: str,
    settings: Settings,
    not_ready: Callable[[], str],
    stuck: Callable[[], dict[str, float]],
    exposition: Callable[[bool], bytes],
    guard: Guard | None,
) -> Port:
    """Return the debug port of the settings, which serves only probes and metrics."""
    app = probes_app(title, not_ready, stuck, exposition, guard)
    tls = ServerTls(settings.debug_tls) if settings.debug_tls else None
    return Port("probes", settings.debug_at, settings.debug_port, app, PeerProtocol, tls)
