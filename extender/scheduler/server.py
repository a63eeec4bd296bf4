"""Serves kube-scheduler's calls over HTTP, with routes, body limits and timing. It makes no
decisions about pods."""

import time
from collections.abc import Awaitable, Callable

import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from extender.metrics import Telemetry
from extender.scheduler import extender_v1
from extender.scheduler.bind import Bind, Binder
from extender.scheduler.filter import Filter, PodStore
from extender.scheduler.preempt import Preempt
from extender.scheduler.prioritize import Prioritize
from extender.scheduler.scheduling_state import SchedulingState
from headroom.contract.quantity import format_bytes
from headroom.runtime.server.client_certificates import CERTIFICATE_END
from headroom.runtime.server.http_limits import CPU_COUNTER, JSON, BodyTooLarge, read_whole

log = structlog.get_logger()

#: Supported values of urlPrefix in kube-scheduler's configuration, without the host.
PREFIXES = ("", "/scheduler")

_NOT_FOUND = PlainTextResponse("Not Found\n", 404)
_METHOD_NOT_ALLOWED = PlainTextResponse("Method Not Allowed\n", 405, {"Allow": "POST"})

Call = Callable[[bytes], bytes | Awaitable[bytes]]


class Verbs:
    """The handlers of kube-scheduler's calls. Each of them takes the body of a request and returns
    the body of the response."""

    def __init__(
        self, state: SchedulingState, ledger: Binder, pods: PodStore | None = None
    ) -> None:
        self.filter = Filter(state, pods)
        self.prioritize = Prioritize(state)
        self.preempt = Preempt(state)
        self.bind = Bind(state, ledger)


class VerbsApp:
    """The ASGI application that serves the verbs with POST, under each of ``PREFIXES``.

    It has no router and no middleware of starlette, which would take as long as reading the pod.
    """

    def __init__(self, verbs: Verbs, telemetry: Telemetry, max_body_bytes: int) -> None:
        # The responses of filter and bind have an Error field, which kube-scheduler shows on the
        # pod. It reads the field only from a response with status 200. The other two verbs have no
        # such field, and kube-scheduler ignores the extender if they fail.
        calls: dict[str, tuple[Call, Callable[[str], bytes] | None]] = {
            "filter": (verbs.filter, verbs.filter.error),
            "prioritize": (verbs.prioritize, None),
            "preempt": (verbs.preempt, None),
            "bind": (verbs.bind, verbs.bind.error),
        }
        #: The ASGI application of each verb, by path.
        self.endpoints: dict[str, ASGIApp] = {
            f"{prefix}/{verb}": _Endpoint(verb, call, error, telemetry, max_body_bytes)
            for verb, (call, error) in calls.items()
            for prefix in PREFIXES
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        app = self.endpoints.get(scope["path"], _NOT_FOUND)
        if app is not _NOT_FOUND and scope.get("method") != "POST":
            app = _METHOD_NOT_ALLOWED
        await app(scope, receive, send)


class _Endpoint:
    """The ASGI application of one verb."""

    def __init__(
        self,
        verb: str,
        call: Call,
        error: Callable[[str], bytes] | None,
        telemetry: Telemetry,
        max_body_bytes: int,
    ) -> None:
        self._verb, self._call, self._error = verb, call, error
        self._max_body_bytes = max_body_bytes
        self._seconds = telemetry.verb_seconds.labels(verb)
        # CPU time of bind is not measured, because while bind waits, the thread works on other
        # calls.
        self._cpu_seconds = None if verb == "bind" else telemetry.verb_cpu_seconds.labels(verb)
        self._certificate_end = telemetry.scheduler_certificate_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope[CPU_COUNTER] = self._cpu_seconds
        if (end_s := scope.get(CERTIFICATE_END)) is not None:
            self._certificate_end.set(end_s)
        response = await self._respond(Request(scope, receive))
        await response(scope, receive, send)

    async def _respond(self, request: Request) -> Response:
        try:
            body = await read_whole(request, self._max_body_bytes)
        except BodyTooLarge:
            return self._rejected(
                f"body is larger than {format_bytes(self._max_body_bytes)}: set nodeCacheCapable: "
                "true in kube-scheduler's configuration, or a larger max_body in Headroom's",
                413,
            )
        except ClientDisconnect:
            return Response(status_code=400)
        began_s = time.perf_counter()
        try:
            answer = self._call(body)
            content = answer if isinstance(answer, bytes) else await answer
            return Response(content, media_type=JSON)
        except extender_v1.MalformedBody as err:
            return self._rejected(str(err))
        except Exception:
            # A bug must not reach kube-scheduler as a stack trace or a dropped connection. The
            # log has the details.
            log.exception("verb_failed", verb=self._verb)
            return self._rejected("internal error in Headroom: see the log of the extender")
        finally:
            self._seconds.observe(time.perf_counter() - began_s)

    def _rejected(self, message: str, status: int = 400) -> Response:
        if self._error is None:
            return PlainTextResponse(message + "\n", status_code=status)
        return Response(self._error(message), media_type=JSON)
