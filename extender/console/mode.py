"""Says with every answer whether Headroom decides or only observes: no view can forget it."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: With each answer, also with those that are unchanged: browsers keep what a header said last.
HEADER = "Headroom-Mode"


class SaysMode:
    def __init__(self, app: ASGIApp, mode: Callable[[], str]) -> None:
        self._app = app
        self._mode = mode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def say(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = HEADER.lower().encode(), self._mode().encode()
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, say)
