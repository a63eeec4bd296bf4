"""One address in front of several servers, as a Service is: each connection goes to the next."""

import contextlib
import itertools
import socket
import socketserver
import threading
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def round_robin(ports: Sequence[int]) -> Iterator[str]:
    """The address, on loopback; what is still open when the context ends is cut."""
    turns = itertools.cycle(ports)
    lock = threading.Lock()

    class Connection(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            with lock:
                port = next(turns)
            with socket.create_connection(("127.0.0.1", port)) as backend:
                back = threading.Thread(target=_pump, args=(backend, self.request), daemon=True)
                back.start()
                _pump(self.request, backend)
                back.join()

    class Server(socketserver.ThreadingTCPServer):
        daemon_threads = True

    with Server(("127.0.0.1", 0), Connection) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}"
        finally:
            server.shutdown()
            thread.join()


def _pump(source: socket.socket, sink: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with contextlib.suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)
