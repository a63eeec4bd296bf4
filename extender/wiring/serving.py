"""Listens for a replica, and runs all that goes on for ever beside its servers, until a signal."""

import asyncio
import contextlib
import signal
import socket
import ssl
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import uvicorn
from fastapi import FastAPI

from extender.ledger.protocol import Ledger
from extender.tls import ServerTls
from extender.wiring.handshakes import Handshakes
from extender.wiring.lag import sample_lag
from extender.wiring.memory import collect_in_lulls
from extender.wiring.patience import Certified, Patient, counting
from extender.wiring.replica import Extender
from extender.wiring.watching import start_watching

#: Longer than kube-scheduler keeps a connection that it does not use (90 s): it is the one to close
#: it, since a call that is sent while we do fails, and with it the attempt to place a pod.
KEEP_ALIVE_S = 120
#: What is being answered when we are told to end has so long; kube-scheduler waits for 5 s.
GRACE_S = 10
#: A thread that computes lets others have the interpreter's lock after so long, when they ask; the
#: loop asks several times in each call.
SWITCH_S = 0.0005


async def serve(
    extender: Extender,
    ledger: Ledger,
    verbs: FastAPI,
    debug: FastAPI,
    announce: Callable[[str], None],
    debug_tls: ServerTls | None = None,
) -> None:
    settings = extender.settings
    tls = ServerTls(settings.tls) if settings.tls else None
    sockets = {
        "verbs": _listen(settings.verbs_at, settings.verbs_port),
        "debug": _listen(settings.debug_at, settings.debug_port),
    }
    counted = counting(extender.calls)
    servers = {
        "verbs": _server(verbs, counted, tls),
        "debug": _server(debug, Certified, debug_tls),
    }
    if settings.webhook_tls is not None:
        sockets["webhook"] = _listen(settings.host, settings.webhook_port)
        webhook_tls = ServerTls(settings.webhook_tls)
        servers["webhook"] = _server(extender.webhook_app(), Patient, webhook_tls)

    def stop() -> None:
        extender.feed.close()  # a server that ends waits for who follows
        for server in servers.values():
            server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        extender.loop.add_signal_handler(number, stop)
    sys.setswitchinterval(SWITCH_S)
    loops = extender.loops
    extender.tidying.start(loops, ledger)
    extender.telling.start(loops, extender.unready)
    extender.reloading.start(loops)
    if extender.preempting:
        extender.preempting.start(loops, extender.idle)
    start_watching(loops, extender.watching, extender.begun)
    loops.keep("lag", lambda: sample_lag(extender.note_lag))
    loops.keep("memory", lambda: _collect(extender))
    running = [
        asyncio.create_task(servers[name].serve(sockets=[sockets[name]])) for name in servers
    ]
    where = {
        name: "{}://{}:{}".format(servers[name].scheme, *sock.getsockname()[:2])
        for name, sock in sockets.items()
    }
    # The sockets listen already: whoever connects now is answered in a moment.
    announce(msgspec.json.encode({"event": "serving", **where}).decode())
    try:
        await asyncio.gather(*running)
    finally:
        loops.stop()


async def _collect(extender: Extender) -> None:
    await extender.begun.wait()
    await collect_in_lulls(extender.calls)


class _Server(uvicorn.Server):
    """Leaves signals alone, since several servers share one process; accepts connections of TLS
    itself, since uvicorn limits no handshakes."""

    def __init__(self, config: uvicorn.Config, tls: ServerTls | None) -> None:
        super().__init__(config)
        self._tls = tls
        self._accepting: asyncio.Task[None] | None = None

    @property
    def scheme(self) -> str:
        return "https" if self._tls else "http"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        if self._tls is None:
            await super().startup(sockets)
            return
        await super().startup([])
        assert sockets, "a port listens already"
        handshakes = Handshakes(self._connection, self._context)
        self._accepting = asyncio.create_task(handshakes.accept(sockets[0]))

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
            await asyncio.wait([self._accepting])  # else a closed socket is still waited for
        await super().shutdown(sockets)

    def _connection(self) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state
        )
        return protocol

    def _context(self) -> ssl.SSLContext:
        assert self._tls is not None
        return self._tls.context

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: FastAPI, protocol: type[Patient], tls: ServerTls | None = None) -> _Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=GRACE_S,
        http=protocol,
    )
    return _Server(config, tls)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as err:
        raise OSError(f"cannot listen on {host}:{port}: {err.strerror or err}") from err
