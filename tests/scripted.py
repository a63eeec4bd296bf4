"""An HTTP server on loopback whose responses a test scripts, byte by byte if needed.

Tests use it to simulate faults of an API server, such as broken connections, hanging requests and
invalid responses.
"""

import json
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl, urlsplit

from kubernetes.client import Configuration

from tests.waiting import PATIENCE_S


@dataclass
class Exchange:
    """A request, with methods to answer it."""

    method: str
    path: str
    query: dict[str, str]
    body: bytes
    handler: socketserver.StreamRequestHandler
    released: threading.Event
    #: Maps header names in lower case to values.
    headers: dict[str, str]

    def raw(self, data: bytes) -> None:
        self.handler.wfile.write(data)

    def reply(self, status: int, body: Any, **headers: str) -> None:
        """Send a complete response. ``body`` is encoded as JSON unless it is bytes."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        extra = "".join(f"{name.replace('_', '-')}: {text}\r\n" for name, text in headers.items())
        self.raw(
            f"HTTP/1.1 {status} Scripted\r\nContent-Length: {len(data)}\r\n"
            f"Connection: close\r\n{extra}\r\n".encode()
            + data
        )

    def begin_stream(self) -> None:
        self.raw(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nConnection: close\r\n\r\n")

    def chunk(self, data: Any) -> None:
        """Send one chunk. Bytes are sent unchanged, and other data is sent as one line of JSON."""
        piece = data if isinstance(data, bytes) else json.dumps(data).encode() + b"\n"
        self.raw(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")

    def end_stream(self) -> None:
        self.raw(b"0\r\n\r\n")

    def hang(self) -> None:
        """Send nothing and keep the connection open until the test ends, for at most 30 s."""
        self.released.wait(PATIENCE_S)


Answer = Callable[[Exchange], None]


@dataclass
class ScriptedServer:
    """A server that answers the n-th request with ``script[n]``. Later requests hang."""

    script: list[Answer]
    port: int = 0
    requests: list[Exchange] = field(default_factory=list)

    def configuration(self) -> Configuration:
        configuration = Configuration()
        configuration.host = f"http://127.0.0.1:{self.port}"
        return configuration


@contextmanager
def scripted_server(*script: Answer) -> Iterator[ScriptedServer]:
    served = ScriptedServer(list(script))
    released = threading.Event()
    lock = threading.Lock()

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            exchange = _read(self, released)
            if exchange is None:
                return
            with lock:
                answer = (
                    served.script[len(served.requests)]
                    if len(served.requests) < len(served.script)
                    else Exchange.hang
                )
                served.requests.append(exchange)
            answer(exchange)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Ignore clients that disconnect."""

    with Server(("127.0.0.1", 0), Handler) as server:
        served.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, args=(0.002,))
        thread.start()
        try:
            yield served
        finally:
            released.set()
            server.shutdown()
            thread.join()


def _read(handler: socketserver.StreamRequestHandler, released: threading.Event) -> Exchange | None:
    line = handler.rfile.readline().decode()
    if not line:
        return None
    method, target, _ = line.split(" ", 2)
    headers: dict[str, str] = {}
    while header := handler.rfile.readline().strip():
        name, _, text = header.decode().partition(":")
        headers[name.lower()] = text.strip()
    url = urlsplit(target)
    query = dict(parse_qsl(url.query))
    body = handler.rfile.read(int(headers.get("content-length", "0")))
    return Exchange(method, url.path, query, body, handler, released, headers)
