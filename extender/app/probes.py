"""Probes and metrics of processes that serve nothing else."""

from collections.abc import Callable

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from extender.config.settings import Settings
from extender.server.http_limits import PeerProtocol
from extender.server.ports import Port
from extender.server.tls import ServerTls


def probes_app(
    title: str,
    not_ready: Callable[[], str],
    stuck: Callable[[], dict[str, float]],
    exposition: Callable[[bool], bytes],
) -> FastAPI:
    """Return the ASGI application, which serves probes and metrics. No answer names a pod."""
    app = FastAPI(title=title, openapi_url=None)

    async def healthz(_: Request) -> Response:
        late = ", ".join(f"{name} ({s:.0f} s)" for name, s in stuck().items())
        return PlainTextResponse(f"{late or 'ok'}\n", 503 if late else 200)

    async def readyz(_: Request) -> Response:
        missing = not_ready()
        return PlainTextResponse(f"{missing or 'ok'}\n", 503 if missing else 200)

    async def metrics(_: Request) -> Response:
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
) -> Port:
    """Return the debug port of the settings, which serves only probes and metrics."""
    app = probes_app(title, not_ready, stuck, exposition)
    tls = ServerTls(settings.debug_tls) if settings.debug_tls else None
    return Port("probes", settings.debug_at, settings.debug_port, app, PeerProtocol, tls)
