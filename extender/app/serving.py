"""Serves the ports of the extender, of the console, or of both in one process, until a signal."""

import sys
from collections.abc import Callable

from starlette.types import ASGIApp

from extender.app.cluster_view import ClusterView
from extender.app.console import Console
from extender.app.extender import Extender
from extender.ledger.ledger import Ledger
from extender.server.http_limits import PeerProtocol
from extender.server.ports import Port, serve_ports
from extender.server.tls import ServerTls

#: How long a computing thread keeps the interpreter's lock while another one waits for it. The
#: event loop waits for it several times in each call.
SWITCH_S = 0.0005


async def serve(
    extender: Extender,
    ledger: Ledger,
    verbs: ASGIApp,
    second: ASGIApp,
    announce: Callable[[str], None],
    debug_tls: ServerTls | None = None,
    console: Console | None = None,
) -> None:
    """Serve kube-scheduler's calls, and ``second`` on the debug port: the extender's own app, or
    that of a console in the same process."""
    settings = extender.settings
    tls = ServerTls(settings.tls) if settings.tls else None
    ports = [
        Port("verbs", settings.verbs_at, settings.verbs_port, verbs, PeerProtocol, tls),
        _debug_port(extender, second, debug_tls),
    ]
    sys.setswitchinterval(SWITCH_S)

    def started() -> None:
        extender.start()
        extender.start_controllers(ledger)
        if console is not None:
            console.start()

    def stopping() -> None:  # otherwise shutdown waits for clients that follow the feed
        extender.feed.close()
        if console is not None:
            console.feed.close()

    try:
        await serve_ports(ports, announce, started=started, stopping=stopping)
    finally:
        extender.loops.stop()
        if console is not None:
            await extender.loop.run_in_executor(None, console.stop)


async def serve_views(
    view: ClusterView,
    console: Console,
    app: ASGIApp,
    announce: Callable[[str], None],
    debug_tls: ServerTls | None = None,
) -> None:
    """Serve the console alone."""

    def started() -> None:
        view.start()
        console.start()

    ports = [_debug_port(view, app, debug_tls)]
    try:
        await serve_ports(ports, announce, started=started, stopping=console.feed.close)
    finally:
        view.loops.stop()
        await view.loop.run_in_executor(None, console.stop)


def _debug_port(view: ClusterView, app: ASGIApp, tls: ServerTls | None) -> Port:
    settings = view.settings
    return Port("debug", settings.debug_at, settings.debug_port, app, PeerProtocol, tls)
