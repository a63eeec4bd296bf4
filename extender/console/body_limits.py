"""Limits the size of request bodies of the debug API, which are read whole before a view runs."""

from starlette.types import ASGIApp, Receive, Scope, Send

from extender.console.problem_details import problem

MOST_BYTES = 1 << 20
#: Limited paths. ``/embedded/`` is not limited: simulated agents report whole fleets there.
_PREFIX = "/v1/"


class BodySizeLimit:
    """Rejects bodies that are too large, or have no Content-Length."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(_PREFIX):
            headers = dict(scope["headers"])
            length = headers.get(b"content-length", b"0")
            if b"transfer-encoding" in headers or not length.isdigit():
                rejection = problem(411, "the request has no valid Content-Length; send one")
                await rejection(scope, receive, send)
                return
            if int(length) > MOST_BYTES:
                rejection = problem(
                    413, f"the body has {int(length)} bytes; the maximum is {MOST_BYTES}"
                )
                await rejection(scope, receive, send)
                return
        await self._app(scope, receive, send)
