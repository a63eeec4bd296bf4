"""A keep-alive HTTP/1.1 connection that sends a request and receives its answer in separate calls.

kube-scheduler's binds overlap its next filter. With separate ``send`` and ``receive``, one thread
can imitate this. The headers are the same as from Go's HTTP client.
"""

import socket
from typing import NoReturn
from urllib.parse import urlsplit

_CHUNK_BYTES = 1 << 18


class ServerFailed(RuntimeError):
    """The server did not start, answered with an error, or closed the connection."""


class Connection:
    """Sends POST requests with JSON bodies to one server, one at a time.

    Connecting, sending and receiving raise ``OSError``, also after ``timeout_s`` without progress.
    """

    def __init__(self, base_url: str, timeout_s: float = 30) -> None:
        parts = urlsplit(base_url)
        address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._socket = socket.create_connection(address, timeout_s)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._host = f"{address[0]}:{address[1]}"
        self._path = "/"

    def fileno(self) -> int:
        """Return the socket's descriptor, so that ``select`` can wait for the answer."""
        return self._socket.fileno()

    def close(self) -> None:
        self._socket.close()

    def call(self, path: str, body: bytes) -> bytes:
        """Send a request and return the body of the answer. Raises the same as ``receive``."""
        self.send(path, body)
        return self.receive()

    def send(self, path: str, body: bytes) -> None:
        """Send a request. Call ``receive`` before you send another one."""
        self._path = path
        head = (
            f"POST {path} HTTP/1.1\r\nHost: {self._host}\r\nUser-Agent: Go-http-client/1.1\r\n"
            f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n"
            "Accept-Encoding: gzip\r\n\r\n"
        )
        self._socket.sendall(head.encode() + body)

    def receive(self) -> bytes:
        """Return the body of the answer. Raises ``ServerFailed`` unless the status is 2xx."""
        received = bytearray()
        while (end := received.find(b"\r\n\r\n")) < 0:
            self._read_into(received)
        status, *lines = bytes(received[:end]).decode("latin-1").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        headers = {name.lower(): value.strip() for name, _, value in pairs}
        if headers.keys() & {"content-encoding", "transfer-encoding"}:
            self._fail(f"{status!r} and a compressed or chunked body")
        total_bytes = end + 4 + int(headers.get("content-length", 0))
        while len(received) < total_bytes:
            self._read_into(received)
        body = bytes(received[end + 4 : total_bytes])
        if not status.split(" ")[1].startswith("2"):
            self._fail(f"{status!r}: {body[:200].decode(errors='replace')}")
        return body

    def _read_into(self, received: bytearray) -> None:
        chunk = self._socket.recv(_CHUNK_BYTES)
        if not chunk:
            self._fail("a closed connection")
        received += chunk

    def _fail(self, what: str) -> NoReturn:
        raise ServerFailed(f"POST http://{self._host}{self._path} was answered with {what}")
