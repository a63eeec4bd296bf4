"""Limits on every client of a port, applied before a request is parsed: time, bytes, connections.

uvicorn limits the time between two requests, but neither the time nor the bytes within one. Here a
request that is not sent whole in time is ended, headers have a maximum length, and all connections
of a port share a maximum number and a budget for the bodies they are sending. When either is used
up, the client that has waited longest, or has sent most of an unfinished body, is disconnected: a
client that sends a short request at once is always served. A peer that never completes the TLS
close cannot block shutdown.
"""

import asyncio
import sys
from typing import Any

from httptools import HttpParserCallbackError
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from extender.server.client_certificates import PEER, peer_of

#: Seconds for one request, from its first byte to its last; kube-scheduler gives up after 5.
REQUEST_S = 30.0
#: Seconds without any request: longer than kube-scheduler keeps a connection that it does not use.
SILENT_S = 120.0
#: Seconds for a client to let go of a connection that we have closed, when we end.
PARTING_S = 0.5

#: Request line, headers and trailers of one request.
MAX_HEADER_BYTES = 64 << 10
#: Connections of one port.
MAX_CONNECTIONS = 512
#: Bodies that are being received or answered on all connections of one port.
MAX_BODIES_BYTES = 64 << 20
#: A body up to this size is not compared with the budget.
_SHORT_BODY_BYTES = 64 << 10

_TOO_SLOW = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"connection: close\r\n\r\nthe request was not sent whole within %d seconds\n"
)


_HEADERS_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\n"
    b"the headers are longer than %d bytes\n"
)


class _HeadersTooLong(Exception):
    """Ends parsing before the application sees the request."""


class Patient(HttpToolsProtocol):
    """One connection; checks its age now and then, so that a call costs nothing more."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        #: Since when a request is being read; None while none is.
        self._reading_since_s: float | None = None
        self._silent_since_s: float | None = self.loop.time()
        #: Since when no request is being answered: it is idle, or still sends one.
        self._waits_since_s: float | None = self._silent_since_s
        #: Bytes of the body of the request under way, and other bytes of that request.
        self.body_bytes = self._other_bytes = 0
        #: Whether a request is being parsed, and how many began in the bytes received last.
        self._parses, self._begun = False, 0
        self._look = self.loop.call_later(REQUEST_S, self._look_at_the_clock)
        if len(self.connections) > MAX_CONNECTIONS:
            self._make_room()

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

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        parsed, self._begun = self._parses, 0
        super().data_received(data)
        if not self._parses or self.transport.is_closing():
            return
        # If another request ended in these bytes, nobody knows how many of them are of this one.
        if parsed + self._begun == 1:
            self._other_bytes += len(data)
        # A body that is sent in chunks has some bytes around each of them.
        if self._other_bytes > MAX_HEADER_BYTES + self.body_bytes // 8:
            self._end(_HEADERS_TOO_LONG % MAX_HEADER_BYTES)

    def on_message_begin(self) -> None:
        self._reading_since_s, self._silent_since_s = self.loop.time(), None
        self._waits_since_s = self._reading_since_s
        self.body_bytes = self._other_bytes = 0
        self._parses, self._begun = True, self._begun + 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        header_bytes = sum(len(name) + len(text) + 4 for name, text in self.headers)
        if len(self.url) + header_bytes > MAX_HEADER_BYTES:
            raise _HeadersTooLong
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        self._other_bytes -= len(body)
        super().on_body(body)
        if self.body_bytes > _SHORT_BODY_BYTES:
            self._keep_within_budget()

    def on_message_complete(self) -> None:
        self._reading_since_s, self._parses = None, False
        self._waits_since_s = self.loop.time() if self.cycle.response_complete else None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        if self._reading_since_s is None:
            self._waits_since_s, self.body_bytes = self.loop.time(), 0
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        if isinstance(sys.exception(), HttpParserCallbackError):
            self._end(_HEADERS_TOO_LONG % MAX_HEADER_BYTES)
        else:
            super().send_400_response(msg)

    def _make_room(self) -> None:
        """Drop the connection that has waited longest; itself if all others are being answered."""
        others = self._others()
        if len(others) < MAX_CONNECTIONS:
            return
        waiting = [each for each in others if each._waits_since_s is not None]
        longest = min(waiting, key=lambda each: each._waits_since_s or 0.0, default=self)
        longest._drop()

    def _keep_within_budget(self) -> None:
        """Drop the client that has sent most of all whose body is not complete."""
        others = self._others()
        total_bytes = self.body_bytes + sum(each.body_bytes for each in others)
        if total_bytes <= MAX_BODIES_BYTES:
            return
        sending = [each for each in (self, *others) if each._parses]
        if sending:
            max(sending, key=lambda each: each.body_bytes)._drop()

    def _drop(self) -> None:
        """Free what the connection holds at once: a TLS close would wait for the peer."""
        transport: Any = self.transport
        transport.abort()

    def _others(self) -> list["Patient"]:
        """The other connections of the port that are not being closed."""
        return [
            each
            for each in self.connections
            if isinstance(each, Patient) and each is not self and not each.transport.is_closing()
        ]

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
