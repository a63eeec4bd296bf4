"""The process of the admission webhook: three watches, one port. It knows no pods and no ledger."""

import asyncio
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from extender.admission.around import Around
from extender.admission.known import KINDS, KnownObjects
from extender.certs.expiry import CertificateCollector
from extender.errors import BadSettings
from extender.kubeapi import KubeApi, load_configuration
from extender.settings import Settings
from extender.sources.kinds import watched_kinds
from extender.sources.kubernetes import KubernetesSources
from extender.sources.reflector import DEFAULT_PACE, Pace
from extender.telemetry import WebhookTelemetry
from extender.tls import ServerTls
from extender.web.admission import Webhook, webhook_app
from extender.wiring.loops import Loops
from extender.wiring.patience import Patient
from extender.wiring.ports import Port, serve_ports
from extender.wiring.readiness import unready
from extender.wiring.reloading import ANYWHERE, Origin, Reloading


class Decider:
    """Current settings and known objects, for the endpoints."""

    def __init__(self, settings: Settings) -> None:
        self.known = KnownObjects()
        self.take(settings)

    def take(self, settings: Settings) -> None:
        """Use these settings from now on."""
        self._rules, self._wishes = settings.rules, settings.wishes

    def around(self, namespace: str) -> Around:
        return self.known.around(self._rules, self._wishes, namespace)


async def serve_webhook(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Answer admission reviews of the cluster that the kubernetes package's configuration points
    at, until a signal. Raises ``BadSettings``."""
    if settings.webhook_tls is None:
        raise BadSettings(
            "webhook_tls_cert and webhook_tls_key are not set, and an API server calls webhooks "
            "over TLS only. Example: webhook_tls_cert: /etc/headroom/tls/tls.crt"
        )
    tls = ServerTls(settings.webhook_tls)
    api = KubeApi(load_configuration())
    telemetry = WebhookTelemetry(CollectorRegistry())
    telemetry.registry.register(CertificateCollector({"webhook": settings.webhook_tls.cert}))
    loops = Loops(lambda loop: telemetry.loop_failures.labels(loop).inc())
    decider = Decider(settings)
    kinds = [kind for kind in watched_kinds(settings.agent_namespace) if kind.name in KINDS]
    sources = KubernetesSources(api, decider.known.apply, kinds, pace=pace)
    app = webhook_app(
        Webhook(
            decider.around,
            lambda: unready(sources.health, settings.blind_after_s),
            loops.stuck,
            telemetry,
            settings.max_body,
        )
    )
    reloading = Reloading(origin, settings, decider.take, telemetry)
    sources.start()
    port = Port("webhook", settings.host, settings.webhook_port, app, Patient, tls)
    try:
        await serve_ports([port], announce, started=lambda: reloading.start(loops))
    finally:
        loops.stop()
        await asyncio.get_running_loop().run_in_executor(None, sources.stop)
        api.close()
