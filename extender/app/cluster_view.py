"""The cluster as a process sees it: state in memory that follows the watches, and its loops."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable, Sequence

from extender.app.memory_policy import collect_garbage
from extender.config.ports import MetricsAccess
from extender.config.reload import ANYWHERE, Origin, SettingsReloader
from extender.config.settings import Mode, Settings
from extender.console.auth import Guard
from extender.console.history_ranges import PrometheusRanges
from extender.console.process import ProcessMonitor, SettingsView
from extender.console.view_context import Context, no_quotas
from extender.kube.claims import Claims
from extender.kube.profiles import Profiles
from extender.observability.feed import Feed
from extender.observability.history_recorder import HistoryRecorder
from extender.observability.journal_stream import HoldsLine
from extender.observability.journals import Journals
from extender.observability.metrics import CertificateCollector, ViewTelemetry, sample_lag
from extender.periodic import Loops
from extender.state.changes import Effects, Event, TimePassed
from extender.state.cluster_state import ClusterState
from extender.state.cluster_writer import ClusterWriter
from extender.state.event_queue import EventQueue
from extender.state.history import History
from extender.state.pod_requests import ResourceQuota

#: Seconds between two changes that only report the time.
CLOCK_EVERY_S = 5.0
NOT_PROCESSED = "Headroom has not yet processed the listed objects"


class ClusterView:
    """The state of the cluster, for the decisions of the extender and the views of the console."""

    def __init__(
        self,
        settings: Settings,
        unready: Callable[[], str],
        telemetry: ViewTelemetry,
        unlisted: Iterable[type] = (),
        origin: Origin = ANYWHERE,
    ) -> None:
        """Prepare the state; no loop runs before ``start``.

        ``unready`` returns why the watches do not show the whole cluster; "" if they do.
        ``unlisted`` are the kinds that must be listed first. ``origin`` is where the settings are
        read again.
        """
        self.settings = settings
        self.telemetry = telemetry
        self.loop = asyncio.get_running_loop()
        #: Prefix of the ids that this process writes, so that it recognises its own reservations.
        self.name = uuid.uuid4().hex[:12]
        self._writer = ClusterWriter(
            settings.rules, settings.stale_after_s, time.time() - time.monotonic(), unlisted
        )
        #: The same state, for readers.
        self.cluster: ClusterState = self._writer
        #: For the console alone.
        self.profiles, self.claims = Profiles(), Claims()
        self.loops = Loops(lambda loop: self.telemetry.loop_failures.labels(loop).inc)
        self._sources_unready = unready
        self.event_queue = EventQueue(self._writer, self.loops)
        self.deliver, self.enqueue = self.event_queue.deliver, self.event_queue.enqueue
        self.observed = ProcessMonitor(lambda: self.event_queue.is_behind)
        #: Set when all listed objects were weighed.
        self.begun = asyncio.Event()
        self.event_queue.reactions.append(self._note_begun)
        telemetry.registry.register(CertificateCollector(settings.served_certificates))
        self.reloading = SettingsReloader(origin, settings, self.take, telemetry)

    def take_for_people(self, events: Sequence[Event]) -> None:
        """Take events that only views show, from any thread."""
        self.profiles.apply(events)

    def take_for_all(self, events: Sequence[Event]) -> None:
        """Take events that decisions and views depend on, from any thread."""
        self.claims.apply(events)
        self.enqueue(events)

    @property
    def observes(self) -> bool:
        """Return whether the mode is observe: nothing is rejected, preferred or evicted, and all
        decisions are recorded."""
        return self.settings.mode is Mode.OBSERVE

    def start(self) -> None:
        """Start the loops of every process that follows the cluster."""
        self.reloading.start(self.loops)
        self.loops.keep("lag", lambda: sample_lag(self.note_lag))
        self.loops.keep("memory", self._collect)
        self.loops.start("clock", self.report_time, CLOCK_EVERY_S)

    def take(self, settings: Settings) -> None:
        """Use these settings from now on; only those of ``RELOADED`` may differ. Call it on the
        loop."""
        self.settings = settings
        self._writer.follow(settings.rules)

    def unready(self) -> str:
        """Return why nothing can be decided yet, as a sentence; "" if decisions are possible. When
        all kinds are listed, processing the objects still takes a moment."""
        return self._sources_unready() or ("" if self.cluster.begun else NOT_PROCESSED)

    def stuck(self) -> str:
        """Return the loops without progress for long, as a sentence; "" if there are none."""
        stuck = self.loops.stuck() | self.event_queue.stuck()
        return ", ".join(f"{name} has made no progress for {s:.0f} s" for name, s in stuck.items())

    def note_lag(self, late_s: float) -> None:
        self.telemetry.loop_lag_seconds.observe(late_s)
        self.observed.lag(late_s)

    def context(
        self,
        journal: Journals,
        feed: Feed,
        guard: Guard | None = None,
        quotas: Callable[[str], Sequence[ResourceQuota] | None] = no_quotas,
        recorder: HistoryRecorder | None = None,
    ) -> Context:
        """Return the inputs of all views of this process; ``recorder`` has the history."""
        return Context(
            self.cluster,
            journal,
            self.telemetry,
            self.unready,
            time.monotonic,
            time.time,
            self.name,
            feed,
            self.observed.now,
            guard,
            self._settings_now,
            self.stuck,
            quotas,
            self.settings.scheduler_name,
            self.holds,
            lambda: self.settings.gpu_hour_price,
            profiles=self.profiles,
            claims=self.claims,
            history=recorder.history if recorder else History(),
            ranges=ranges_of(self.settings),
            growing=lambda: recorder.growing if recorder else {},
            open_metrics=self.settings.metrics_access is MetricsAccess.OPEN,
        )

    def holds(self) -> HoldsLine:
        """Return the holds of this process: none, because it binds no pods."""
        return HoldsLine()

    def _note_begun(self, effects: Effects) -> None:
        if self.cluster.begun:
            self.begun.set()

    def _settings_now(self) -> SettingsView:
        reloading = self.reloading
        return SettingsView(
            mode=self.settings.mode.value,
            file=str(reloading.file) if reloading.file else None,
            rejected=list(reloading.rejected),
            after_restart=list(reloading.after_restart),
            grafana_url=self.settings.grafana_url,
            long_history=self.settings.prometheus_url is not None,
        )

    async def report_time(self) -> None:
        """End back-offs and report overuse, which no other change does."""
        self.deliver([TimePassed(time.monotonic())])

    async def _collect(self) -> None:
        await self.begun.wait()
        await collect_garbage()


def ranges_of(settings: Settings) -> PrometheusRanges | None:
    """Return the reader of history from Prometheus, None without setting prometheus_url."""
    if settings.prometheus_url is None:
        return None
    return PrometheusRanges(
        settings.prometheus_url,
        settings.prometheus_token_file,
        settings.prometheus_ca,
        settings.queries,
    )
