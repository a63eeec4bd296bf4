"""Stands in for a kubelet's streaming server, which needs a container runtime: port-forward only.

It speaks what the real one does (WebSocket with v4.channel.k8s.io: a channel of data and one of
errors for each port, each begun with the port's number), behind the real API server, which asks
who may and passes the connection on. A pod's port is that of the loopback.
"""

import base64
import contextlib
import hashlib
import socket
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import BinaryIO
from urllib.parse import parse_qs, urlsplit

from tests.certificates import Certificate

_PROTOCOL = "v4.channel.k8s.io"
_OF_WEBSOCKETS = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
_BINARY, _CLOSE = 2, 8
_DATA, _ERRORS = b"\0", b"\1"


class _Streams(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        asked = urlsplit(self.path)
        (port,) = map(int, parse_qs(asked.query)["port"])
        assert asked.path.startswith("/portForward/"), self.path
        assert _PROTOCOL in self.headers["Sec-WebSocket-Protocol"]
        key = self.headers["Sec-WebSocket-Key"].encode() + _OF_WEBSOCKETS
        self.send_response(101)
        self.send_header("Upgrade", "websocket")
        self.send_header("Connection", "Upgrade")
        accept = base64.b64encode(hashlib.sha1(key).digest()).decode()
        self.send_header("Sec-WebSocket-Accept", accept)
        self.send_header("Sec-WebSocket-Protocol", _PROTOCOL)
        self.end_headers()
        for channel in (_DATA, _ERRORS):
            self._send(channel + port.to_bytes(2, "little"))
        with socket.create_connection(("127.0.0.1", port)) as pod:
            back = threading.Thread(target=self._back, args=(pod,), daemon=True)
            back.start()
            for data in _received(self.rfile):
                assert data[:1] == _DATA
                pod.sendall(data[1:])
            with contextlib.suppress(OSError):
                pod.shutdown(socket.SHUT_RDWR)
            back.join()
        self.close_connection = True

    def _back(self, pod: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := pod.recv(1 << 15):
                self._send(_DATA + data)
            self._send(b"", _CLOSE)

    def _send(self, data: bytes, opcode: int = _BINARY) -> None:
        size = bytes([len(data)]) if len(data) < 126 else b"\x7e" + len(data).to_bytes(2)
        self.wfile.write(bytes([0x80 | opcode]) + size + data)

    def log_message(self, *_: object) -> None:
        pass


def _received(file: BinaryIO) -> Iterator[bytes]:
    """The binary messages of a client, each in one frame."""
    while len(head := file.read(2)) == 2 and head[0] & 15 != _CLOSE:
        size = head[1] & 127
        if size >= 126:
            size = int.from_bytes(file.read(2 if size == 126 else 8))
        mask = file.read(4)
        data = bytes(byte ^ mask[index % 4] for index, byte in enumerate(file.read(size)))
        if head[0] & 15 == _BINARY:
            yield data


@contextlib.contextmanager
def streaming(certificate: Certificate) -> Iterator[int]:
    """The port of the loopback where it listens, as a kubelet does with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.cert, certificate.key)
    with ThreadingHTTPServer(("127.0.0.1", 0), _Streams) as server:
        server.daemon_threads = True
        server.socket = context.wrap_socket(server.socket, server_side=True)
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
            thread.join()
