"""Limits the number of streamed answers, and disconnects clients that do not read them."""

import asyncio
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from fastapi import HTTPException
from starlette.datastructures import State
from starlette.responses import StreamingResponse
from starlette.types import Message, Send

#: Seconds after which a client that reads nothing is disconnected.
SEND_S = 5.0


def counted(state: State, name: str, most: int, message: str) -> Callable[[], None]:
    """Count one more stream in the application's state. Return a function to call when the stream
    ends.

    Raise status 503 with the message if ``most`` streams of this name are open already.
    """
    streams = getattr(state, name, 0)
    if streams >= most:
        raise HTTPException(503, f"{most} {message}")
    setattr(state, name, streams + 1)

    def closed() -> None:
        setattr(state, name, getattr(state, name) - 1)

    return closed


class TimedStream(StreamingResponse):
    """A stream that ends if the client reads nothing for ``SEND_S`` seconds.

    It calls ``on_end`` when it has ended, for any reason.
    """

    def __init__(
        self,
        pieces: AsyncGenerator[bytes],
        on_end: Callable[[], None],
        media_type: str = "text/event-stream",
    ) -> None:
        headers = {"Cache-Control": "no-store"}
        super().__init__(pieces, media_type=media_type, headers=headers)
        self._pieces, self._on_end = pieces, on_end

    async def stream_response(self, send: Send) -> None:
        async def send_timed(message: Message) -> None:
            await asyncio.wait_for(send(message), SEND_S)

        try:
            with suppress(TimeoutError):
                await super().stream_response(send_timed)
        finally:
            self._on_end()
            await self._pieces.aclose()
