"""Serves a real cluster: what its API server tells comes in, what is promised is kept in it."""

import time
from collections.abc import Callable, Sequence

import msgspec
import structlog

from extender.cluster.quotas import ResourceQuota
from extender.kubeapi import ApiError, KubeApi, load_configuration
from extender.kubeevents import KubeEvents
from extender.kubenodes import KubeNodes
from extender.kubequotas import KubeQuotas
from extender.kubereviews import KubeReviews
from extender.ledger.hands import KubernetesHands
from extender.ledger.kubernetes import KubernetesStore
from extender.ledger.preempting import RoomMaker
from extender.loopapi import LoopApi
from extender.settings import Settings
from extender.sources.kinds import watched_kinds
from extender.sources.kubernetes import KubernetesSources
from extender.sources.reflector import DEFAULT_PACE, Pace
from extender.tls import ServerTls
from extender.web.auth import Guard
from extender.wiring.clients import keep_client_ca
from extender.wiring.history import history_brought
from extender.wiring.memory import keep_what_answers_need
from extender.wiring.mirroring import Mirroring
from extender.wiring.readiness import DISPENSABLE, unready
from extender.wiring.reloading import ANYWHERE, Origin
from extender.wiring.replica import Extender
from extender.wiring.serving import serve

log = structlog.get_logger()

NOTHING_LISTED = "Headroom has not yet listed: everything"


async def serve_cluster(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
) -> None:
    """Serve the cluster that the kubernetes package's configuration points at, until a signal."""
    keep_what_answers_need()
    configuration = load_configuration(
        hint="to try without one: headroom serve --embedded FLEET.yaml"
    )
    api, loop_api = KubeApi(configuration), LoopApi(configuration)
    # Of its own, since whoever reads may ask for more than connections that binds need.
    reviews = KubeApi(configuration, connect_timeout_s=2.0, read_timeout_s=3.0)
    guard = None if settings.debug_open else Guard(KubeReviews(reviews), time.monotonic)
    readable = KubeQuotas(reviews)

    def quotas(namespace: str) -> Sequence[ResourceQuota] | None:
        try:
            return readable.of(namespace)
        except (ApiError, msgspec.MsgspecError) as err:
            log.warning("quotas_not_read", namespace=namespace, error=str(err))
            return None

    debug_tls = ServerTls(settings.debug_tls) if settings.debug_tls else None
    sources: KubernetesSources | None = None

    def missing() -> str:
        health = sources.health if sources else ()
        return unready(health, settings.blind_after_s) if health else NOTHING_LISTED

    post = KubeEvents(api, time.time).post
    watched = watched_kinds(settings.agent_namespace)
    awaited = [kind.type for kind in watched if kind.name not in DISPENSABLE]
    extender = Extender(settings, missing, post, awaited, origin)
    extender.cluster.budgets.awaited = True
    sources = KubernetesSources(
        api,
        extender.tell,
        watched_kinds(settings.agent_namespace, extender.cluster.concerns),
        pace=pace,
        give_way=extender.calls.give_way,
    )
    watches = sources
    extender.observed.health = lambda: watches.health
    store = KubernetesStore(loop_api, api, lease_namespace=settings.agent_namespace)
    ledger = extender.open_ledger(store)
    hands = KubernetesHands(loop_api, extender.post)
    extender.send_away(store, ledger, hands)
    extender.make_room(RoomMaker(store, hands, time.time, extender.new_id))
    verbs = extender.verbs_app(ledger, shown=lambda pod: None)
    sources.start()
    mirroring = Mirroring(
        extender.cluster, settings.mirror_vram, extender.unready, KubeNodes(api).show
    )
    extender.retrying.start(extender.loops, ledger)
    mirroring.start(extender.loops)
    if guard is not None and debug_tls is not None:
        know = debug_tls.know
        extender.loops.keep("client-ca", lambda: keep_client_ca(reviews, know))
    try:
        async with history_brought(settings, extender):
            debug = extender.debug_app(guard, quotas)
            await serve(extender, ledger, verbs, debug, announce, debug_tls)
    finally:
        extender.loops.stop()
        await extender.loop.run_in_executor(None, sources.stop)
        api.close()
        await loop_api.close()
        reviews.close()
