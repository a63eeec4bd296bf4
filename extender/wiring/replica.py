"""One replica: cluster state, ledger and what is served of them, around a store."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from contract.gpunode import GPUNode
from contract.kube import Pod
from contract.reasons import Reason
from extender.certs.expiry import CertificateCollector
from extender.cluster.chores import knows_devices
from extender.cluster.events import BindBegun, BindEnded, Event, GPUNodeSeen
from extender.cluster.quotas import ResourceQuota
from extender.cluster.state import ClusterState
from extender.cluster.vacating import refusal_beside
from extender.fleetmetrics import FleetCollector
from extender.journal import Journal
from extender.ledger.eviction import Evictions, Hands
from extender.ledger.preempting import RoomMaker
from extender.ledger.protocol import BindAsk, Bound, Declined, Ledger
from extender.ledger.store import Store
from extender.placement.misplaced import Misplaced
from extender.placement.placed import Placement
from extender.settings import Mode, Settings
from extender.telemetry import Telemetry
from extender.web.api.context import Context, no_quotas
from extender.web.auth import Guard
from extender.web.calls import Calls
from extender.web.debug import debug_app
from extender.web.feed import Feed
from extender.web.machinery import SettingsView
from extender.web.peers import nobody
from extender.web.serving import verbs_app
from extender.web.verbs import Verbs
from extender.web.wire import BindArgs
from extender.wiring.announcing import Announcing, Post, counted
from extender.wiring.conflicts import ConflictsCounted
from extender.wiring.evicting import Evicting
from extender.wiring.intake import Intake
from extender.wiring.loops import Loops
from extender.wiring.machinery import Observed
from extender.wiring.noting import note_bind, note_outcome, tell_followers
from extender.wiring.peers import Peers
from extender.wiring.preempting import Preempting
from extender.wiring.reloading import ANYWHERE, Origin, Reloading
from extender.wiring.retrying import Retrying
from extender.wiring.telling import Telling
from extender.wiring.tidying import Tidying
from extender.wiring.watching import Watching

EVENT_THREADS = 2
NOT_TAKEN_IN = "Headroom has not yet taken in what it listed"


#: Pods that are written to at once when nodes are initialised: a connection takes 3 ms for each,
#: and 8 of the 32 that ``extender.loopapi`` opens are left for binds.
TOUCHED_AT_ONCE = 24


class Extender:
    """One replica: state, ledger and both applications, around a store."""

    def __init__(
        self,
        settings: Settings,
        unready: Callable[[], str],
        post: Post | None = None,
        awaited: Iterable[type] = (),
        origin: Origin = ANYWHERE,
    ) -> None:
        """``post`` writes Events, where there is anywhere to write them; ``awaited``: kinds of
        which a list will come; ``origin``: where the settings are looked for again."""
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self.cluster = ClusterState(settings.rules, settings.stale_after_s, _epoch_s(), awaited)
        self.journal = Journal(settings.journal)
        self.feed = Feed(time.time, lambda: self.cluster.snapshot().generation)
        self.telemetry = Telemetry(CollectorRegistry())
        self.loops = Loops(lambda loop: self.telemetry.loop_failures.labels(loop).inc())
        self._sources_unready = unready
        self.calls = Calls()
        #: Begins the ids of what this process writes, so that it knows its own promises again.
        self._name = uuid.uuid4().hex[:12]
        self.retrying = Retrying(
            self.cluster,
            self.journal,
            self.telemetry,
            self.unready,
            lambda: self.observes,
            self._name,
        )
        #: What the verbs can do before they are called; whether there was anything to do.
        self._ahead: Callable[[], bool] = bool
        self.intake = Intake(
            self.cluster, self.calls, self._took, self._turned, lambda: self._ahead(), self.loops
        )
        self.observed = Observed(lambda: self.intake.is_behind)
        #: Set when all that was awaited was weighed.
        self.begun = asyncio.Event()
        self._rules_changed: Callable[[], None] = lambda: None
        self.watching = Watching(self.cluster, self.journal.records, self.feed, self._name)
        #: None where nobody is evicted for others by us; and where the verbs are not made yet.
        self._maker: RoomMaker | None = None
        self.preempting: Preempting | None = None
        peers = settings.peers, settings.debug_port, settings.peers_timeout_s
        self._peers = Peers(*peers, self._name, settings.debug_tls_cert) if settings.peers else None
        self._events_pool = ThreadPoolExecutor(EVENT_THREADS, thread_name_prefix="events")
        #: Writes an Event, counted; does nothing where nobody reads them.
        self.post = counted(post, self.telemetry) if post else lambda notice: True
        self.tidying = Tidying(
            self.cluster,
            Announcing(self.post, self._events_pool),
            self.deliver,
            self.unready,
            lambda: self.observes,
            lambda: self.settings.orphan_after_s,
            lambda loop: self.telemetry.loop_failures.labels(loop).inc(),
        )
        self.telling = Telling(
            self.cluster,
            self.journal,
            self.post if post else None,
            settings.waiting_events_per_s,
            self.calls.give_way,
            self._events_pool,
        )
        self.telemetry.registry.register(
            FleetCollector(
                self.cluster,
                lambda: self.telemetry.scraped,
                lambda: self.telling.pending,
                self.calls.give_way,
                settings.device_series,
                settings.stale_after_s,
            )
        )
        self.telemetry.registry.register(CertificateCollector(settings.shown))
        self.reloading = Reloading(origin, settings, self.take, self.telemetry)
        self._follow_mode()

    @property
    def observes(self) -> bool:
        """Whether nothing is refused, preferred, evicted or told, and all goes on record."""
        return self.settings.mode is Mode.OBSERVE

    def idle(self) -> str:
        """Why nobody is to leave for anybody, in a sentence; "" when somebody may."""
        return self.unready() or ("Headroom only observes" if self.observes else "")

    def take(self, settings: Settings) -> None:
        """Go on with these settings, of which those of ``RELOADED`` may be new; on the loop."""
        self.settings = settings
        self.cluster.follow(settings.rules)
        self._rules_changed()
        self._follow_mode()

    def _follow_mode(self) -> None:
        self.telemetry.observes.set(self.observes)
        self.telling.at_most(0 if self.observes else self.settings.waiting_events_per_s)
        # Who was refused waits for a reason that does not count any more.
        self.retrying.look_soon()

    def unready(self) -> str:
        """Why nothing can be decided yet, in a sentence; "" when it can. A source has listed when
        its list is there, and what it says may take a moment more."""
        return self._sources_unready() or ("" if self.cluster.begun else NOT_TAKEN_IN)

    def deliver(self, events: Sequence[Event]) -> None:
        """Take what we did ourselves, from any thread; see ``Intake.deliver``."""
        self.cluster.epoch_s = _epoch_s()
        self.intake.deliver(events)

    def tell(self, events: Sequence[Event]) -> None:
        """Take what the cluster tells, from any thread; see ``Intake.tell``."""
        self.cluster.epoch_s = _epoch_s()
        self.intake.tell(events)

    def _took(self, events: Sequence[Event]) -> None:
        self.retrying.took(events)
        self.tidying.took(events)

    def stuck(self) -> str:
        """Which loops have made no progress for long, in a sentence; "" when none."""
        stuck = self.loops.stuck() | self.intake.stuck()
        return ", ".join(f"{name} has not progressed for {s:.0f} s" for name, s in stuck.items())

    def _turned(self) -> None:
        """Something was weighed."""
        if self.cluster.begun:
            self.begun.set()
        for outcome in self.cluster.observations.take():
            pod = self.cluster.pod(outcome.uid)
            tell_followers(self.feed, outcome, pod)
            if outcome.promise.attempt.startswith(self._name):
                note_outcome(self.telemetry, outcome, pod)
        if self.cluster.has_unsettled:
            self.tidying.look_soon()
        self.retrying.weighed()

    def open_ledger(self, store: Store) -> Ledger:
        def judge(pod: Pod, gpunode: GPUNode) -> Placement | Reason:
            now_s, node = time.monotonic(), gpunode.name
            # Filter may have let it pass before it was known for whom others leave.
            held_for = self.cluster.held_for(pod, now_s).get(node, ())
            taken = refusal_beside(self.cluster, pod, node, held_for, now_s) if held_for else None
            return taken or self.cluster.judge(pod, gpunode, now_s)

        return Ledger(
            ConflictsCounted(store, self.telemetry),
            judge,
            self.cluster.adopt,
            written=lambda gpunode: self.deliver([GPUNodeSeen(gpunode, time.monotonic())]),
            wall_s=time.time,
            new_id=self.new_id,
            known=lambda gpunode: knows_devices(self.cluster, gpunode),
            observes=lambda: self.observes,
            together=gathered,
        )

    def _foreseen(self, pod: Pod | None, gpunode: GPUNode | None, now_s: float) -> Placement | None:
        """What the ledger would find, where that takes less here."""
        if pod is None or gpunode is None or gpunode.name in self.cluster.held_for(pod, now_s):
            return None
        return self.cluster.judge_as_weighed(pod, gpunode, now_s)

    def send_away(self, store: Store, ledger: Ledger, hands: Hands) -> None:
        """From now on the chores include sending pods away that have no room where they are."""

        def misplaced_now(gpunode: GPUNode) -> Misplaced:
            return self.cluster.misplaced(gpunode, time.monotonic())

        evictions = Evictions(ConflictsCounted(store, self.telemetry), ledger, hands, misplaced_now)
        self.tidying.evicting = Evicting(self.cluster, evictions, self.telemetry, self.deliver)

    def make_room(self, maker: RoomMaker) -> None:
        """From now on pods may be evicted for others, where the settings say so."""
        if self.settings.evict_for_memory:
            self._maker = maker

    @property
    def new_id(self) -> Callable[[], str]:
        return lambda: f"{self._name}-{uuid.uuid4().hex}"

    def verbs_app(self, ledger: Ledger, shown: Callable[[Pod], None]) -> FastAPI:
        return verbs_app(self.verbs(ledger, shown), self.telemetry, self.settings.max_body)

    def verbs(self, ledger: Ledger, shown: Callable[[Pod], None]) -> Verbs:
        async def bind(args: BindArgs, pod: Pod | None, gpunode: GPUNode | None) -> str:
            began_s = time.monotonic()
            placement = self._foreseen(pod, gpunode, began_s)
            ask = BindAsk(
                args.pod_namespace,
                args.pod_name,
                args.pod_uid,
                args.node,
                pod,
                gpunode,
                placement,
                until_s=began_s + self.settings.bind_deadline_s,
            )
            if pod is not None:
                self.deliver([BindBegun(pod, ask.node, placement)])
            try:
                outcome = await ledger.bind(ask)
            finally:
                self.deliver([BindEnded(ask.uid, ask.node)])
            note_bind(self.journal, self.telemetry, ask, outcome, time.monotonic() - began_s)
            if isinstance(outcome, Bound):
                return ""
            return outcome.reason.sentence if isinstance(outcome, Declined) else outcome.message

        verbs = Verbs(
            self.cluster,
            self.journal,
            self.telemetry,
            bind,
            self.unready,
            shown,
            time.monotonic,
            time.time,
            self.loop.call_soon,
            lambda: self.observes,
            self.settings.filter_best_only,
        )
        self._ahead = verbs.work_ahead
        self._rules_changed = verbs.rules_changed
        self.preempting = Preempting(
            self.cluster,
            self.journal,
            self.telemetry,
            verbs.refused_for_room,
            self._maker,
            self.post,
            self._events_pool,
        )
        return verbs

    def note_lag(self, late_s: float) -> None:
        self.telemetry.loop_lag_seconds.observe(late_s)
        self.observed.lag(late_s)

    def debug_app(
        self,
        guard: Guard | None = None,
        quotas: Callable[[str], Sequence[ResourceQuota] | None] = no_quotas,
    ) -> FastAPI:
        context = Context(
            self.cluster,
            self.journal,
            self.telemetry,
            self.calls,
            self.unready,
            time.monotonic,
            time.time,
            self._name,
            self._peers.ask if self._peers else nobody,
            self.feed,
            self.observed.now,
            guard,
            self._settings_now,
            self.stuck,
            quotas,
            self.settings.scheduler_name,
        )
        return debug_app(context)

    def _settings_now(self) -> SettingsView:
        reloading = self.reloading
        return SettingsView(
            mode=self.settings.mode.value,
            file=str(reloading.file) if reloading.file else None,
            refused=list(reloading.refused),
            after_restart=list(reloading.after_restart),
        )


async def gathered(works: Iterable[Awaitable[None]]) -> None:
    """Awaits them, several at once; raises what any of them raised first."""
    turns = asyncio.Semaphore(TOUCHED_AT_ONCE)

    async def in_turn(work: Awaitable[None]) -> None:
        async with turns:
            await work

    await asyncio.gather(*map(in_turn, works))


def _epoch_s() -> float:
    return time.time() - time.monotonic()
