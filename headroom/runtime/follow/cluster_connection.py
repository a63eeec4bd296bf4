"""Connects a process to the API server, for its watches and for the authorization of its
readers."""

import contextlib
import time
from collections.abc import AsyncIterator, Callable, Sequence

from headroom.contract.watched import WatchEvent
from headroom.runtime.follow.cluster_view import ClusterView
from headroom.runtime.follow.sm_history import sm_history
from headroom.runtime.kube.client import KubeApi, load_configuration
from headroom.runtime.kube.informers import KubernetesSources
from headroom.runtime.kube.readiness import DISPENSABLE, unready
from headroom.runtime.kube.reflector import Pace
from headroom.runtime.kube.resources import Kind, watched_kinds
from headroom.runtime.server.auth import Guard
from headroom.runtime.server.reviews import KubeReviews
from headroom.runtime.server.tls import ServerTls
from headroom.runtime.settings.settings import Settings

_WITHOUT_CLUSTER = "to try Headroom without a cluster: headroom serve --embedded FLEET.yaml"
NOTHING_LISTED = "Headroom has not yet listed: everything"


class ApiServer:
    """The API server and its watches, for a process that follows the cluster."""

    def __init__(self, settings: Settings, pace: Pace) -> None:
        """Connect to the cluster of the kubeconfig or the service account. Raise ``BadSettings`` if
        none is configured."""
        self.configuration = configuration = load_configuration(hint=_WITHOUT_CLUSTER)
        self.api = KubeApi(configuration)
        # Reviews have separate connections, so that readers cannot use up the connections for
        # binds.
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
        """Return why no decision is possible yet, or "" if all kinds were listed and their watches
        have had recent contact with the API server."""
        health = self._sources.health if self._sources else ()
        return unready(health, self._settings.blind_after_s) if health else NOTHING_LISTED

    @contextlib.asynccontextmanager
    async def followed_by(
        self,
        view: ClusterView,
        take: Callable[[Sequence[WatchEvent]], None],
        for_people: Sequence[Kind] = (),
        take_for_people: Callable[[Sequence[WatchEvent]], None] = lambda events: None,
    ) -> AsyncIterator[None]:
        """While the context lasts, deliver the changes of the watches to ``take``, which passes
        them to the view.

        The process can be ready before the kinds in ``for_people`` are listed, because no decision
        depends on them.
        """
        settings = self._settings
        self._sources = sources = KubernetesSources(
            self.api,
            take,
            watched_kinds(settings.agent_namespace, view.cluster.concerns),
            pace=self._pace,
        )
        view.watches = lambda: sources.health
        apart = KubernetesSources(self.api, take_for_people, for_people, pace=self._pace)
        sources.start()
        apart.start()
        try:
            async with sm_history(settings, view.telemetry, view.cluster.activities, view.enqueue):
                yield
        finally:
            view.loops.stop()
            for each in (sources, apart):
                await view.loop.run_in_executor(None, each.stop)
            self.api.close()
            self.reviews.close()
