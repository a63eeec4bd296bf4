"""An HTTP server on loopback that calls a function of the test for each response."""

import json
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from email.message import Message
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from tests.certificates import Authority, Certificate


@dataclass(frozen=True, slots=True)
class Request:
    method: str
    path: str
    headers: Message
    body: bytes
    #: Writes raw bytes to the connection, so that a test can send incomplete or invalid responses.
    write: Callable[[bytes], object]


#: Status, body and headers. A body that is not bytes is encoded as JSON. If the answer is None, the
#: server closes the connection after the bytes that the function wrote.
Answer = tuple[int, Any] | tuple[int, Any, dict[str, str]] | None


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that disconnect or fail the TLS handshake."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


@contextmanager
def answering(
    answer: Callable[[Request], Answer],
    certificate: Certificate | None = None,
    clients: Authority | None = None,
    opened: Callable[[], object] = lambda: None,
) -> Iterator[str]:
    """Yield the URL of a server that calls ``answer`` for each request, on one thread per
    connection.

    If ``clients`` is given, clients need a certificate of this authority. ``opened`` is called for
    each connection.
    """

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True  # Otherwise each body waits 40 ms for an ACK.

        def setup(self) -> None:
            opened()
            super().setup()

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            write = self.wfile.write
            given = answer(Request(self.command, self.path, self.headers, body, write))
            if given is None:
                self.close_connection = True
                return
            status, content, *headers = given
            data = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            for name, text in (headers[0] if headers else {}).items():
                self.send_header(name, text)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            write(data)

        do_GET = do_POST = do_PATCH = do_CONNECT = _answer

        def log_message(self, format: str, *args: object) -> None:
            """Log nothing, because the default logs each request to stderr."""

    with _Server(("127.0.0.1", 0), Handler) as server:
        if certificate is not None:
            tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            tls.load_cert_chain(certificate.cert, certificate.key)
            if clients is not None:
                tls.load_verify_locations(clients.cert)
                tls.verify_mode = ssl.CERT_REQUIRED
            server.socket = tls.wrap_socket(
                server.socket, server_side=True, do_handshake_on_connect=False
            )
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            scheme = "http" if certificate is None else "https"
            yield f"{scheme}://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
