"""Limits the time, bytes and connections of every client of a port, before requests are parsed.

uvicorn limits the time between two requests, but neither the duration nor the size of a request.
This module limits the duration and the header bytes of each request. For each port, it also limits
the number of connections, and the total bytes of the request bodies that are being received or
answered:

* If there are too many connections, the connection that has been waiting longest is dropped.
* If there are too many bytes of bodies, the client with the largest incomplete body is dropped.

So a client that sends a short request without delay is always served. A peer that never completes
the TLS close cannot block shutdown.
"""

import asyncio
import sys
import time
from typing import Any

from httptools import HttpParserCallbackError
from starlette.requests import Request
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headroom.runtime.server.client_certificates import CERTIFICATE_END, certificate_end_s

JSON = "application/json"

#: Key of a counter in the ASGI scope. It counts the CPU seconds in which the thread receives and
#: parses each request, and then answers it after ``read_whole``. Until the body is complete, the
#: thread also does other work, which is not counted.
CPU_COUNTER = "headroom.cpu_counter"
#: Key of the CPU time of the thread when the body was complete, in seconds.
_BODY_READ_S = "headroom.body_read_s"

#: Maximum number of seconds from the first to the last byte of a request. kube-scheduler gives up
#: after 5 s. The time is checked once in this interval, so a request can take almost twice as long.
REQUEST_S = 30.0

#: Seconds within which a new connection must begin its first request. uvicorn limits later pauses.
IDLE_S = 120.0

#: Seconds that a client has to close its connection at shutdown.
CLOSE_S = 0.5

#: Maximum size in bytes of the request line, headers and trailers of one request.
MAX_HEADER_BYTES = 64 << 10

#: Maximum number of connections of one port.
MAX_CONNECTIONS = 512

#: Maximum total size in bytes of the request bodies that one port is receiving or answering.
MAX_BODIES_BYTES = 64 << 20

#: Bodies up to this size do not trigger a check of ``MAX_BODIES_BYTES``.
_SHORT_BODY_BYTES = 64 << 10

_REQUEST_TIMEOUT = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"connection: close\r\n\r\nthe request was not complete within %d seconds\n"
)

_HEADERS_TOO_LONG = (
    b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
    b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\n\r\n"
    b"the headers are longer than %d bytes\n"
)


class _HeadersTooLong(Exception):
    """An error that ends parsing before the application gets the request."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection. A single timer checks its time limits, because a timer for each request would
    cost more. Subclasses set other limits."""

    request_s = REQUEST_S
    idle_s = IDLE_S
    close_s = CLOSE_S
    max_header_bytes = MAX_HEADER_BYTES
    max_connections = MAX_CONNECTIONS
    max_bodies_bytes = MAX_BODIES_BYTES

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        #: When the request that is being read has begun, or None if no request is being read.
        self._reading_since_s: float | None = None
        #: When the connection was made, or None after its first request has begun.
        self._idle_since_s: float | None = self.loop.time()
        #: Since when the client has been idle or sending a request, or None while a request is
        #: answered.
        self._waits_since_s: float | None = self._idle_since_s
        #: Bytes of the current request's body, and its other bytes (headers, chunk sizes).
        self.body_bytes = self._other_bytes = 0
        #: CPU seconds of receiving and parsing the current request.
        self._cpu_s = 0.0
        #: Whether a request is being parsed.
        self._is_parsing = False
        #: Number of requests that began in the last received bytes.
        self._begun_count = 0
        #: Whether the next response ends the connection.
        self._is_ending = False
        self._timer = self.loop.call_later(self.request_s, self._check_time)
        if len(self.connections) > self.max_connections:
            self._drop_longest_waiting()

    def connection_lost(self, exc: Exception | None) -> None:
        self._timer.cancel()
        super().connection_lost(exc)

    def end_after_response(self) -> None:
        """Send "connection: close" with the next response, and then close the connection."""
        self._is_ending = True
        if self.cycle is not None and not self.cycle.response_started:
            self.cycle.keep_alive = False

    def shutdown(self) -> None:
        super().shutdown()
        self._timer.cancel()
        self._timer = self.loop.call_later(self.close_s, self._abort_closed)

    def _abort_closed(self) -> None:
        """Abort the connection if it is closing and everything has been sent. Otherwise try again
        after ``close_s``."""
        transport: Any = self.transport
        if transport.is_closing() and not transport.get_write_buffer_size():
            transport.abort()
        else:
            self._timer = self.loop.call_later(self.close_s, self._abort_closed)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        was_parsing, self._begun_count = self._is_parsing, 0
        began_s = time.thread_time()
        super().data_received(data)
        self._cpu_s += time.thread_time() - began_s
        if not self._is_parsing or self.transport.is_closing():
            return
        # If another request ended in these bytes, it is unknown how many of them belong to this
        # request.
        if was_parsing + self._begun_count == 1:
            self._other_bytes += len(data)
        # The limit allows for the bytes that chunked encoding adds to each chunk of a body.
        if self._other_bytes > self.max_header_bytes + self.body_bytes // 8:
            self._end(_HEADERS_TOO_LONG % self.max_header_bytes)

    def on_message_begin(self) -> None:
        self._cpu_s = 0.0
        self._reading_since_s, self._idle_since_s = self.loop.time(), None
        self._waits_since_s = self._reading_since_s
        self.body_bytes = self._other_bytes = 0
        self._is_parsing, self._begun_count = True, self._begun_count + 1
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        header_bytes = sum(len(name) + len(text) + 4 for name, text in self.headers)
        if len(self.url) + header_bytes > self.max_header_bytes:
            raise _HeadersTooLong
        super().on_headers_complete()
        if self._is_ending:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self.body_bytes += len(body)
        self._other_bytes -= len(body)
        if not self.cycle.body:  # uvicorn would copy it twice
            self.cycle.body, body = body, b""  # type: ignore[assignment]
        super().on_body(body)
        if self.body_bytes > _SHORT_BODY_BYTES:
            self._drop_largest_body()

    def on_message_complete(self) -> None:
        self._reading_since_s, self._is_parsing = None, False
        self._waits_since_s = self.loop.time() if self.cycle.response_complete else None
        super().on_message_complete()

    def on_response_complete(self) -> None:
        scope: Any = self.scope
        if (counter := scope.get(CPU_COUNTER)) and _BODY_READ_S in scope:
            counter.inc(self._cpu_s + time.thread_time() - scope[_BODY_READ_S])
        if self._reading_since_s is None:
            self._waits_since_s, self.body_bytes = self.loop.time(), 0
        super().on_response_complete()

    def send_400_response(self, msg: str) -> None:
        # The parser wraps exceptions of callbacks. Only ``_HeadersTooLong`` is expected.
        if isinstance(sys.exception(), HttpParserCallbackError):
            self._end(_HEADERS_TOO_LONG % self.max_header_bytes)
        else:
            super().send_400_response(msg)

    def _drop_longest_waiting(self) -> None:
        """If there are too many connections, drop the connection that has waited longest.

        Drop this connection if all other connections are being answered.
        """
        others = self._others()
        if len(others) < self.max_connections:
            return
        waiting = [each for each in others if each._waits_since_s is not None]
        longest = min(waiting, key=lambda each: each._waits_since_s or 0.0, default=self)
        longest._drop()

    def _drop_largest_body(self) -> None:
        """If all bodies together exceed ``max_bodies_bytes``, drop the client with the largest
        incomplete body."""
        others = self._others()
        total_bytes = self.body_bytes + sum(each.body_bytes for each in others)
        if total_bytes <= self.max_bodies_bytes:
            return
        sending = [each for each in (self, *others) if each._is_parsing]
        if sending:
            max(sending, key=lambda each: each.body_bytes)._drop()

    def _drop(self) -> None:
        """Abort the connection, which frees its memory immediately. A TLS close would wait for the
        peer."""
        transport: Any = self.transport
        transport.abort()

    def _others(self) -> list["LimitedProtocol"]:
        """Return the other connections of the port that are not being closed."""
        limited = (each for each in self.connections if isinstance(each, LimitedProtocol))
        return [each for each in limited if each is not self and not each.transport.is_closing()]

    def _check_time(self) -> None:
        """End the connection if a time limit has passed. Otherwise check again in ``request_s``."""
        now_s = self.loop.time()
        if self._reading_since_s is not None and now_s - self._reading_since_s >= self.request_s:
            self._end(_REQUEST_TIMEOUT % self.request_s)
        elif self._idle_since_s is not None and now_s - self._idle_since_s >= self.idle_s:
            self._end(b"")
        else:
            self._timer = self.loop.call_later(self.request_s, self._check_time)

    def _end(self, answer: bytes) -> None:
        """Send ``answer``, unless a response has begun, and close the connection."""
        transport: Any = self.transport
        # ``answer`` cannot replace a response that has begun.
        begun = self.cycle and self.cycle.response_started and not self.cycle.response_complete
        if answer and not begun:
            transport.write(answer)
        transport.close()


class CertifiedProtocol(LimitedProtocol):
    """Passes the end of the client's certificate to the application, in the ASGI scope."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("ssl_object")
        self._end_s = None if connection is None else certificate_end_s(connection)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._end_s is not None:
            scope: Any = self.scope
            scope[CERTIFICATE_END] = self._end_s


class BodyTooLarge(Exception):
    """The body exceeds the limit. It was read to its end and dropped."""


async def read_whole(request: Request, max_body_bytes: int) -> bytes:
    """Return the whole body.

    A body above ``max_body_bytes`` is read to its end and dropped, because a client that is still
    sending would not read the response. Raises ``BodyTooLarge``, or starlette's
    ``ClientDisconnect``.
    """
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= max_body_bytes:
            chunks.append(chunk)
        else:
            chunks.clear()
    request.scope[_BODY_READ_S] = time.thread_time()
    if size > max_body_bytes:
        raise BodyTooLarge
    return chunks[0] if len(chunks) == 1 else b"".join(chunks)
