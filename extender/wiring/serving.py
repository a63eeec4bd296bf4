"""Serves the ports of a replica, and runs all that goes on for ever beside them, until a signal."""

import sys
from collections.abc import Callable

from fastapi import FastAPI

from extender.ledger.protocol import Ledger
from extender.tls import ServerTls
from extender.wiring.lag import sample_lag
from extender.wiring.memory import collect_in_lulls
from extender.wiring.patience import Certified, counting
from extender.wiring.ports import Port, serve_ports
from extender.wiring.replica import Extender
from extender.wiring.watching import start_watching

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
    counted = counting(extender.calls)
    ports = [
        Port("verbs", settings.verbs_at, settings.verbs_port, verbs, counted, tls),
        Port("debug", settings.debug_at, settings.debug_port, debug, Certified, debug_tls),
    ]
    sys.setswitchinterval(SWITCH_S)
    try:
        await serve_ports(
            ports,
            announce,
            started=lambda: _start_loops(extender, ledger),
            stopping=extender.feed.close,  # a server that ends waits for clients that follow
        )
    finally:
        extender.loops.stop()


def _start_loops(extender: Extender, ledger: Ledger) -> None:
    loops = extender.loops
    extender.tidying.start(loops, ledger)
    extender.telling.start(loops, extender.unready)
    extender.reloading.start(loops)
    if extender.preempting:
        extender.preempting.start(loops, extender.idle)
    start_watching(loops, extender.watching, extender.begun)
    loops.keep("lag", lambda: sample_lag(extender.note_lag))
    loops.keep("memory", lambda: _collect(extender))


async def _collect(extender: Extender) -> None:
    await extender.begun.wait()
    await collect_in_lulls(extender.calls)
