"""A way to the API server that is closed until a test opens it.

Behind it a kubelet starts, and the plugin finds it, before it receives any pod.
"""

import contextlib
import socket
import threading
from collections.abc import Callable


class Door:
    """``port`` rejects connections until ``open``; ``close`` breaks the existing ones."""

    def __init__(self, to_port: int) -> None:
        self._to = ("127.0.0.1", to_port)
        self._listener = socket.socket()
        self._listener.bind(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        self._threads: list[threading.Thread] = []

    def open(self) -> None:
        self._listener.listen()
        self._start(self._serve)

    def close(self) -> None:
        for each in (self._listener, *self._open):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
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
                inner, _ = self._listener.accept()
                outer = socket.create_connection(self._to)
                self._open += [inner, outer]
                self._start(_pump, inner, outer)
                self._start(_pump, outer, inner)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for each in (source, sink):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
