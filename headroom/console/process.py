"""The process of the console: the debug API and its page."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from headroom.console.console import Console
from headroom.console.in_cluster import app_for, followed_through
from headroom.console.node_pods import NodePods
from headroom.runtime.debug_port import debug_port
from headroom.runtime.follow.cluster_connection import ApiServer
from headroom.runtime.follow.cluster_view import ClusterView
from headroom.runtime.follow.pending_counter import PendingPods
from headroom.runtime.kube.client import authorization
from headroom.runtime.kube.reflector import DEFAULT_PACE, Pace
from headroom.runtime.server.ports import serve_ports
from headroom.runtime.settings.reload import ANYWHERE, Origin
from headroom.runtime.settings.settings import Settings
from headroom.runtime.telemetry import ViewTelemetry


async def serve_console(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Serve the debug API until a signal arrives. The package ``kubernetes`` must be configured for
    the cluster. Raise ``BadSettings``."""
    server = ApiServer(settings, pace)
    telemetry = ViewTelemetry(CollectorRegistry(), "headroom_console_ready")
    view = ClusterView(settings, server.unready, telemetry, server.unlisted, origin)
    pods = PendingPods(view.cluster)
    console = Console(view, lambda: pods.pending, pods_on=NodePods(server.reviews).on)
    pods.decision = console.journals.of_uid
    console.authorize(lambda: authorization(server.configuration))
    app = app_for(console, server)

    def started() -> None:
        view.start()
        console.start()

    async with followed_through(console, server):
        pods.start(view.loops, view.unready)
        try:
            port = debug_port(settings, app, server.debug_tls)
            await serve_ports([port], announce, started=started, stopping=console.feed.close)
        finally:
            view.loops.stop()
            await view.loop.run_in_executor(None, console.stop)
