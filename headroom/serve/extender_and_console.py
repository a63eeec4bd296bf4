"""Extender and console in one process, for a cluster of one replica."""

from collections.abc import Callable, Sequence

from starlette.types import ASGIApp

from extender.extender import Extender
from extender.ledger.ledger import Ledger
from extender.process import extender_of, serve, start_writers
from extender.scheduler.journal_endpoint import journal_routes
from headroom.console.console import Console
from headroom.console.node_pods import NodePods
from headroom.contract.kube import Pod
from headroom.runtime.debug_port import debug_port
from headroom.runtime.kube.client import authorization
from headroom.runtime.kube.reflector import DEFAULT_PACE, Pace
from headroom.runtime.server.ports import Port
from headroom.runtime.settings.reload import ANYWHERE, Origin
from headroom.runtime.settings.settings import Settings


async def serve_both(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Serve kube-scheduler's calls and the debug API for the cluster of the kubernetes package's
    configuration until a signal; raise ``BadSettings``."""
    async with extender_of(settings, pace, origin) as (server, extender, ledger):
        console = console_beside(extender, NodePods(server.reviews).on)
        console.authorize(lambda: authorization(server.configuration))
        app = console.app_for(server)
        async with console.followed_through(server):
            start_writers(server, extender, ledger)
            second = debug_port(settings, app, server.debug_tls)
            verbs = extender.verbs_app(ledger)
            await serve_beside(extender, ledger, verbs, second, announce, console)


def console_beside(
    extender: Extender, pods_on: Callable[[str], Sequence[Pod]] | None = None
) -> Console:
    """Return a console over the extender's view and journal; its port serves the journal too.
    ``pods_on``: see ``Console``."""
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
    """Serve kube-scheduler's calls, and the console's port, until a signal."""
    try:
        await serve(extender, ledger, verbs, second, announce, console.start, console.feed.close)
    finally:
        await extender.loop.run_in_executor(None, console.stop)
