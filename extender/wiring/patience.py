"""How long a client may take to send a request: one that stops in the middle keeps its connection,
and what it has sent so far, only so long. And to part: who does not answer the end of TLS keeps
nobody from ending.

uvicorn bounds the time between two requests and not the time within one.
"""

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from extender.web.calls import Calls
from extender.web.certificates import PEER, peer_of
from extender.wiring.onepiece import OnePiece

#: Seconds for one request, from its first byte to its last; kube-scheduler gives up after 5.
REQUEST_S = 30.0
#: Seconds without any request: longer than kube-scheduler keeps a connection that it does not use.
SILENT_S = 120.0
#: Seconds for a client to let go of a connection that we have closed, when we end.
PARTING_S = 0.5

_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"connection: close\r\n\r\nthe request was not sent whole within %d seconds\n"
)


class Patient(HttpToolsProtocol):
    """One connection; looks at itself now and then, so that a call costs nothing more."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        #: Since when a request is being read; None while none is.
        self._reading_since_s: float | None = None
        self._silent_since_s: float | None = self.loop.time()
        self._look = self.loop.call_later(REQUEST_S, self._look_at_the_clock)

    def connection_lost(self, exc: Exception | None) -> None:
        self._look.cancel()
        super().connection_lost(exc)

    def shutdown(self) -> None:
        super().shutdown()
        self._look.cancel()
        self._look = self.loop.call_later(PARTING_S, self._part)

    def _part(self) -> None:
        transport: Any = self.transport
        if transport.is_closing() and not transport.get_write_buffer_size():
            transport.abort()
        else:
            self._look = self.loop.call_later(PARTING_S, self._part)

    def on_message_begin(self) -> None:
        self._reading_since_s, self._silent_since_s = self.loop.time(), None
        super().on_message_begin()

    def on_message_complete(self) -> None:
        self._reading_since_s = None
        super().on_message_complete()

    def _look_at_the_clock(self) -> None:
        now_s = self.loop.time()
        if self._reading_since_s is not None and now_s - self._reading_since_s >= REQUEST_S:
            self._end(_TOO_SLOW % REQUEST_S)
        elif self._silent_since_s is not None and now_s - self._silent_since_s >= SILENT_S:
            self._end(b"")
        else:
            self._look = self.loop.call_later(REQUEST_S, self._look_at_the_clock)

    def _end(self, answer: bytes) -> None:
        transport: Any = self.transport
        # An answer that has begun cannot be another one any more.
        begun = self.cycle and self.cycle.response_started and not self.cycle.response_complete
        if answer and not begun:
            transport.write(answer)
        transport.close()


class Certified(Patient):
    """Connections that tell the application who is at their other end, where they are of TLS."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("ssl_object")
        self._peer = None if connection is None else peer_of(connection)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._peer is not None:
            scope: Any = self.scope
            scope[PEER] = self._peer


def counting(calls: Calls) -> type[Patient]:
    """Connections that tell which calls are under way, from their first byte to their answer."""

    class Counting(Patient):
        _is_counted = False

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            self._out = OnePiece(transport)
            super().connection_made(self._out)  # type: ignore[arg-type]

        def connection_lost(self, exc: Exception | None) -> None:
            self._ended()
            super().connection_lost(exc)

        def on_message_begin(self) -> None:
            if not self._is_counted:
                self._is_counted = True
                calls.begin()
            super().on_message_begin()

        def on_message_complete(self) -> None:
            if self.url.endswith(b"/bind"):
                self._ended()  # it waits for others from now on, and for us no more
            super().on_message_complete()

        def on_response_complete(self) -> None:
            self._out.flush()
            self._ended()
            super().on_response_complete()

        def _ended(self) -> None:
            if self._is_counted:
                self._is_counted = False
                calls.end()

    return Counting
