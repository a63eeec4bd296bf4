"""A TCP connection to a server that can be made to stall, or to break."""

import contextlib
import socket
import socketserver
import threading
from collections.abc import Iterator


class Wire:
    def __init__(self, upstream_port: int) -> None:
        self.port = 0
        self.upstream_port = upstream_port
        self.rejects = False
        self._passes = threading.Event()
        self._passes.set()
        self._open: set[socket.socket] = set()

    def stall(self) -> None:
        """Every connection stays open, and new ones are taken; nothing comes through."""
        self._passes.clear()

    def reject(self) -> None:
        """Every connection ends, and so does each new one, at once."""
        self.rejects = True
        for each in list(self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        self._passes.set()

    def heal(self) -> None:
        self.rejects = False
        self._passes.set()

    def carry(self, client: socket.socket) -> None:
        """Returns when the connection has ended."""
        if self.rejects:
            return
        try:
            server = socket.create_connection(("127.0.0.1", self.upstream_port))
        except ConnectionRefusedError:
            return  # no server listens, so the client's connection ends too
        with server:
            ends = {client, server}
            self._open |= ends
            back = threading.Thread(target=self._pump, args=(server, client), daemon=True)
            back.start()
            self._pump(client, server)
            back.join()
            self._open -= ends

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._passes.wait()
                sink.sendall(data)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def wire_to(upstream_port: int) -> Iterator[Wire]:
    """A wire on a port of loopback; what is still open when the context ends is cut."""
    wire = Wire(upstream_port)

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            wire.carry(self.request)

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Connection) as server:
        wire.port = server.server_address[1]
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield wire
        finally:
            wire.reject()
            server.shutdown()
            thread.join()
