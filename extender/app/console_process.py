"""The process of the console: the debug API and its page."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry

from extender.app.api_server import ApiServer
from extender.app.cluster_view import ClusterView
from extender.app.console import Console
from extender.app.memory_policy import limit_heap
from extender.app.probes import debug_port
from extender.config.reload import ANYWHERE, Origin
from extender.config.settings import Settings
from extender.kube.client import authorization
from extender.kube.node_pods import NodePods
from extender.kube.reflector import DEFAULT_PACE, Pace
from extender.observability.metrics import ViewTelemetry
from extender.observability.pending_counter import PendingPods
from extender.server.ports import serve_ports


async def serve_console(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Serve the debug API of the cluster of the kubernetes package's configuration until a signal;
    raise ``BadSettings``."""
    limit_heap()
    server = ApiServer(settings, pace)
    telemetry = ViewTelemetry(CollectorRegistry(), "headroom_console_ready")
    view = ClusterView(settings, server.unready, telemetry, server.unlisted, origin)
    pods = PendingPods(view.cluster)
    console = Console(view, lambda: pods.pending, pods_on=NodePods(server.reviews).on)
    pods.decision = console.journals.of_uid
    console.authorize(lambda: authorization(server.configuration))
    app = console.app_for(server)

    def started() -> None:
        view.start()
        console.start()

    async with console.followed_through(server):
        pods.start(view.loops, view.unready)
        try:
            port = debug_port(settings, app, server.debug_tls)
            await serve_ports([port], announce, started=started, stopping=console.feed.close)
        finally:
            view.loops.stop()
            await view.loop.run_in_executor(None, console.stop)
