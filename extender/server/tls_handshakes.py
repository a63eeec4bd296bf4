"""Accepts the connections of a port with TLS, and limits the time and the number of handshakes.

uvicorn gets a connection only when its handshake is complete, so it can limit neither. Until then,
a client that sends nothing takes 50 KiB. If too many handshakes are open, the oldest is dropped, so
a client that answers at once is always served.
"""

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Callable

import structlog

log = structlog.get_logger()

#: Seconds for one handshake; kube-scheduler waits 5 s for a whole call.
HANDSHAKE_S = 5.0
#: Maximum number of open handshakes of one port.
MAX_HANDSHAKES = 128
#: Seconds to wait after a failed accept, for example without free file descriptors.
_RETRY_AFTER_S = 0.1


class Handshakes:
    """Accepts TLS connections.

    ``protocol`` makes the protocol of each connection; ``context`` returns the TLS context.
    """

    def __init__(
        self, protocol: Callable[[], asyncio.Protocol], context: Callable[[], ssl.SSLContext]
    ) -> None:
        self._protocol = protocol
        self._context = context
        #: Open handshakes, the oldest first.
        self._open: dict[asyncio.Task[None], socket.socket] = {}

    async def accept(self, listening: socket.socket) -> None:
        """Accept connections until cancelled."""
        loop = asyncio.get_running_loop()
        listening.setblocking(False)
        try:
            while True:
                try:
                    connection, _ = await loop.sock_accept(listening)
                except Exception as err:  # noqa: BLE001 - the port must stay open
                    log.warning("connection_not_accepted", message=str(err))
                    await asyncio.sleep(_RETRY_AFTER_S)
                    continue
                if len(self._open) >= MAX_HANDSHAKES:
                    _end(self._open.pop(next(iter(self._open))))
                task = loop.create_task(self._shake_hands(connection))
                self._open[task] = connection
                task.add_done_callback(self._ended)
        finally:
            for connection in self._open.values():
                _end(connection)

    async def _shake_hands(self, connection: socket.socket) -> None:
        """Complete one handshake; ``extender.server.tls`` logs the cause of a failure."""
        with contextlib.suppress(OSError):  # ssl.SSLError is one
            await asyncio.get_running_loop().connect_accepted_socket(
                self._protocol,
                connection,
                ssl=self._context(),
                ssl_handshake_timeout=HANDSHAKE_S,
            )

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._open.pop(task, None)
        if not task.cancelled() and (err := task.exception()) is not None:
            log.error("handshake_failed", exc_info=err)


def _end(connection: socket.socket) -> None:
    """Make a handshake fail at once: under uvloop a cancelled one waits for its timeout."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)
