"""Serves the ports of the extender until a signal."""

import sys
from collections.abc import Callable

from starlette.types import ASGIApp

from extender.extender import Extender
from extender.ledger.ledger import Ledger
from headroom.runtime.server.http_limits import CertifiedProtocol
from headroom.runtime.server.ports import Port, serve_ports
from headroom.runtime.server.tls import ServerTls

#: Number of seconds for which a thread keeps the interpreter's lock while another thread waits for
#: it. The event loop waits for the lock several times in each call.
SWITCH_S = 0.0005


async def serve(
    extender: Extender,
    ledger: Ledger,
    verbs: ASGIApp,
    second: Port,
    announce: Callable[[str], None],
    started: Callable[[], None] = lambda: None,
    stopping: Callable[[], None] = lambda: None,
) -> None:
    """Serve kube-scheduler's calls, and the second port, until a signal.

    ``started`` and ``stopping`` are called when the extender starts and stops.
    """
    settings = extender.settings
    tls = ServerTls(settings.tls) if settings.tls else None
    first = Port("verbs", settings.verbs_at, settings.verbs_port, verbs, CertifiedProtocol, tls)
    sys.setswitchinterval(SWITCH_S)

    def start() -> None:
        extender.start()
        extender.start_controllers(ledger)
        started()

    def stop() -> None:  # otherwise the shutdown waits for clients that follow the journal
        extender.stream.ended = True
        stopping()

    try:
        await serve_ports([first, second], announce, started=start, stopping=stop)
    finally:
        extender.loops.stop()
