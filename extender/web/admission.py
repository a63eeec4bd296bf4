"""The admission webhook's port: routes, body limits, timing. Decides nothing about pods.

An API server reads an AdmissionReview in a 200 and nothing else: whatever else is answered, it goes
by the failure policy of the webhook (deploy/base/webhook.yaml), and says what was answered.
"""

import time
from collections.abc import Awaitable, Callable

import structlog
from fastapi import FastAPI
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response

from extender.admission.decisions import Surroundings, answer_mutate, answer_validate
from extender.admission.review import MalformedReview, read
from extender.admission.review import Request as Asked
from extender.telemetry import Telemetry
from extender.web.serving import JSON, BodyTooLarge, read_whole

log = structlog.get_logger()

Decide = Callable[[Asked, Surroundings], bytes]


def webhook_app(
    around: Surroundings, unready: Callable[[], str], telemetry: Telemetry, max_body_bytes: int
) -> FastAPI:
    """The ASGI application. ``unready`` says why nothing can be decided yet: nodes and namespaces
    that were not listed must not be taken for absent."""
    app = FastAPI(title="Headroom admission webhook", openapi_url=None)
    decisions: dict[str, Decide] = {"mutate": answer_mutate, "validate": answer_validate}
    for path, decide in decisions.items():
        endpoint = _endpoint(path, decide, around, unready, telemetry, max_body_bytes)
        app.router.add_route(f"/{path}", endpoint, methods=["POST"])
    return app


def _endpoint(
    path: str,
    decide: Decide,
    around: Surroundings,
    unready: Callable[[], str],
    telemetry: Telemetry,
    max_body_bytes: int,
) -> Callable[[Request], Awaitable[Response]]:
    seconds = telemetry.admission_seconds.labels(path)
    errors = telemetry.admission_errors.labels(path)

    def refuse(message: str, status: int) -> Response:
        errors.inc()
        return PlainTextResponse(f"Headroom: {message}\n", status_code=status)

    async def endpoint(request: Request) -> Response:
        try:
            body = await read_whole(request, max_body_bytes)
        except BodyTooLarge:
            return refuse(f"body is larger than {max_body_bytes} bytes, see max_body", 413)
        except ClientDisconnect:
            return Response(status_code=400)
        if why := unready():
            return refuse(why, 503)
        began_s = time.perf_counter()
        try:
            return Response(decide(read(body), around), media_type=JSON)
        except MalformedReview as err:
            return refuse(str(err), 400)
        except Exception:
            log.exception("admission_failed", path=path)
            return refuse("internal error: see the log of the extender", 500)
        finally:
            seconds.observe(time.perf_counter() - began_s)

    return endpoint
