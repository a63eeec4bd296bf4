"""The cluster as a process sees it: state in memory that follows the watches, and its loops."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable

from headroom.core.cluster.changes import Effects, TimePassed
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.runtime.follow.event_queue import EventQueue
from headroom.runtime.follow.process_monitor import ProcessMonitor
from headroom.runtime.loops import Loops
from headroom.runtime.memory_policy import collect_garbage
from headroom.runtime.settings.reload import ANYWHERE, Origin, SettingsReloader
from headroom.runtime.settings.settings import Mode, Settings
from headroom.runtime.telemetry import CertificateCollector, ViewTelemetry, sample_lag

#: Seconds between two changes that only report the time.
CLOCK_EVERY_S = 5.0
NOT_PROCESSED = "Headroom has not yet processed the listed objects"


class ClusterView:
    """The state of the cluster, for decisions and for views."""

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
        self.cluster: Cluster = self._writer
        self.loops = Loops(lambda loop: self.telemetry.loop_failures.labels(loop).inc)
        self._sources_unready = unready
        self.event_queue = EventQueue(self._writer, self.loops)
        self.deliver, self.enqueue = self.event_queue.deliver, self.event_queue.enqueue
        self.observed = ProcessMonitor(lambda: self.event_queue.is_behind)
        #: Set when all listed objects were weighed.
        self.begun = asyncio.Event()
        self.event_queue.reactions.append(self._note_begun)
        telemetry.generation.set_function(lambda: self.cluster.generation)
        telemetry.registry.register(CertificateCollector(settings.served_certificates))
        self.reloading = SettingsReloader(origin, settings, self.take, telemetry)

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
        """Use these settings from now on. Only settings in ``RELOADED`` may differ. Call it on the
        loop."""
        self.settings = settings
        self._writer.follow(settings.rules)

    def unready(self) -> str:
        """Return why nothing can be decided yet, as a sentence; "" if decisions are possible. When
        all kinds are listed, processing the objects still takes a moment."""
        return self._sources_unready() or ("" if self.cluster.begun else NOT_PROCESSED)

    def stuck(self) -> dict[str, float]:
        """Return each loop without progress for long, and the seconds since its last progress."""
        return self.loops.stuck() | self.event_queue.stuck()

    def note_lag(self, late_s: float) -> None:
        self.telemetry.loop_lag_seconds.observe(late_s)
        self.observed.lag(late_s)

    def _note_begun(self, effects: Effects) -> None:
        if self.cluster.begun:
            self.begun.set()

    async def report_time(self) -> None:
        """End back-offs and report overuse, which no other change does."""
        self.deliver([TimePassed(time.monotonic())])

    async def _collect(self) -> None:
        await self.begun.wait()
        await collect_garbage()
