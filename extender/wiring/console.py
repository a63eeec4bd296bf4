"""The console: debug API, page, events and metrics of the fleet, over a view of the cluster."""

import time
from collections.abc import Callable, Sequence

from fastapi import FastAPI

from extender.cluster.observations import Outcome
from extender.cluster.quotas import ResourceQuota
from extender.cluster.waiting import Pending
from extender.fleetmetrics import FleetCollector
from extender.journal import Journal
from extender.journals import Journals
from extender.records import Bounds
from extender.web.api.context import no_quotas
from extender.web.auth import Guard
from extender.web.debug import console_app
from extender.web.feed import Feed
from extender.wiring.assumed import Assuming
from extender.wiring.clusterview import ClusterView
from extender.wiring.following import Following
from extender.wiring.noting import tell_followers
from extender.wiring.watching import Watching, start_watching

#: Of each journal that is followed by a process with an extender of its own.
BESIDE_AN_EXTENDER = Bounds(size_bytes=4 << 20)


class Console:
    """Reads ``view``, and the journals of the extenders that the settings name. ``own`` is that of
    an extender in the same process, which then leaves less memory for the others."""

    def __init__(
        self, view: ClusterView, pending: Callable[[], Pending], own: Journal | None = None
    ) -> None:
        settings = view.settings
        self._view = view
        self.following = Following(
            settings.extenders,
            settings.debug_port,
            view.name,
            settings.journal if own is None else BESIDE_AN_EXTENDER,
            settings.debug_tls_cert,
        )
        self.journals = Journals(view.name, own or Journal(settings.journal), self.following.now)
        self.feed = Feed(time.time, lambda: view.cluster.snapshot().generation)
        self._has_extender = own is not None
        ours = view.name if own is not None else ""
        self.watching = Watching(view.cluster, self.journals, self.feed, ours)
        view.outcome_seen.append(self._tell)
        view.telemetry.registry.register(
            FleetCollector(
                view.cluster,
                lambda: view.telemetry.scraped,
                pending,
                settings.device_series,
                settings.stale_after_s,
            )
        )

    def start(self) -> None:
        self.following.start()
        if not self._has_extender:  # which decides on assumed binds and nominations of its own
            Assuming(self.following.now, self._view.tell).start(self._view.loops)
        start_watching(self._view.loops, self.watching, self._view.begun)

    def app(
        self,
        guard: Guard | None = None,
        quotas: Callable[[str], Sequence[ResourceQuota] | None] = no_quotas,
    ) -> FastAPI:
        context = self._view.context(self.journals, self.feed, guard, quotas)
        return console_app(context, with_journal=self._has_extender)

    def _tell(self, outcome: Outcome) -> None:
        tell_followers(self.feed, outcome, self._view.cluster.pod(outcome.uid))
