"""Serves a port as a replica does, but in a thread of the test process."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator
from typing import Any

from fastapi import FastAPI

from headroom.runtime.server.http_limits import LimitedProtocol
from headroom.runtime.server.ports import Port, PortServer
from headroom.runtime.server.tls import ServerTls
from tests.waiting import PATIENCE_S


class QuickToEnd(PortServer):
    async def main_loop(self) -> None:
        """Check more often than uvicorn whether the server must stop, because tests wait for it."""
        while not await self.on_tick(0):  # noqa: ASYNC110 - as uvicorn
            await asyncio.sleep(0.005)


@contextlib.contextmanager
def listening(
    app: FastAPI,
    tls: ServerTls | None = None,
    protocol: type[LimitedProtocol] = LimitedProtocol,
    **limits: Any,
) -> Iterator[int]:
    """Serve ``app`` on a free loopback port and yield the port. At the end of the context, stop the
    server and wait for its end.
    """
    server = QuickToEnd(Port("tests", "127.0.0.1", 0, app, protocol, tls, **limits))
    sock = socket.create_server(("127.0.0.1", 0), backlog=1024)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, daemon=True)
    thread.start()
    try:
        yield sock.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)
    assert not thread.is_alive()
