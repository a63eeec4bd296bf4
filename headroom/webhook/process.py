"""The process of the admission webhook, which runs four watches and serves two ports. It watches no
pods and has no ledger."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
from prometheus_client import CollectorRegistry

from headroom.contract.watched import WatchEvent
from headroom.errors import BadSettings
from headroom.runtime.debug_port import probes_port
from headroom.runtime.kube.client import KubeApi, load_configuration
from headroom.runtime.kube.informers import KubernetesSources
from headroom.runtime.kube.profiles import Profiles
from headroom.runtime.kube.readiness import unready
from headroom.runtime.kube.reflector import DEFAULT_PACE, Pace
from headroom.runtime.kube.resources import profile_kind, watched_kinds
from headroom.runtime.loops import STUCK_AFTER_S, Loops
from headroom.runtime.metrics_guard import metrics_guard
from headroom.runtime.server.http_limits import LimitedProtocol
from headroom.runtime.server.ports import Port, serve_beside, serve_ports
from headroom.runtime.server.tls import ServerTls
from headroom.runtime.settings.reload import ANYWHERE, Origin, SettingsReloader
from headroom.runtime.settings.settings import Settings
from headroom.runtime.telemetry import CertificateCollector
from headroom.webhook.context import KINDS, AdmissionContext, ObjectCache
from headroom.webhook.endpoints import Webhook, webhook_app
from headroom.webhook.metrics import WebhookTelemetry

#: Seconds between two heartbeats of the event loop.
_BEAT_S = 1.0


class Decider:
    """Holds the current settings and the cached objects for the endpoints."""

    def __init__(self, settings: Settings) -> None:
        self.cache, self.profiles = ObjectCache(), Profiles()
        self.take(settings)

    def take(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self._rules, self._settings = settings.rules, settings.webhook

    def context(self, namespace: str) -> AdmissionContext:
        context = self.cache.context(self._rules, self._settings, namespace)
        return replace(context, profile=self.profiles.of, now_s=time.time())

    def apply(self, events: Sequence[WatchEvent]) -> None:
        """Apply the events of the watches."""
        self.cache.apply(events)
        self.profiles.apply(events)


class Heartbeat:
    """Shows other threads whether the event loop that answers reviews still makes progress."""

    def __init__(self, monotonic_s: Callable[[], float] = time.monotonic) -> None:
        self._monotonic_s = monotonic_s
        self._at_s = monotonic_s()

    async def go_on(self) -> None:
        while True:
            self._at_s = self._monotonic_s()
            await asyncio.sleep(_BEAT_S)

    def stuck(self) -> dict[str, float]:
        """Return the number of seconds without progress by the name of the loop. The mapping is
        empty while the loop makes progress."""
        late_s = self._monotonic_s() - self._at_s
        return {"reviews": late_s} if late_s > STUCK_AFTER_S else {}


async def serve_webhook(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Answer admission reviews until a signal arrives. The package ``kubernetes`` must be
    configured for the cluster. Raise ``BadSettings``."""
    if settings.webhook_tls is None:
        raise BadSettings(
            "webhook_tls_cert and webhook_tls_key are not set, but the API server calls webhooks "
            "over TLS only. Example: webhook_tls_cert: /etc/headroom/tls/tls.crt"
        )
    tls = ServerTls(settings.webhook_tls)
    api = KubeApi(load_configuration())
    telemetry = WebhookTelemetry(CollectorRegistry())
    telemetry.registry.register(CertificateCollector({"webhook": settings.webhook_tls.cert}))
    loops = Loops(lambda loop: telemetry.loop_failures.labels(loop).inc)
    decider = Decider(settings)
    kinds = [kind for kind in watched_kinds(settings.agent_namespace) if kind.name in KINDS]
    sources = KubernetesSources(api, decider.apply, [*kinds, profile_kind()], pace=pace)
    app = webhook_app(
        Webhook(
            decider.context,
            lambda: unready(sources.health, settings.blind_after_s),
            loops.stuck,
            telemetry,
            settings.max_body,
        )
    )
    reloading = SettingsReloader(origin, settings, decider.take, telemetry)
    sources.start()
    port = Port("webhook", settings.host, settings.webhook_port, app, LimitedProtocol, tls)
    beat = Heartbeat()
    loops.keep("reviews", beat.go_on)
    try:
        with metrics_guard(settings) as guard:
            probes = probes_port(
                "Headroom webhook",
                settings,
                lambda: unready(sources.health, settings.blind_after_s),
                lambda: loops.stuck() | beat.stuck(),
                telemetry.exposition,
                guard,
            )
            # Serve probes in their own thread, so that they are answered while reviews wait for
            # each other.
            with serve_beside(probes) as address:
                announce(msgspec.json.encode({"event": "serving", "probes": address}).decode())
                await serve_ports([port], announce, started=lambda: reloading.start(loops))
    finally:
        loops.stop()
        await asyncio.get_running_loop().run_in_executor(None, sources.stop)
        api.close()
