"""The process of the admission webhook: three watches, one port. It has no pods and no ledger."""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from extender.admission.context import KINDS, AdmissionContext, ObjectCache
from extender.admission.endpoints import Webhook, webhook_app
from extender.app.readiness import unready
from extender.config.reload import ANYWHERE, Origin, SettingsReloader
from extender.config.settings import Settings
from extender.errors import BadSettings
from extender.kube.client import KubeApi, load_configuration
from extender.kube.informers import KubernetesSources
from extender.kube.reflector import DEFAULT_PACE, Pace
from extender.kube.resources import watched_kinds
from extender.observability.metrics import CertificateCollector, WebhookTelemetry
from extender.periodic import Loops
from extender.server.http_limits import LimitedProtocol
from extender.server.ports import Port, serve_ports
from extender.server.tls import ServerTls


class Decider:
    """Holds the current settings and cached objects, for the endpoints."""

    def __init__(self, settings: Settings) -> None:
        self.cache = ObjectCache()
        self.take(settings)

    def take(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self._rules, self._settings = settings.rules, settings.webhook

    def context(self, namespace: str) -> AdmissionContext:
        return self.cache.context(self._rules, self._settings, namespace)


async def serve_webhook(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Answer admission reviews of the cluster of the kubernetes package's configuration, until a
    signal; raise ``BadSettings``."""
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
    sources = KubernetesSources(api, decider.cache.apply, kinds, pace=pace)
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
    try:
        await serve_ports([port], announce, started=lambda: reloading.start(loops))
    finally:
        loops.stop()
        await asyncio.get_running_loop().run_in_executor(None, sources.stop)
        api.close()
