"""Tunnels TCP connections to a server through a port that is closed until a test opens it.

TLS passes through, including client certificates. A kubelet behind a closed port can start and
register the device plugin before it receives any pod.
"""

import contextlib
import socket
import threading
from collections.abc import Callable


class Tunnel:
    """A tunnel whose ``port`` rejects connections until ``open`` is called. ``cut`` and ``close``
    end existing connections.
    """

    def __init__(self, to_port: int) -> None:
        self.to_port = to_port
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        self._listener.listen()
        self._start(self._serve)

    def cut(self) -> None:
        _shut(*self._ends)

    def close(self) -> None:
        _shut(self._listener, *self._ends)
        for each in (self._listener, *self._ends):
            each.close()
        for thread in self._threads:
            thread.join()

    def _start(self, target: Callable[..., None], *sockets: socket.socket) -> None:
        thread = threading.Thread(target=target, args=sockets)
        self._threads.append(thread)
        thread.start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                inner, outer = self._listener.accept()[0], socket.socket()
                self._ends += [inner, outer]
                # If no server listens, the client's connection ends too.
                with contextlib.suppress(ConnectionRefusedError):
                    outer.connect(("127.0.0.1", self.to_port))
                self._start(_pump, inner, outer)
                self._start(_pump, outer, inner)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    _shut(source, sink)


def _shut(*sockets: socket.socket) -> None:
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
