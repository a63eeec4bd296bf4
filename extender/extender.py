"""The extender: kube-scheduler's calls, the ledger and the controllers, combined on one store."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping

from fastapi import Depends, FastAPI
from prometheus_client import CollectorRegistry

from extender.event_recorder import EventRecorder, Post
from extender.eviction.controller import EvictionController, Evictions
from extender.groups.controller import GroupReader, PartialGroupsController
from extender.ledger.followed_store import FollowedStore
from extender.ledger.ledger import Ledger
from extender.ledger.node_capacity import ListBound, NodeCapacity
from extender.ledger.store import Evictor, Store
from extender.metrics import Telemetry
from extender.overuse.controller import OveruseController
from extender.pending_events import PendingEventsController
from extender.preemption.controller import PreemptionController
from extender.preemption.writer import PreemptionWriter
from extender.reconcile.controller import ReconcileController
from extender.reconcile.queue import devices_known
from extender.requeue.controller import RequeueController
from extender.scheduler.filter import PodStore
from extender.scheduler.journal_endpoint import JournalSource, journal_routes
from extender.scheduler.outcome_recorder import record_prediction
from extender.scheduler.scheduling_state import SchedulingState
from extender.scheduler.server import Verbs, VerbsApp
from extender.starting_alone.controller import StartsController
from headroom.contract.annotations import PREFIX
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod, Quantity
from headroom.contract.reasons import Reason
from headroom.core.cluster.changes import Effects, GPUNodeWritten
from headroom.core.eviction.misplaced_pods import Misplaced
from headroom.core.journal.journal import Journal
from headroom.core.placement.placement_record import Placement
from headroom.core.whatif.held_memory import rejection_by_nominees
from headroom.runtime.debug_port import probes_app
from headroom.runtime.follow.cluster_view import ClusterView
from headroom.runtime.follow.journal_stream import HoldsLine, StateLine, holds_line
from headroom.runtime.server.auth import Guard
from headroom.runtime.server.problem_details import use_problem_details
from headroom.runtime.settings.ports import MetricsAccess
from headroom.runtime.settings.reload import ANYWHERE, Origin
from headroom.runtime.settings.settings import Settings
from headroom.version import own_version

#: Number of pods that are written concurrently when nodes are initialised. Each write takes 3 ms on
#: its connection. ``runtime.kube.async_client`` opens 32 connections, so 8 are left for binds.
TOUCHED_AT_ONCE = 24


class Extender(ClusterView):
    """Serves kube-scheduler's calls over HTTP, and runs the ledger and the controllers on one
    store."""

    telemetry: Telemetry

    def __init__(
        self,
        settings: Settings,
        unready: Callable[[], str],
        post: Post | None = None,
        unlisted: Iterable[type] = (),
        origin: Origin = ANYWHERE,
    ) -> None:
        """Prepare the extender. ``post`` writes Events. It is None if there is no API server.
        ``ClusterView`` describes the other parameters."""
        super().__init__(settings, unready, Telemetry(CollectorRegistry()), unlisted, origin)
        self.journal = Journal(settings.journal)
        self.stream = JournalSource(self.name, self.journal, self._state_line, self._holds)
        self.requeue_controller = RequeueController(
            self.cluster,
            self.journal,
            self.telemetry,
            settings,
            self.unready,
            self.name,
        )
        self.scheduling = SchedulingState(
            self.cluster, self.calls, self.journal, self.telemetry, self, time
        )
        #: The writer of preemption attempts, or None if this process must not preempt pods.
        self._preemption_writer: PreemptionWriter | None = None
        #: The controller that preempts pods, or None until ``verbs`` is called.
        self.preemption_controller: PreemptionController | None = None
        self.event_recorder = EventRecorder(post, self.telemetry)
        #: The controller that evicts overusing pods, or None if this process evicts no pods.
        self.overuse_controller: OveruseController | None = None
        #: The controller that evicts parts of groups. None without an API server, because groups
        #: are read from the API server.
        self.partial_groups_controller: PartialGroupsController | None = None
        self.reconciler = ReconcileController(
            self.cluster,
            self.event_recorder,
            self.loops,
            settings,
            self.unready,
            self.deliver,
        )
        self.pending_events_controller = PendingEventsController(
            self.cluster,
            self.journal,
            self.event_recorder,
            settings.waiting_events_per_s,
        )
        self.event_queue.reactions += [
            self.reconciler.react,
            self.requeue_controller.react,
            self._count_predictions,
        ]
        self._follow_mode()

    def start_controllers(self, ledger: Ledger) -> None:
        self.reconciler.start(ledger)
        if self.overuse_controller:
            self.overuse_controller.start(
                self.loops,
                self.unready,
                lambda: self.observes,
                lambda: self.settings.overuse_grace_s,
            )
        if self.partial_groups_controller:
            self.partial_groups_controller.start(
                self.loops, self.idle, lambda: self.settings.evict_partial_groups_after_s
            )
        StartsController(self.cluster, ledger, self.telemetry, self.event_recorder).start(
            self.loops, self.unready
        )
        self.pending_events_controller.start(self.loops, self.unready)
        if self.preemption_controller:
            self.preemption_controller.start(self.loops, self.idle)

    def idle(self) -> str:
        """Return the reason why no pod may be preempted now, or "" if pods may be preempted."""
        return self.unready() or ("Headroom is in mode observe" if self.observes else "")

    def take(self, settings: Settings) -> None:
        super().take(settings)
        self._follow_mode()

    def _follow_mode(self) -> None:
        self.telemetry.observes.set(self.observes)
        self.pending_events_controller.limit(
            0 if self.observes else self.settings.waiting_events_per_s
        )
        self.reconciler.follow(self.settings)
        self.requeue_controller.follow(self.settings)

    def _count_predictions(self, effects: Effects) -> None:
        for outcome in effects.outcomes:
            if outcome.reservation.attempt.startswith(self.name):
                record_prediction(self.telemetry, outcome, self.cluster.pod(outcome.uid))

    def _holds(self) -> HoldsLine:
        return holds_line(self.cluster, time.monotonic())

    def _state_line(self) -> StateLine:
        return StateLine(
            self.name,
            own_version(),
            time.time(),
            self.cluster.generation,
            self.unready(),
            self.settings.mode.value,
            tuple(self.journal.schedulers),
        )

    def open_ledger(self, store: Store, bound: ListBound | None = None) -> Ledger:
        """Return the ledger that writes to the store. ``bound`` lists the pods of a node, so that
        binds to nodes that another scheduler has filled are declined. It is None if there is no
        other scheduler."""

        def judge(pod: Pod, gpunode: GPUNode) -> Placement | Reason:
            now_s = time.monotonic()
            found = self.cluster.judge(pod, gpunode, now_s)
            if isinstance(found, Reason):
                return found
            # Since filter passed this pod, the memory may have been reserved or held for another
            # pod.
            return rejection_by_nominees(self.cluster, pod, gpunode.name, now_s) or found

        return Ledger(
            self._followed(store),
            judge,
            self.cluster.adopt,
            written=lambda gpunode: self.deliver([GPUNodeWritten(gpunode, time.monotonic())]),
            wall_s=time.time,
            new_id=self.new_id,
            known=lambda gpunode: devices_known(self.cluster, gpunode),
            observes=lambda: self.observes,
            together=gathered,
            capacity=NodeCapacity(bound, self._shared_resources) if bound else None,
        )

    def _followed(self, store: Store) -> FollowedStore:
        return FollowedStore(store, self.telemetry, self.cluster, self.deliver)

    def _shared_resources(self, node: str) -> Mapping[str, Quantity] | None:
        """Return the allocatable resources of a node, except the resources that the ledger
        counts."""
        found = self.cluster.node(node)
        allocatable = found.status.allocatable if found and found.status else None
        return allocatable and {
            name: quantity
            for name, quantity in allocatable.items()
            if not (self.cluster.rules.manages(name) or name.startswith(PREFIX))
        }

    def enable_evictions(self, store: Store, ledger: Ledger, evictor: Evictor) -> None:
        """Start to evict pods that do not fit on the GPU that they got, and pods that use more
        memory than they reserved."""

        def misplaced_now(gpunode: GPUNode) -> Misplaced:
            return self.cluster.misplaced(gpunode, time.monotonic())

        followed = self._followed(store)
        evictions = Evictions(followed, ledger, evictor, misplaced_now)
        self.overuse_controller = OveruseController(
            self.cluster, followed, ledger, evictor, self.telemetry.overuse, self.event_recorder
        )
        self.reconciler.eviction_controller = EvictionController(
            self.cluster, evictions, self.telemetry, self.event_recorder
        )

    def enable_group_evictions(self, store: Store, groups: GroupReader, evictor: Evictor) -> None:
        """Start to evict the bound pods of groups whose other pods are not bound, if the settings
        allow it."""
        self.partial_groups_controller = PartialGroupsController(
            self.cluster, store, groups, evictor, self.telemetry, self.event_recorder
        )

    def enable_preemption(self, writer: PreemptionWriter) -> None:
        """Preempt pods through ``writer`` from now on, if the settings allow it."""
        if self.settings.evict_for_memory:
            self._preemption_writer = writer

    def new_id(self) -> str:
        """Return a new id that begins with this process's name."""
        return f"{self.name}-{uuid.uuid4().hex}"

    def verbs_app(self, ledger: Ledger, pods: PodStore | None = None) -> VerbsApp:
        return VerbsApp(self.verbs(ledger, pods), self.telemetry, self.settings.max_body)

    def verbs(self, ledger: Ledger, pods: PodStore | None = None) -> Verbs:
        """Return the handlers for kube-scheduler's calls. ``pods`` receives the pod of each filter
        call."""
        self.preemption_controller = PreemptionController(
            self.cluster,
            self.journal,
            self.telemetry,
            self.scheduling.rejected_for_memory,
            self._preemption_writer,
            self.event_recorder,
        )
        return Verbs(self.scheduling, ledger.binder, pods)

    def app(self, guard: Guard | None = None) -> FastAPI:
        """Return the app of the second port, which serves the probes, the metrics and the
        journal."""
        metrics_guard = None if self.settings.metrics_access is MetricsAccess.OPEN else guard
        app = probes_app(
            "Headroom extender",
            self.unready,
            self.stuck,
            self.telemetry.exposition,
            metrics_guard,
        )
        checked = [Depends(guard.checked)] if guard is not None else []
        app.include_router(journal_routes(self.stream), dependencies=checked)
        use_problem_details(app, self.name, lambda: self.settings.mode.value)
        return app


async def gathered(works: Iterable[Awaitable[None]]) -> None:
    """Await all calls, at most ``TOUCHED_AT_ONCE`` of them concurrently. Raise the first error."""
    turns = asyncio.Semaphore(TOUCHED_AT_ONCE)

    async def in_turn(work: Awaitable[None]) -> None:
        async with turns:
            await work

    await asyncio.gather(*map(in_turn, works))
