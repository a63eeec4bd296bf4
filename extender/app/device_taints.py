"""The process of the controller of device taints: four watches, one port, DeviceTaintRules."""

import asyncio
import time
import uuid
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from extender.app.probes import metrics_guard, probes_port
from extender.app.readiness import unready
from extender.config.reload import ANYWHERE, Origin, SettingsReloader
from extender.config.settings import Mode, Settings
from extender.controllers.device_taints import EVERY_S, LEAST_S, DeviceTaintsController, Reports
from extender.kube.claims import Claims
from extender.kube.client import KubeApi, load_configuration
from extender.kube.election import RETRY_S, Election
from extender.kube.informers import KubernetesSources
from extender.kube.reflector import DEFAULT_PACE, Pace
from extender.kube.resources import watched_kinds
from extender.kube.taint_rules import TaintRules
from extender.observability.metrics import CertificateCollector
from extender.observability.taint_metrics import TaintTelemetry
from extender.periodic import Loops
from extender.server.ports import serve_ports

LEASE_NAME = "headroom-device-taints"
WATCHED = ("gpunodes", "leases", "resourceslices", "resourceclaims")


async def serve_device_taints(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Taint devices in the cluster of the kubernetes package's configuration, until a signal;
    raise ``BadSettings``."""
    api = KubeApi(load_configuration())
    telemetry = TaintTelemetry(CollectorRegistry())
    telemetry.registry.register(CertificateCollector(settings.served_certificates))
    loops = Loops(lambda loop: telemetry.loop_failures.labels(loop).inc)
    changed, loop = asyncio.Event(), asyncio.get_running_loop()
    claims = Claims()
    reports = Reports(claims, lambda: loop.call_soon_threadsafe(changed.set))
    kinds = [kind for kind in watched_kinds(settings.agent_namespace) if kind.name in WATCHED]
    sources = KubernetesSources(api, reports.apply, kinds, pace=pace)
    election = Election(
        api, settings.agent_namespace, LEASE_NAME, uuid.uuid4().hex, time.monotonic, time.time
    )
    current = settings
    controller = DeviceTaintsController(
        reports,
        claims,
        TaintRules(api),
        lambda: election.leads,
        lambda: current.mode is Mode.OBSERVE,
        settings.stale_after_s,
        telemetry,
        time.monotonic,
    )

    def follow(new: Settings) -> None:
        nonlocal current
        current = new

    def unlisted() -> str:
        return unready(sources.health, settings.blind_after_s)

    def not_ready() -> str:
        return unlisted() or controller.obstacle

    async def compete() -> None:
        await asyncio.to_thread(election.attempt)
        changed.set()

    def started() -> None:
        SettingsReloader(origin, settings, follow, telemetry).start(loops)
        loops.start("election", compete, RETRY_S, unready=unlisted)
        loops.start("taint", controller.round, EVERY_S, changed, LEAST_S, unlisted)

    title = "Headroom device taints"
    sources.start()
    try:
        with metrics_guard(settings) as guard:
            port = probes_port(title, settings, not_ready, loops.stuck, telemetry.exposition, guard)
            await serve_ports([port], announce, started=started)
    finally:
        loops.stop()
        await loop.run_in_executor(None, election.release)
        await loop.run_in_executor(None, sources.stop)
        api.close()
