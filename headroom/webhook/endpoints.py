"""The HTTP server of the admission webhook, with its routes, body limits and timing.

An API server accepts only status 200 with an AdmissionReview. For any other response, it applies
the failure policy of the webhook (deploy/base/webhook.yaml) and quotes the response in its error.
"""

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

import structlog
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from headroom.contract.quantity import format_bytes
from headroom.runtime.server.http_limits import JSON, BodyTooLarge, read_whole
from headroom.runtime.server.turns import Turns
from headroom.webhook.metrics import WebhookTelemetry
from headroom.webhook.review import (
    ContextOf,
    MalformedReview,
    answer_mutate,
    answer_validate,
    read,
)
from headroom.webhook.review import Request as Asked

log = structlog.get_logger()

Decide = Callable[[Asked, ContextOf], bytes]


@dataclass(frozen=True, slots=True)
class Webhook:
    """The parts that the server needs.

    ``unready`` returns the reason why reviews cannot be answered yet, or an empty string if they
    can. No review is answered before nodes and namespaces are listed, because objects that are not
    listed yet would be treated as missing. ``stuck`` maps each loop that has stopped to the number
    of seconds since its last progress.
    """

    context_of: ContextOf
    unready: Callable[[], str]
    stuck: Callable[[], Mapping[str, float]]
    telemetry: WebhookTelemetry
    max_body_bytes: int


def webhook_app(webhook: Webhook) -> FastAPI:
    """Return the ASGI application, which serves reviews and probes.

    Clients take turns by address, then by the namespace of the object, then by user, because the
    largest reviews take several milliseconds each. Tenants are distinguished by namespace rather
    than by user, because a tenant can have any number of users, and controllers create the pods of
    all tenants as the same user.
    """
    app = FastAPI(title="Headroom admission webhook", openapi_url=None)
    decisions: dict[str, Decide] = {"mutate": answer_mutate, "validate": answer_validate}
    turns = Turns()
    for path, decide in decisions.items():
        app.router.add_route(f"/{path}", _endpoint(path, decide, webhook, turns), methods=["POST"])

    async def healthz(_: Request) -> Response:
        stuck = ", ".join(f"{name} ({s:.0f} s)" for name, s in webhook.stuck().items())
        return PlainTextResponse(f"{stuck or 'ok'}\n", 503 if stuck else 200)

    async def readyz(_: Request) -> Response:
        missing = webhook.unready()
        return PlainTextResponse(f"{missing or 'ok'}\n", 503 if missing else 200)

    for path, answer in (("healthz", healthz), ("readyz", readyz)):
        app.router.add_route(f"/{path}", answer, methods=["GET"])
    return app


def _endpoint(
    path: str, decide: Decide, webhook: Webhook, turns: Turns
) -> Callable[[Request], Awaitable[Response]]:
    seconds = webhook.telemetry.admission_seconds.labels(path)
    errors = webhook.telemetry.admission_errors.labels(path)

    def reject(message: str, status: int) -> Response:
        errors.inc()
        return PlainTextResponse(f"Headroom: {message}\n", status_code=status)

    async def endpoint(request: Request) -> Response:
        try:
            body = await read_whole(request, webhook.max_body_bytes)
        except BodyTooLarge:
            return reject(
                f"body is larger than {format_bytes(webhook.max_body_bytes)} (setting max_body)",
                413,
            )
        except ClientDisconnect:
            return Response(status_code=400)
        if why := webhook.unready():
            return reject(why, 503)
        try:
            asked = read(body)
        except MalformedReview as err:
            return reject(str(err), 400)
        address = request.client.host if request.client else ""
        async with turns.turn(address, asked.namespace, asked.user_info.username):
            # the client may have given up before the request's turn
            if await request.is_disconnected():
                return Response(status_code=400)
            return decided(asked)

    def decided(asked: Asked) -> Response:
        began_s = time.perf_counter()
        try:
            return Response(decide(asked, webhook.context_of), media_type=JSON)
        except MalformedReview as err:
            return reject(str(err), 400)
        except Exception:
            log.exception("admission_failed", path=path)
            return reject("internal error: see the log of the webhook", 500)
        finally:
            seconds.observe(time.perf_counter() - began_s)

    return endpoint
