"""The console: debug API, page, events and metrics of the fleet, over a view of the cluster."""

import time
from collections.abc import Callable, Sequence

from fastapi import FastAPI

from contract.kube import Pod
from extender.app.cluster_view import ClusterView
from extender.console.app import console_app
from extender.console.auth import Guard
from extender.console.view_context import no_quotas
from extender.observability.feed import ChangeFeed, Feed
from extender.observability.fleet_metrics import FleetCollector
from extender.observability.gpu_user_reader import GpuUserReader
from extender.observability.history_handover import HistoryHandover
from extender.observability.history_recorder import HistoryRecorder
from extender.observability.journal_follower import HoldsUpdater, JournalFollower
from extender.observability.journals import Journals
from extender.observability.outcome_recorder import publish_miss
from extender.state.changes import Effects
from extender.state.decision_records import Bounds
from extender.state.history import History
from extender.state.journal import Journal
from extender.state.pending_pods import Pending
from extender.state.pod_requests import ResourceQuota

#: Limits of the copy of each followed journal, in a process that also runs an extender.
BESIDE_AN_EXTENDER = Bounds(size_bytes=4 << 20)


class Console:
    """Reads ``view``, and the journals of the extenders in the settings. ``own`` is the journal of
    an extender in this process, which leaves less memory for the others. ``pods_on``: see
    ``GpuUserReader``; None: there is no API server."""

    def __init__(
        self,
        view: ClusterView,
        pending: Callable[[], Pending],
        own: Journal | None = None,
        pods_on: Callable[[str], Sequence[Pod]] | None = None,
    ) -> None:
        settings = view.settings
        self._view = view
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
        self._recorder = HistoryRecorder(view.cluster, History(), time.time)
        self._users = GpuUserReader(view.cluster, pods_on) if pods_on is not None else None
        self.handover = HistoryHandover(
            [(place, settings.debug_port) for place in settings.consoles],
            view.name,
            self._recorder.history,
            view.loop.call_soon_threadsafe,
            settings.peer_ca,
        )
        view.event_queue.reactions.append(self._publish_misses)
        view.telemetry.registry.register(
            FleetCollector(
                view.cluster,
                lambda: view.telemetry.scraped,
                pending,
                settings.device_series,
                settings.stale_after_s,
                lambda: self._recorder.held,
            )
        )

    def start(self) -> None:
        self.following.start()
        self.handover.start()
        if not self._has_extender:  # an extender has its own holds
            HoldsUpdater(self.following.now, self._view.enqueue).start(self._view.loops)
        self.changes.start(self._view.loops, self._view.begun)
        self._recorder.start(self._view.loops, self._view.begun)
        if self._users is not None:
            self._users.start(self._view.loops, self._view.begun)

    def authorize(self, authorization: Callable[[], str]) -> None:
        """Show this header to extenders and to other consoles. ``authorization`` returns it."""
        self.following.authorization = self.handover.authorization = authorization

    def stop(self) -> None:
        """Stop reading from extenders and from other consoles."""
        self.following.stop()
        self.handover.stop()

    def app(
        self,
        guard: Guard | None = None,
        quotas: Callable[[str], Sequence[ResourceQuota] | None] = no_quotas,
    ) -> FastAPI:
        context = self._view.context(self.journals, self.feed, guard, quotas, self._recorder)
        return console_app(context, with_journal=self._has_extender)

    def _publish_misses(self, effects: Effects) -> None:
        for outcome in effects.outcomes:
            publish_miss(self.feed, outcome, self._view.cluster.pod(outcome.uid))
