"""A connection of the agent's HTTP server, with or without TLS, and the bytes in its buffers.

Sockets are non-blocking. A method that would block raises ``BlockingIOError``,
``ssl.SSLWantReadError`` or ``ssl.SSLWantWriteError``, and is called again later. All methods raise
``OSError`` if the connection must be closed.
"""

import socket
import ssl
from concurrent.futures import Future
from dataclasses import dataclass, field
from http import HTTPStatus

#: Maximum size of the request line and headers in bytes. Requests have no body.
MAX_REQUEST_BYTES = 16 << 10
TEXT = "text/plain; charset=utf-8"
_END = b"\r\n\r\n"


@dataclass(frozen=True, slots=True)
class Request:
    #: The part of the target after the question mark.
    query: str
    #: The bearer token that the client sent. Empty if the client sent no token.
    token: str = ""


@dataclass(frozen=True, slots=True)
class Answer:
    status: int
    body: bytes
    content_type: str = TEXT
    #: A part of the response that is sent after ``body``. Many responses refer to the same object,
    #: so many slow clients do not need more memory.
    shared: bytes = b""
    #: Whether the client may send another request on the same connection.
    keeps_open: bool = False

    def head(self) -> bytes:
        lines = (
            f"HTTP/1.1 {self.status} {HTTPStatus(self.status).phrase}",
            f"Content-Type: {self.content_type}",
            f"Content-Length: {len(self.body) + len(self.shared)}",
            f"Connection: {'keep-alive' if self.keeps_open else 'close'}",
        )
        return "".join(f"{line}\r\n" for line in (*lines, "")).encode("ascii")


@dataclass(eq=False, slots=True)
class Connection:
    sock: socket.socket
    #: Address of the client.
    address: str
    #: Time on the monotonic clock at which the connection is closed.
    deadline_s: float
    #: Whether parts of the request are still missing.
    reading: bool = True
    #: Bytes that have arrived but are not answered yet.
    received: bytes = b""
    #: The future response, if a thread computes it.
    future: Future[Answer] | None = None
    #: Whether the client may send another request after the response.
    keeps_open: bool = False
    #: The parts of the response that have not been sent.
    unsent: list[memoryview] = field(default_factory=list)
    #: Events that the selector waits for, such as ``EVENT_READ``, or 0 if it waits for no event.
    events: int = 0

    def read(self) -> bytes:
        """Return the request line and the headers."""
        while _END not in self.received:
            if len(self.received) >= MAX_REQUEST_BYTES:
                raise ConnectionError("the request is too long")
            # With TLS, this also completes the handshake.
            part = self.sock.recv(MAX_REQUEST_BYTES)
            if not part:
                raise ConnectionError("the request is not complete")
            self.received += part
        request, _, self.received = self.received.partition(_END)
        return request

    def begin(self, answer: Answer) -> None:
        """Begin to send the response."""
        self.reading = False
        self.keeps_open = answer.keeps_open
        parts = memoryview(answer.head() + answer.body), memoryview(answer.shared)
        self.unsent = [part for part in parts if part]

    def write(self) -> None:
        """Send the bytes that are not sent yet."""
        while self.unsent:
            if isinstance(self.sock, ssl.SSLSocket):
                sent_bytes = self.sock.send(self.unsent[0])
            else:
                sent_bytes = self.sock.sendmsg(self.unsent)
            unsent, self.unsent = self.unsent, []
            for part in unsent:
                if sent_bytes < len(part):
                    self.unsent.append(part[sent_bytes:])
                sent_bytes = max(0, sent_bytes - len(part))
