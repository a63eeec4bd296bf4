"""A process's view of the cluster: the state that follows the watches, and the loops that update
it."""

import asyncio
import time
import uuid
from collections.abc import Callable, Iterable

from headroom.core.cluster.changes import Effects, TimePassed
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.runtime.follow.event_queue import EventQueue
from headroom.runtime.kube.resources import Health
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
        """Prepare the state. No loop runs before ``start``.

        ``unready`` returns why the watches do not show the whole cluster, or "" if they do.
        ``unlisted`` contains the kinds that must be listed before the process is ready. The
        settings are reloaded from ``origin``.
        """
        self.settings = settings
        self.telemetry = telemetry
        self.loop = asyncio.get_running_loop()
        self.clock_every_s = CLOCK_EVERY_S
        #: Prefix of the ids that this process writes, by which it recognizes its own reservations.
        self.name = uuid.uuid4().hex[:12]
        self._writer = ClusterWriter(
            settings.rules, settings.stale_after_s, time.time() - time.monotonic(), unlisted
        )
        self.cluster = self._writer.cluster
        #: The state that calls of kube-scheduler change. Only the extender uses it.
        self.calls = self._writer.parts.calls
        self.loops = Loops(lambda loop: self.telemetry.loop_failures.labels(loop).inc)
        self._sources_unready = unready
        self.event_queue = EventQueue(self._writer, self.loops)
        self.deliver, self.enqueue = self.event_queue.deliver, self.event_queue.enqueue
        #: A function that returns the state of each watch of the API server.
        self.watches: Callable[[], Iterable[Health]] = tuple
        #: This event is set when all listed objects have been processed.
        self.begun = asyncio.Event()
        self.event_queue.reactions.append(self._note_begun)
        telemetry.registry.register(CertificateCollector(settings.served_certificates))
        self.reloading = SettingsReloader(origin, settings, self.take, telemetry)

    @property
    def observes(self) -> bool:
        """Return whether the mode is observe, in which Headroom records its decisions but rejects,
        prefers and evicts nothing."""
        return self.settings.mode is Mode.OBSERVE

    def start(self) -> None:
        """Start the loops of every process that follows the cluster."""
        self.reloading.start(self.loops)
        self.loops.keep("lag", lambda: sample_lag(self.telemetry.loop_lag_seconds.observe))
        self.loops.keep("memory", self._collect)
        self.loops.start("clock", self.report_time, self.clock_every_s)

    def take(self, settings: Settings) -> None:
        """Use these settings from now on. Only the settings in ``RELOADED`` may differ. Call this
        on the event loop."""
        self.settings = settings
        self._writer.follow(settings.rules)

    def unready(self) -> str:
        """Return a sentence that states why no decision is possible yet, or "". After all kinds are
        listed, the objects must still be processed, which takes a moment."""
        return self._sources_unready() or ("" if self.cluster.begun else NOT_PROCESSED)

    def stuck(self) -> dict[str, float]:
        """Return the stuck loops by name, with the seconds since their last progress."""
        return self.loops.stuck() | self.event_queue.stuck()

    def _note_begun(self, effects: Effects) -> None:
        if self.cluster.begun:
            self.begun.set()

    async def report_time(self) -> None:
        """End back-offs and report overuse, which become due with time and not because of a
        change."""
        self.deliver([TimePassed(time.monotonic())])

    async def _collect(self) -> None:
        await self.begun.wait()
        await collect_garbage()
