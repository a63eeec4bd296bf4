"""The process of the recorder, which runs two watches, serves one port and writes VRAMProfiles."""

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import replace

from prometheus_client import CollectorRegistry

from headroom.recorder.kube_profiles import OwnerReader, ProfileStore
from headroom.recorder.metrics import RecorderTelemetry
from headroom.recorder.past_lives import PastLives
from headroom.recorder.pod_facts import ObservedPod, read_pod
from headroom.recorder.prometheus_history import CHECK_S, MAX_TIMEOUT_S, HistoryReader, Source
from headroom.recorder.rounds import Observed, Recorder
from headroom.runtime.debug_port import probes_port
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
from headroom.runtime.settings.settings import Settings
from headroom.runtime.telemetry import CertificateCollector

LEASE_NAME = "headroom-recorder"
#: Seconds between two rounds.
EVERY_S = 15.0


async def serve_recorder(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
    every_s: float = EVERY_S,
) -> None:
    """Write VRAMProfiles until a signal arrives. The package ``kubernetes`` must be configured for
    the cluster. Raise ``BadSettings``."""
    api = KubeApi(load_configuration())
    telemetry = RecorderTelemetry(CollectorRegistry())
    telemetry.registry.register(CertificateCollector(settings.served_certificates))
    loops = Loops(lambda loop: telemetry.loop_failures.labels(loop).inc)
    observed = Observed()
    kinds = {kind.name: kind for kind in watched_kinds(settings.agent_namespace)}
    pods = replace(
        kinds["pods"],
        type=ObservedPod,
        decode=lambda raw: read_pod(raw, settings.rules),
        concerns=lambda pod: pod.facts is not None,
    )
    sources = KubernetesSources(api, observed.apply, [kinds["gpunodes"], pods], pace=pace)
    election = Election(
        api, settings.agent_namespace, LEASE_NAME, uuid.uuid4().hex, time.monotonic, time.time
    )
    past = PastLives()
    owners, store = OwnerReader(api), ProfileStore(api)
    recorder = Recorder(observed, owners, store, lambda: election.leads, telemetry, time.time, past)
    history = _history_reader(settings, past, lambda: election.leads)

    def not_ready() -> str:
        return unready(sources.health, settings.blind_after_s)

    async def compete() -> None:
        await asyncio.to_thread(election.attempt)

    def started() -> None:
        # Changed settings take effect after a restart, but errors in the file are counted
        # immediately.
        SettingsReloader(origin, settings, lambda _: None, telemetry).start(loops)
        loops.start("election", compete, RETRY_S, unready=not_ready)
        loops.start("record", recorder.round, every_s, unready=not_ready)
        if history is not None:
            loops.start("history", history.check, CHECK_S, unready=not_ready)

    sources.start()
    try:
        with metrics_guard(settings) as guard:
            port = probes_port(
                "Headroom recorder", settings, not_ready, loops.stuck, telemetry.exposition, guard
            )
            await serve_ports([port], announce, started=started)
    finally:
        loops.stop()
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, election.release)
        await loop.run_in_executor(None, sources.stop)
        api.close()


def _history_reader(
    settings: Settings, past: PastLives, leads: Callable[[], bool]
) -> HistoryReader | None:
    if settings.prometheus_url is None:
        return None
    source = Source(
        settings.prometheus_url,
        min(settings.prometheus_timeout_s, MAX_TIMEOUT_S),
        settings.prometheus_token_file,
        settings.prometheus_ca,
        settings.queries,
    )
    return HistoryReader(source, past, leads, time.time, time.monotonic)
