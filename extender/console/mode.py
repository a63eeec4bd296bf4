"""Adds the mode (enforce or observe) to every answer as a header."""

from collections.abc import Callable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Sent also with 304 answers, because browsers keep the last value of a header otherwise.
HEADER = "Headroom-Mode"


class ModeHeader:
    """ASGI middleware that adds the header to every HTTP response."""

    def __init__(self, app: ASGIApp, mode: Callable[[], str]) -> None:
        self._app = app
        self._mode = mode

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_with_mode(message: Message) -> None:
            if message["type"] == "http.response.start":
                header = HEADER.lower().encode(), self._mode().encode()
                message = {**message, "headers": [*message.get("headers", ()), header]}
            await send(message)

        await self._app(scope, receive, send_with_mode)
