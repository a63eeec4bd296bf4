"""Accepts the connections of a port with TLS, and limits the time and the number of handshakes.

uvicorn hears of a connection when its handshake is complete, so it can limit neither. A client
that sends nothing costs 50 KiB until then. If too many handshakes are under way, the one that began
first is dropped: a client that speaks at once is served.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

import structlog

log = structlog.get_logger()

#: Seconds for one handshake; kube-scheduler gives a whole call 5 s.
HANDSHAKE_S = 5.0
#: Handshakes of one port.
MAX_HANDSHAKES = 128
#: After a connection that could not be accepted, as when there are no file descriptors left.
_AGAIN_AFTER_S = 0.1


class Handshakes:
    """``protocol`` makes what a connection is handed to; ``context`` returns the TLS context."""

    def __init__(
        self, protocol: Callable[[], asyncio.Protocol], context: Callable[[], ssl.SSLContext]
    ) -> None:
        self._protocol = protocol
        self._context = context
        #: Those under way, the earliest first.
        self._under_way: dict[asyncio.Task[None], socket.socket] = {}

    async def accept(self, listening: socket.socket) -> None:
        """Goes on until it is cancelled."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except Exception as err:  # noqa: BLE001 - the port must go on
                    log.warning("connection_not_accepted", message=str(err))
                    await asyncio.sleep(_AGAIN_AFTER_S)
                    continue
                if len(self._under_way) >= MAX_HANDSHAKES:
                    _end(self._under_way.pop(next(iter(self._under_way))))
                task = loop.create_task(self._shake_hands(connection))
                self._under_way[task] = connection
                task.add_done_callback(self._ended)
        finally:
            for connection in self._under_way.values():
                _end(connection)

    async def _shake_hands(self, connection: socket.socket) -> None:
        """Fails without a message: ``extender.server.tls`` logs the cause."""
        with contextlib.suppress(OSError):  # ssl.SSLError is one
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._context(),
                ssl_handshake_timeout=HANDSHAKE_S,
            )

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._under_way.pop(task, None)
        if not task.cancelled() and (err := task.exception()) is not None:
            log.error("handshake_failed", exc_info=err)


def _end(connection: socket.socket) -> None:
    """The handshake fails at once: uvloop lets one that is cancelled wait for its time to be up."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
