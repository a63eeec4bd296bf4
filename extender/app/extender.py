"""The extender: verbs, ledger and controllers, around a store."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable
from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from contract.gpunode import GPUNode
from contract.kube import Pod
from extender.app.binder import Binder, LedgerCache
from extender.app.cluster_view import ClusterView
from extender.app.reload import ANYWHERE, Origin
from extender.config.settings import Settings
from extender.console.app import extender_app
from extender.console.auth import Guard
from extender.controllers.event_recorder import EventRecorder, Post, counted
from extender.controllers.eviction import EvictionController
from extender.controllers.pending_events import PendingEventsController
from extender.controllers.preemption import PreemptionController
from extender.controllers.reconcile import ReconcileController
from extender.controllers.requeue import RequeueController
from extender.ledger.eviction import Evictions, Evictor
from extender.ledger.preemption_writer import PreemptionWriter
from extender.ledger.protocol import Ledger
from extender.ledger.store import Store
from extender.observability.assumed_binds_stream import assumed_line
from extender.observability.conflict_counter import ConflictCountingStore
from extender.observability.feed import Feed
from extender.observability.journal_merge import Journals
from extender.observability.journal_stream import AssumedLine
from extender.observability.metrics import Telemetry
from extender.observability.recorder import record_prediction
from extender.placement.overfull_devices import Misplaced
from extender.scheduler.server import verbs_app
from extender.scheduler.verbs import Verbs
from extender.state.changes import Effects
from extender.state.journal import Journal

EVENT_THREADS = 2

#: Pods that are written concurrently when nodes are initialised. A connection takes 3 ms for each,
#: and 8 of the 32 that ``extender.kube.async_client`` opens are left for binds.
TOUCHED_AT_ONCE = 24


class Extender(ClusterView):
    """Answers kube-scheduler: HTTP endpoints, ledger and controllers, around a store."""

    telemetry: Telemetry

    def __init__(
        self,
        settings: Settings,
        unready: Callable[[], str],
        post: Post | None = None,
        unlisted: Iterable[type] = (),
        origin: Origin = ANYWHERE,
    ) -> None:
        """Prepare the extender. ``post`` writes Events; None if there is no API server. The other
        parameters are those of ``ClusterView``."""
        super().__init__(settings, unready, Telemetry(CollectorRegistry()), unlisted, origin)
        self.journal = Journal(settings.journal)
        self.feed = Feed(time.time, lambda: self.cluster.snapshot().generation)
        self.requeue_controller = RequeueController(
            self.cluster,
            self.journal,
            self.telemetry,
            self.unready,
            self.observes,
            self.name,
        )
        self._ledger_cache = LedgerCache(self.cluster, self.deliver)
        #: None before ``verbs`` was called.
        self._verbs: Verbs | None = None
        #: None if this process must not preempt pods, and before ``verbs`` was called.
        self._maker: PreemptionWriter | None = None
        self.preemption_controller: PreemptionController | None = None
        self._events_pool = ThreadPoolExecutor(EVENT_THREADS, thread_name_prefix="events")
        #: Writes an Event and counts it; does nothing without an API server.
        self.post = counted(post, self.telemetry) if post else lambda notice: True
        self.reconciler = ReconcileController(
            self.cluster,
            EventRecorder(self.post, self._events_pool),
            self.deliver,
            self.unready,
            self.observes,
            lambda: self.settings.orphan_after_s,
            self.count_failure,
        )
        self.pending_events_controller = PendingEventsController(
            self.cluster,
            self.journal,
            self.post if post else None,
            settings.waiting_events_per_s,
            self._events_pool,
        )
        self.event_queue.reactions += [
            self.reconciler.react,
            self.requeue_controller.react,
            self._count_predictions,
        ]
        self._follow_mode()

    def start_controllers(self, ledger: Ledger) -> None:
        self.reconciler.start(self.loops, ledger)
        self.pending_events_controller.start(self.loops, self.unready)
        if self.preemption_controller:
            self.preemption_controller.start(self.loops, self.idle)

    def idle(self) -> str:
        """Return why no pod may be preempted at present, as a sentence; "" if pods may be."""
        return self.unready() or ("Headroom is in mode observe" if self.observes() else "")

    def take(self, settings: Settings) -> None:
        super().take(settings)
        if self._verbs is not None:
            self._verbs.rules_changed()
        self._follow_mode()

    def _follow_mode(self) -> None:
        self.telemetry.observes.set(self.observes())
        self.pending_events_controller.at_most(
            0 if self.observes() else self.settings.waiting_events_per_s
        )
        # Rejected pods wait for a reason that no longer applies.
        self.requeue_controller.check_soon()

    def _count_predictions(self, effects: Effects) -> None:
        for outcome in effects.outcomes:
            if outcome.reservation.attempt.startswith(self.name):
                record_prediction(self.telemetry, outcome, self.cluster.pod(outcome.uid))

    def assumed(self) -> AssumedLine:
        now_s = time.monotonic()
        expected = self._verbs.coming(now_s) if self._verbs is not None else ()
        return assumed_line(self.cluster, expected, now_s)

    def open_ledger(self, store: Store) -> Ledger:
        return Ledger(
            ConflictCountingStore(store, self.telemetry),
            self._ledger_cache.judge,
            self.cluster.adopt,
            self._ledger_cache.written,
            time.time,
            self.new_id,
            self._ledger_cache.knows_devices,
            self.observes,
            together=gathered,
        )

    def enable_evictions(self, store: Store, ledger: Ledger, evictor: Evictor) -> None:
        """Also evict pods that have no room on their GPU, from now on."""

        def misplaced_now(gpunode: GPUNode) -> Misplaced:
            return self.cluster.misplaced(gpunode, time.monotonic())

        evictions = Evictions(
            ConflictCountingStore(store, self.telemetry), ledger, evictor, misplaced_now
        )
        self.reconciler.eviction_controller = EvictionController(
            self.cluster, evictions, self.telemetry, self.deliver
        )

    def enable_preemption(self, maker: PreemptionWriter) -> None:
        """Preempt pods through ``maker`` from now on, if the settings allow it."""
        if self.settings.evict_for_memory:
            self._maker = maker

    def new_id(self) -> str:
        """Return a new id that begins with this process's name."""
        return f"{self.name}-{uuid.uuid4().hex}"

    def verbs_app(self, ledger: Ledger, shown: Callable[[Pod], None]) -> FastAPI:
        return verbs_app(self.verbs(ledger, shown), self.telemetry, self.settings.max_body)

    def verbs(self, ledger: Ledger, shown: Callable[[Pod], None]) -> Verbs:
        binder = Binder(
            self._ledger_cache,
            ledger,
            self.journal,
            self.telemetry,
            self.settings.bind_deadline_s,
        )
        verbs = Verbs(
            self.cluster,
            self.journal,
            self.telemetry,
            binder.bind,
            self.unready,
            shown,
            time.monotonic,
            time.time,
            self.observes,
            self.settings.filter_best_only,
        )
        self._verbs = verbs
        self.preemption_controller = PreemptionController(
            self.cluster,
            self.journal,
            self.telemetry,
            verbs.rejected_for_memory,
            self._maker,
            self.post,
            self._events_pool,
        )
        return verbs

    def app(self, guard: Guard | None = None) -> FastAPI:
        """Return the app of the second port: probes, metrics and the journal."""
        return extender_app(self.context(Journals(self.name, self.journal), self.feed, guard))


async def gathered(works: Iterable[Awaitable[None]]) -> None:
    """Await all, several concurrently; raise the first error."""
    turns = asyncio.Semaphore(TOUCHED_AT_ONCE)

    async def in_turn(work: Awaitable[None]) -> None:
        async with turns:
            await work

    await asyncio.gather(*map(in_turn, works))
