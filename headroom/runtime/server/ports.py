"""Listens on the ports of one process and serves them until a signal arrives."""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import uvicorn
from starlette.types import ASGIApp

from headroom.runtime.server.http_limits import LimitedProtocol
from headroom.runtime.server.tls import Handshakes, ServerTls
from headroom.system.listening import host_port, listening_socket

#: Seconds after which the server closes an idle connection. kube-scheduler closes it earlier, after
#: 90 s. If the server closed it first, a call sent at the same moment would fail, and with it the
#: pod's scheduling attempt.
KEEP_ALIVE_S = 120
#: Seconds that requests in progress have at shutdown. kube-scheduler waits for 5 s.
GRACE_S = 10
#: Seconds for which idle connections stay open at shutdown, so that requests already sent are still
#: served.
DRAIN_S = 1.0


#: The settings of ports, by the name of the port. Other names stand for the debug API's port.
_SETTINGS = {"verbs": "verbs_port", "webhook": "webhook_port"}


@dataclass(frozen=True, slots=True)
class Port:
    """A port to serve. ``port`` 0 selects any free port. Without ``tls``, it serves plain HTTP."""

    name: str
    host: str
    port: int
    app: ASGIApp
    protocol: type[LimitedProtocol]
    tls: ServerTls | None = None
    #: Seconds that idle connections, and then requests in progress, have at shutdown.
    drain_s: float = DRAIN_S
    grace_s: int = GRACE_S


async def serve_ports(
    ports: Sequence[Port],
    announce: Callable[[str], None],
    *,
    started: Callable[[], None] = lambda: None,
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Serve until SIGINT or SIGTERM.

    ``announce`` is called with one line of JSON that contains the address of each port. ``started``
    is called when all ports listen, and ``stopping`` when a signal arrives. Raises ``OSError`` if a
    port cannot be used.
    """
    sockets = {each.name: _listen(each) for each in ports}
    servers = {each.name: PortServer(each) for each in ports}

    def stop() -> None:
        stopping()
        for server in servers.values():
            server.should_exit = True

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop)
    started()
    running = [
        asyncio.create_task(server.serve(sockets=[sockets[name]]))
        for name, server in servers.items()
    ]
    addresses = {
        name: f"{servers[name].scheme}://{host_port(*sock.getsockname()[:2])}"
        for name, sock in sockets.items()
    }
    # The sockets are already listening, so a client that connects now is served soon.
    announce(msgspec.json.encode({"event": "serving", **addresses}).decode())
    await asyncio.gather(*running)


@contextlib.contextmanager
def serve_beside(port: Port) -> Iterator[str]:
    """Serve a port in a thread that has its own event loop, and yield the port's address.

    Requests to other ports cannot delay this port. Raises ``OSError`` if the port cannot be used.
    """
    listener = _listen(port)
    server = PortServer(port)
    address = f"{server.scheme}://{host_port(*listener.getsockname()[:2])}"
    thread = threading.Thread(
        target=lambda: asyncio.run(server.serve(sockets=[listener])), name=port.name
    )
    thread.start()
    try:
        yield address
    finally:
        server.should_exit = True
        thread.join()


class PortServer(uvicorn.Server):
    """Serves one port.

    It handles no signals, because several servers share one process. It accepts TLS connections
    itself, because uvicorn does not limit handshakes.
    """

    def __init__(self, port: Port) -> None:
        super().__init__(
            uvicorn.Config(
                port.app,
                log_config=None,
                access_log=False,
                lifespan="off",
                proxy_headers=False,  # nothing uses the client's address
                timeout_keep_alive=KEEP_ALIVE_S,
                timeout_graceful_shutdown=port.grace_s,
                http=port.protocol,
            )
        )
        self._tls = port.tls
        self._drain_s = port.drain_s
        self._accepting: asyncio.Task[None] | None = None

    @property
    def scheme(self) -> str:
        return "https" if self._tls else "http"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
            return
        await super().startup([])
        assert sockets, "the port must be listening already"
        handshakes = Handshakes(self._connection, self._tls)
        self._accepting = asyncio.create_task(handshakes.accept(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            # Wait until the task has ended, because otherwise the event loop keeps waiting on a
            # closed socket.
            await asyncio.wait([self._accepting])
        for listener in (*self.servers, *(sockets or ())):
            listener.close()
        await self._drain()
        await super().shutdown(sockets)

    async def _drain(self) -> None:
        """Let clients close their connections, by sending "connection: close" with each response.

        A client that has not noticed the shutdown may be sending a request on a connection that is
        idle now. If the connection were closed immediately, this request would fail, and with it
        the creation of a pod. Return when no connection is left, or after ``drain_s`` seconds.
        """
        loop = asyncio.get_running_loop()
        end_s = loop.time() + self._drain_s
        for connection in self.server_state.connections:
            assert isinstance(connection, LimitedProtocol)
            connection.end_after_response()
        while self.server_state.connections and loop.time() < end_s:  # noqa: ASYNC110 - as uvicorn
            await asyncio.sleep(0.02)

    def _connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _listen(port: Port) -> socket.socket:
    try:
        return listening_socket(port.host, port.port, backlog=1024)
    except OSError as err:
        at, setting = host_port(port.host, port.port), _SETTINGS.get(port.name, "debug_port")
        why = os.strerror(err.errno) if err.errno else str(err)
        raise OSError(f"cannot listen on {at} (setting {setting}): {why}") from err
