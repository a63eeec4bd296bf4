"""A console in the process of an extender, with or without a cluster."""

from collections.abc import Callable, Sequence

from starlette.types import ASGIApp

from extender.extender import Extender
from extender.ledger.ledger import Ledger
from extender.scheduler.journal_endpoint import journal_routes
from extender.serving import serve
from headroom.console.console import Console
from headroom.contract.kube import Pod
from headroom.runtime.server.ports import Port


def console_beside(
    extender: Extender, pods_on: Callable[[str], Sequence[Pod]] | None = None
) -> Console:
    """Return a console that shows the extender's view and journal. Its port also serves the
    journal. ``pods_on`` is passed to ``Console``."""
    return Console(
        extender,
        lambda: extender.pending_events_controller.pending,
        extender.journal,
        pods_on,
        journal_routes(extender.stream),
    )


async def serve_beside(
    extender: Extender,
    ledger: Ledger,
    verbs: ASGIApp,
    second: Port,
    announce: Callable[[str], None],
    console: Console,
) -> None:
    """Serve kube-scheduler's calls and the console's port until a signal arrives."""
    try:
        await serve(extender, ledger, verbs, second, announce, console.start, console.feed.close)
    finally:
        await extender.loop.run_in_executor(None, console.stop)
