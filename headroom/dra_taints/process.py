"""The process of the controller of device taints, with its watches and its port."""

import asyncio
import time
import uuid
from collections.abc import Callable

from prometheus_client import CollectorRegistry

from headroom.dra_taints.controller import EVERY_S, LEAST_S, DeviceTaintsController, Reports
from headroom.dra_taints.metrics import TaintTelemetry
from headroom.dra_taints.taint_rules import TaintRules
from headroom.runtime.debug_port import probes_port
from headroom.runtime.follow.claims import Claims
from headroom.runtime.kube.client import KubeApi, load_configuration
from headroom.runtime.kube.election import RETRY_S, Election
from headroom.runtime.kube.informers import KubernetesSources
from headroom.runtime.kube.readiness import unready
from headroom.runtime.kube.reflector import DEFAULT_PACE, Pace
from headroom.runtime.kube.resources import watched_kinds
from headroom.runtime.loops import Loops
from headroom.runtime.metrics_guard import metrics_guard
from headroom.runtime.server.ports import serve_ports
from headroom.runtime.settings.reload import ANYWHERE, Origin, SettingsReloader
from headroom.runtime.settings.settings import Mode, Settings
from headroom.runtime.telemetry import CertificateCollector

LEASE_NAME = "headroom-device-taints"
WATCHED = ("gpunodes", "leases", "resourceslices", "resourceclaims")


async def serve_device_taints(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Taint devices until a signal arrives. The package ``kubernetes`` must be configured for the
    cluster. Raise ``BadSettings``."""
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
