"""The console: the debug API with its page, the event feed, and the metrics of the fleet."""

import time
from collections.abc import Callable, Sequence

import structlog
from fastapi import APIRouter, FastAPI

from headroom.console.app import console_app
from headroom.console.feed.feed import ChangeFeed, Feed
from headroom.console.feed.journal_follower import HoldsUpdater, JournalFollower
from headroom.console.feed.journals import Journals
from headroom.console.feed.memory_changes import MemoryChanges
from headroom.console.gpu_user_reader import GpuUserReader
from headroom.console.history.history import History
from headroom.console.history.ranges import PrometheusRanges
from headroom.console.history.recorder import HistoryRecorder
from headroom.console.metrics import FleetCollector, Scrapes
from headroom.console.view_context import Context, no_quotas
from headroom.console.views.process import SettingsView
from headroom.contract.decision import decision_of
from headroom.contract.kube import Pod
from headroom.contract.watched import WatchEvent
from headroom.core.cluster.changes import Effects
from headroom.core.cluster.trackers.prediction_tracker import Outcome
from headroom.core.journal.decision_records import Bounds
from headroom.core.journal.journal import Journal
from headroom.core.rules.pod_requests import ResourceQuota
from headroom.core.whatif.pending_pods import Pending
from headroom.runtime.follow.claims import Claims
from headroom.runtime.follow.cluster_view import ClusterView
from headroom.runtime.kube.profiles import Profiles
from headroom.runtime.loops import stuck_sentence
from headroom.runtime.server.auth import Guard
from headroom.runtime.settings.ports import MetricsAccess
from headroom.runtime.settings.settings import Settings

log = structlog.get_logger()

#: Memory limit of the copy of each followed journal if the process also runs an extender.
BESIDE_AN_EXTENDER = Bounds(size_bytes=4 << 20)


class Console:
    """Shows ``view`` and the journals of the extenders that the settings name.

    If an extender runs in the same process, ``own`` is its journal and ``routes`` has its routes,
    which the console's port serves too. The journals of other extenders then get less memory.
    ``pods_on`` is passed to ``GpuUserReader``. It is None if there is no API server.
    """

    def __init__(
        self,
        view: ClusterView,
        pending: Callable[[], Pending],
        own: Journal | None = None,
        pods_on: Callable[[str], Sequence[Pod]] | None = None,
        routes: APIRouter | None = None,
    ) -> None:
        settings = view.settings
        self.view = view
        self._routes = routes
        self._scrapes = Scrapes()
        self.profiles, self._claims = Profiles(), Claims()
        self.following = JournalFollower(
            settings.extenders,
            settings.debug_port,
            view.name,
            settings.journal if own is None else BESIDE_AN_EXTENDER,
            settings.peer_ca,
        )
        self.journals = Journals(view.name, own or Journal(settings.journal), self.following.now)
        self.feed = Feed(time.time, lambda: view.cluster.generation)
        self._has_extender = own is not None
        view.event_queue.settles = self._has_extender
        ours = view.name if own is not None else ""
        self.changes = ChangeFeed(view.cluster, self.journals, self.feed, ours)
        self._memory_changes = MemoryChanges(view.cluster, self.feed)
        self._recorder = HistoryRecorder(view.cluster, History(), time.time)
        self._users = GpuUserReader(view.cluster, pods_on, view.deliver) if pods_on else None
        view.event_queue.reactions.append(self._publish_misses)
        view.telemetry.registry.register(
            FleetCollector(
                view.cluster,
                lambda: self._scrapes.snapshot,
                pending,
                settings.device_series,
                settings.stale_after_s,
                lambda: self._recorder.held,
            )
        )

    def start(self) -> None:
        self.following.start()
        if not self._has_extender:  # an extender already tracks its own holds
            HoldsUpdater(self.following.now, self.view.enqueue).start(self.view.loops)
        self.changes.start(self.view.loops, self.view.begun)
        self._memory_changes.start(self.view.loops, self.view.begun)
        self._recorder.start(self.view.loops, self.view.begun)
        if self._users is not None:
            self._users.start(self.view.loops, self.view.begun)

    def authorize(self, authorization: Callable[[], str]) -> None:
        """Authenticate to extenders with the header that ``authorization`` returns."""
        self.following.authorization = authorization

    def stop(self) -> None:
        """Stop reading from extenders."""
        self.following.stop()

    def take(self, events: Sequence[WatchEvent]) -> None:
        """Apply events on which decisions and views depend. Any thread may call this method."""
        self._claims.apply(events)
        self.view.enqueue(events)

    def app(
        self,
        guard: Guard | None = None,
        quotas: Callable[[str], Sequence[ResourceQuota] | None] = no_quotas,
    ) -> FastAPI:
        """Return the app of the debug API. ``guard`` authorizes readers; without a guard, every
        client may read."""
        return console_app(self._context(guard, quotas), self._routes)

    def _context(
        self,
        guard: Guard | None,
        quotas: Callable[[str], Sequence[ResourceQuota] | None],
    ) -> Context:
        """Return the context that the views read."""
        view, settings = self.view, self.view.settings
        return Context(
            view.cluster,
            self.journals,
            view.telemetry,
            view.unready,
            time.monotonic,
            time.time,
            view.name,
            self.feed,
            lambda: view.watches(),
            guard,
            self._settings_now,
            lambda: stuck_sentence(view.stuck()),
            quotas,
            settings.scheduler_name,
            lambda: view.settings.gpu_hour_price,
            profiles=self.profiles,
            claims=self._claims,
            history=self._recorder.history,
            ranges=ranges_of(settings),
            growing=lambda: self._recorder.growing,
            scrapes=self._scrapes,
            open_metrics=settings.metrics_access is MetricsAccess.OPEN,
        )

    def _settings_now(self) -> SettingsView:
        settings, reloading = self.view.settings, self.view.reloading
        return SettingsView(
            mode=settings.mode.value,
            file=str(reloading.file) if reloading.file else None,
            rejected=list(reloading.rejected),
            after_restart=list(reloading.after_restart),
            grafana_url=settings.grafana_url,
            long_history=settings.prometheus_url is not None,
        )

    def _publish_misses(self, effects: Effects) -> None:
        for outcome in effects.outcomes:
            publish_miss(self.feed, outcome, self.view.cluster.pod(outcome.uid))


def ranges_of(settings: Settings) -> PrometheusRanges | None:
    """Return the reader of Prometheus history, or None if ``prometheus_url`` is not set."""
    if settings.prometheus_url is None:
        return None
    return PrometheusRanges(
        settings.prometheus_url,
        settings.prometheus_token_file,
        settings.prometheus_ca,
        settings.queries,
    )


def publish_miss(feed: Feed, outcome: Outcome, pod: Pod | None) -> None:
    """Publish a prediction that any extender missed. Ignore all other outcomes."""
    if outcome.surprise is None:
        return
    feed.publish(
        "prediction_missed",
        node=outcome.node,
        device=",".join(outcome.observed),
        namespace=outcome.reservation.namespace,
        name=outcome.reservation.name,
        uid=outcome.uid,
        decision_id=decision_of(pod) if pod else "",
        cause=outcome.surprise.value,
        message=outcome.surprise.sentence,
    )
