"""Runs the extender and the console in one process, for installations with a single replica."""

from collections.abc import Callable

from extender.process import extender_of, start_writers
from headroom.console.in_cluster import app_for, followed_through
from headroom.console.node_pods import NodePods
from headroom.runtime.debug_port import debug_port
from headroom.runtime.kube.client import authorization
from headroom.runtime.kube.reflector import DEFAULT_PACE, Pace
from headroom.runtime.settings.reload import ANYWHERE, Origin
from headroom.runtime.settings.settings import Settings
from headroom.serve.shared_process import console_beside, serve_beside


async def serve_both(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Serve kube-scheduler's calls and the debug API until a signal arrives. The package
    ``kubernetes`` must be configured for the cluster. Raise ``BadSettings``."""
    async with extender_of(settings, pace, origin) as (server, extender, ledger):
        console = console_beside(extender, NodePods(server.reviews).on)
        console.authorize(lambda: authorization(server.configuration))
        app = app_for(console, server)
        async with followed_through(console, server):
            start_writers(server, extender, ledger)
            second = debug_port(settings, app, server.debug_tls)
            verbs = extender.verbs_app(ledger)
            await serve_beside(extender, ledger, verbs, second, announce, console)
