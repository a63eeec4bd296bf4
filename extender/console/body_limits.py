"""How large a body may be that a view of the debug API is asked with: it is read whole before any
view sees it."""

from starlette.types import ASGIApp, Receive, Scope, Send

from extender.console.problem_details import problem

MOST_BYTES = 1 << 20
#: Of what is asked here; what plays agents (``web.embedded``) sends whole fleets.
_PREFIX = "/v1/"


class Bounded:
    """Refuses what is larger, and what does not say how large it is."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_PREFIX):
            headers = dict(scope["headers"])
            length = headers.get(b"content-length", b"0")
            if b"transfer-encoding" in headers or not length.isdigit():
                rejection = problem(
                    411, "the body comes in pieces; right is to send Content-Length"
                )
                await rejection(scope, receive, send)
                return
            if int(length) > MOST_BYTES:
                rejection = problem(413, f"the body has {int(length)} bytes, at most {MOST_BYTES}")
                await rejection(scope, receive, send)
                return
        await self._app(scope, receive, send)
