"""The process of the extender, which serves kube-scheduler's calls on one port and its journal on
another port."""

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from extender.event_recorder import KubeEvents
from extender.extended_resource import ExtendedResourceController
from extender.extender import Extender
from extender.groups.reader import KubeGroups
from extender.ledger.kube_store import KubernetesEvictor, KubernetesStore
from extender.ledger.ledger import Ledger
from extender.preemption.writer import PreemptionWriter
from extender.serving import serve
from headroom.runtime.debug_port import debug_port
from headroom.runtime.follow.cluster_connection import ApiServer
from headroom.runtime.kube.async_client import AsyncKubeApi
from headroom.runtime.kube.reflector import DEFAULT_PACE, Pace
from headroom.runtime.settings.constraints import check_scheduler_is_authenticated
from headroom.runtime.settings.reload import ANYWHERE, Origin
from headroom.runtime.settings.settings import Settings


async def serve_extender(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Serve kube-scheduler's calls until a signal, for the cluster of the kubernetes package's
    configuration. Raise ``BadSettings``."""
    async with extender_of(settings, pace, origin) as (server, extender, ledger):
        app = extender.app(server.guard)
        async with server.followed_by(extender, extender.enqueue):
            start_writers(server, extender, ledger)
            second = debug_port(settings, app, server.debug_tls)
            await serve(extender, ledger, extender.verbs_app(ledger), second, announce)


@asynccontextmanager
async def extender_of(
    settings: Settings, pace: Pace, origin: Origin
) -> AsyncIterator[tuple[ApiServer, Extender, Ledger]]:
    """Yield the API server, and an extender whose ledger is stored there. Raise ``BadSettings``."""
    server = ApiServer(settings, pace)
    check_scheduler_is_authenticated(settings)
    loop_api = AsyncKubeApi(server.configuration)
    post = KubeEvents(server.api, time.time).post
    extender = Extender(settings, server.unready, post, server.unlisted, origin)
    store = KubernetesStore(loop_api, server.api, lease_namespace=settings.agent_namespace)
    ledger = extender.open_ledger(store, store.list_bound)
    evictor = KubernetesEvictor(loop_api)
    extender.enable_evictions(store, ledger, evictor)
    extender.enable_group_evictions(store, KubeGroups(server.api), evictor)
    extender.enable_preemption(PreemptionWriter(store, evictor, time.time, extender.new_id))
    try:
        yield server, extender, ledger
    finally:
        await loop_api.close()


def start_writers(server: ApiServer, extender: Extender, ledger: Ledger) -> None:
    """Start the controllers that are needed only in a real cluster."""
    extender.requeue_controller.start(extender.loops, ledger)
    ExtendedResourceController(extender.cluster, extender.settings.mirror_vram, server.api).start(
        extender.loops, extender.unready
    )
