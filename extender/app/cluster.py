"""Serves a real cluster: follows the API server's watches, and writes reservations to it."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum

import structlog
from prometheus_client import CollectorRegistry

from extender.app.cluster_view import ClusterView
from extender.app.console import Console
from extender.app.extender import Extender
from extender.app.memory_policy import limit_heap
from extender.app.readiness import DISPENSABLE, unready
from extender.app.serving import serve, serve_views
from extender.config.constraints import check_scheduler_is_authenticated
from extender.config.reload import ANYWHERE, Origin
from extender.config.settings import Settings
from extender.console.auth import Guard
from extender.console.reviews import KubeReviews
from extender.controllers.event_recorder import KubeEvents
from extender.controllers.extended_resource import ExtendedResourceController
from extender.controllers.preemption import PreemptionWriter
from extender.controllers.sm_history import sm_history
from extender.kube.api_errors import ApiError
from extender.kube.async_client import AsyncKubeApi
from extender.kube.client import Configuration, KubeApi, authorization, load_configuration
from extender.kube.informers import KubernetesSources
from extender.kube.node_pods import NodePods
from extender.kube.quotas import KubeQuotas
from extender.kube.reflector import DEFAULT_PACE, Pace
from extender.kube.resources import profile_kind, watched_kinds
from extender.ledger.kube_groups import KubeGroups
from extender.ledger.kube_store import KubernetesEvictor, KubernetesStore
from extender.observability.fleet_metrics import PendingPods
from extender.observability.metrics import ViewTelemetry
from extender.server.client_ca import ClientCa
from extender.server.tls import ServerTls
from extender.state.pod_requests import ResourceQuota

log = structlog.get_logger()

NOTHING_LISTED = "Headroom has not yet listed: everything"


class Parts(Enum):
    """The parts that one process runs."""

    EXTENDER = "extender"
    CONSOLE = "console"
    BOTH = "both"


class Cluster:
    """The API server and its watches."""

    def __init__(self, configuration: Configuration, settings: Settings, pace: Pace) -> None:
        self.configuration = configuration
        self.api = KubeApi(configuration)
        # Separate connections: requests of readers must not use those of binds.
        self.reviews = KubeApi(configuration, connect_timeout_s=2.0, read_timeout_s=3.0)
        self.guard = (
            None if settings.debug_open else Guard(KubeReviews(self.reviews), time.monotonic)
        )
        self.debug_tls = ServerTls(settings.debug_tls) if settings.debug_tls else None
        self.unlisted = [
            kind.type
            for kind in watched_kinds(settings.agent_namespace)
            if kind.name not in DISPENSABLE
        ]
        self._settings = settings
        self._pace = pace
        self._sources: KubernetesSources | None = None

    def unready(self) -> str:
        """Return why nothing can be decided yet; "" if all kinds were listed and their watches had
        contact with the API server lately."""
        health = self._sources.health if self._sources else ()
        return unready(health, self._settings.blind_after_s) if health else NOTHING_LISTED

    def quotas(self) -> Callable[[str], Sequence[ResourceQuota] | None]:
        """Return a reader of ResourceQuotas, for the console."""
        quotas = KubeQuotas(self.reviews)

        def read(namespace: str) -> Sequence[ResourceQuota] | None:
            try:
                return quotas.of(namespace)
            except ApiError as err:
                log.warning("quotas_not_read", namespace=namespace, error=str(err))
                return None

        return read

    @contextlib.asynccontextmanager
    async def followed_by(self, view: ClusterView, for_people: bool) -> AsyncIterator[None]:
        """Deliver the watches' changes to the view while the context lasts. ``for_people``: readers
        may also authenticate with a client certificate."""
        settings = self._settings
        self._sources = sources = KubernetesSources(
            self.api,
            view.take_for_all if for_people else view.enqueue,
            watched_kinds(settings.agent_namespace, view.cluster.concerns),
            pace=self._pace,
        )
        view.observed.health = lambda: sources.health
        sources.start()
        # Apart from the others: no decision depends on profiles, so the console is ready without
        # them.
        profiles = KubernetesSources(
            self.api,
            view.take_for_people,
            [profile_kind()] if for_people else (),
            pace=self._pace,
        )
        profiles.start()
        if for_people and self.guard is not None and self.debug_tls is not None:
            ClientCa(self.reviews, self.debug_tls.request_client_certificates).start(view.loops)
        try:
            async with sm_history(settings, view.telemetry, view.cluster.activities, view.enqueue):
                yield
        finally:
            view.loops.stop()
            await view.loop.run_in_executor(None, sources.stop)
            await view.loop.run_in_executor(None, profiles.stop)
            self.api.close()
            self.reviews.close()


async def serve_cluster(
    settings: Settings,
    announce: Callable[[str], None],
    pace: Pace = DEFAULT_PACE,
    origin: Origin = ANYWHERE,
    parts: Parts = Parts.BOTH,
) -> None:
    """Serve the cluster of the kubernetes package's configuration until a signal; raise
    ``BadSettings``."""
    limit_heap()
    hint = "to try Headroom without a cluster: headroom serve --embedded FLEET.yaml"
    configuration = load_configuration(hint=hint)
    if parts is not Parts.CONSOLE:
        check_scheduler_is_authenticated(settings)
    cluster = Cluster(configuration, settings, pace)
    if parts is Parts.CONSOLE:
        await _serve_console(cluster, settings, announce, origin)
    else:
        await _serve_extender(cluster, settings, announce, origin, parts is Parts.BOTH)


async def _serve_extender(
    cluster: Cluster,
    settings: Settings,
    announce: Callable[[str], None],
    origin: Origin,
    with_console: bool,
) -> None:
    loop_api = AsyncKubeApi(cluster.configuration)
    post = KubeEvents(cluster.api, time.time).post
    extender = Extender(settings, cluster.unready, post, cluster.unlisted, origin)
    store = KubernetesStore(loop_api, cluster.api, lease_namespace=settings.agent_namespace)
    ledger = extender.open_ledger(store, store.list_bound)
    evictor = KubernetesEvictor(loop_api)
    extender.enable_evictions(store, ledger, evictor)
    extender.enable_group_evictions(store, KubeGroups(cluster.api), evictor)
    extender.enable_preemption(PreemptionWriter(store, evictor, time.time, extender.new_id))
    verbs = extender.verbs_app(ledger)
    console = None
    second = extender.app(cluster.guard)
    if with_console:
        console = Console(
            extender,
            lambda: extender.pending_events_controller.pending,
            extender.journal,
            NodePods(cluster.reviews).on,
        )
        console.authorize(lambda: authorization(cluster.configuration))
        second = console.app(cluster.guard, cluster.quotas())
    try:
        async with cluster.followed_by(extender, with_console):
            extender.requeue_controller.start(extender.loops, ledger)
            ExtendedResourceController(extender.cluster, settings.mirror_vram, cluster.api).start(
                extender.loops, extender.unready
            )
            await serve(extender, ledger, verbs, second, announce, cluster.debug_tls, console)
    finally:
        await loop_api.close()


async def _serve_console(
    cluster: Cluster, settings: Settings, announce: Callable[[str], None], origin: Origin
) -> None:
    telemetry = ViewTelemetry(CollectorRegistry(), "headroom_console_ready")
    view = ClusterView(settings, cluster.unready, telemetry, cluster.unlisted, origin)
    pods = PendingPods(view.cluster)
    console = Console(view, lambda: pods.pending, pods_on=NodePods(cluster.reviews).on)
    pods.decision = console.journals.of_uid
    console.authorize(lambda: authorization(cluster.configuration))
    app = console.app(cluster.guard, cluster.quotas())
    async with cluster.followed_by(view, True):
        pods.start(view.loops, view.unready)
        await serve_views(view, console, app, announce, cluster.debug_tls)
