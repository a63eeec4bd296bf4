"""One replica: cluster state, ledger and what is served of them, around a store."""

import asyncio
import contextlib
import signal
import socket
import sys
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import msgspec
import structlog
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from contract.decision import decision_of
from contract.gpunode import GPUNode
from contract.kube import Node, Pod
from contract.reasons import Reason
from extender.admission.around import Around
from extender.certs.expiry import CertificateCollector
from extender.cluster.chores import (
    Bystander,
    Leftover,
    Unmarked,
    bystanders,
    dying,
    knows_devices,
    leftovers,
    uninitialised,
)
from extender.cluster.events import (
    BindBegun,
    BindEnded,
    DepartureMarked,
    Event,
    GPUNodeSeen,
    PodSeen,
    Relisted,
)
from extender.cluster.notices import notices
from extender.cluster.observations import Outcome
from extender.cluster.state import ClusterState
from extender.cluster.waking import Waking, refused_by_us
from extender.errors import StoreError
from extender.fleetmetrics import FleetCollector
from extender.journal import Journal
from extender.ledger.eviction import Evictions, Hands
from extender.ledger.preempting import RoomMaker
from extender.ledger.protocol import BindAsk, Bound, Declined, Ledger
from extender.ledger.store import Store
from extender.placement.misplaced import Misplaced
from extender.placement.observed import Result
from extender.placement.placed import Placement
from extender.settings import Mode, Settings
from extender.telemetry import Telemetry
from extender.tls import ServerTls
from extender.web.admission import webhook_app
from extender.web.api.context import Context
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
from extender.wiring.lag import sample_lag
from extender.wiring.machinery import Observed
from extender.wiring.memory import collect_in_lulls
from extender.wiring.noting import note_bind, tell_followers
from extender.wiring.patience import Certified, Patient, counting
from extender.wiring.peers import Peers
from extender.wiring.preempting import Preempting
from extender.wiring.reloading import ANYWHERE, Origin, Reloading
from extender.wiring.surroundings import around
from extender.wiring.telling import Telling
from extender.wiring.watching import Watching, watch

log = structlog.get_logger()
T = TypeVar("T")

#: Longer than kube-scheduler keeps a connection that it does not use (90 s): it is the one to close
#: it, since a call that is sent while we do fails, and with it the attempt to place a pod.
KEEP_ALIVE_S = 120
#: Binds open at once; kube-scheduler has no bound of its own.
BIND_THREADS = 16
EVENT_THREADS = 2
CHORES_EVERY_S = 5.0
#: Between two looks at the pods that wait; what gets room meanwhile is looked at together.
WAKE_EVERY_S = 0.25
#: A look goes on for so long before others have a turn.
LOOK_S = 0.003
#: Nodes that a chore looks at before others have a turn.
AT_ONCE = 50
#: A thread that computes lets others have the interpreter's lock after so long, when they ask; the
#: loop asks several times in each call.
SWITCH_S = 0.0005
NOT_TAKEN_IN = "Headroom has not yet taken in what it listed"


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
        self._sources_unready = unready
        self.calls = Calls()
        #: What the verbs can do before they are called; whether there was anything to do.
        self._ahead: Callable[[], bool] = bool
        self.intake = Intake(
            self.cluster, self.calls, self._took, self._turned, lambda: self._ahead()
        )
        self.observed = Observed(lambda: self.intake.is_behind)
        #: Set when all that was awaited was weighed.
        self.begun = asyncio.Event()
        self._unsettled = asyncio.Event()
        self._waking = Waking()
        self._latest_room = 0
        self._room_came = asyncio.Event()
        #: Uids of those that were refused and are tried again since we only observe.
        self._released: set[str] = set()
        self._rules_changed: Callable[[], None] = lambda: None
        #: Begins the ids of what this process writes, so that it knows its own promises again.
        self._name = uuid.uuid4().hex[:12]
        self.watching = Watching(self.cluster, self.journal.records, self.feed, self._name)
        self._pool = ThreadPoolExecutor(BIND_THREADS, thread_name_prefix="bind")
        #: None where nobody is evicted for others by us; and where the verbs are not made yet.
        self._maker: RoomMaker | None = None
        self.preempting: Preempting | None = None
        #: None where pods are nobody's to evict.
        self._evicting: Evicting | None = None
        peers = settings.peers, settings.debug_port, settings.peers_timeout_s
        self._peers = Peers(*peers, self._name, settings.debug_tls_cert) if settings.peers else None
        #: Not the binds': an API server that is slow to take Events must not keep them waiting.
        self._events_pool = ThreadPoolExecutor(EVENT_THREADS, thread_name_prefix="events")
        #: Writes an Event, counted; does nothing where nobody reads them.
        self.post = counted(post, self.telemetry) if post else lambda notice: True
        self._announcing = Announcing(self.post, self._events_pool)
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
        self._room_came.set()

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
        if any(map(_was_refused, events)):
            self._room_came.set()

    def _turned(self) -> None:
        """Something was weighed."""
        if self.cluster.begun:
            self.begun.set()
        for outcome in self.cluster.observations.take():
            tell_followers(self.feed, outcome, self.cluster.pod(outcome.uid))
            if outcome.promise.attempt.startswith(self._name):
                self._tell(outcome)
        if self.cluster.has_unsettled:
            self._unsettled.set()
        if self.cluster.latest_room != self._latest_room:
            self._latest_room = self.cluster.latest_room
            self._room_came.set()

    def _tell(self, outcome: Outcome) -> None:
        """Count how our prediction for a pod turned out; of a miss tell why."""
        self.telemetry.predictions.labels(outcome.result.value).inc()
        if outcome.result is Result.UNSEEN:
            return
        self.telemetry.window_seconds.observe(outcome.window_s)
        if outcome.surprise is None:
            return
        pod = self.cluster.pod(outcome.uid)
        overcommitted = "yes" if outcome.overcommitted_bytes else "no"
        self.telemetry.misses.labels(outcome.surprise.value, overcommitted).inc()
        log.warning(
            "prediction_missed",
            decision_id=decision_of(pod) if pod else "",
            pod=f"{outcome.promise.namespace}/{outcome.promise.name}",
            pod_uid=outcome.uid,
            node=outcome.node,
            devices=outcome.observed,
            predicted=outcome.predicted,
            surprise=outcome.surprise.value,
            overcommitted_bytes=outcome.overcommitted_bytes,
            window_s=round(outcome.window_s, 3),
        )

    def open_ledger(self, store: Store) -> Ledger:
        def judge(pod: Pod, gpunode: GPUNode) -> Placement | Reason:
            now_s, node = time.monotonic(), gpunode.name
            # Filter may have let it pass before it was known for whom others leave.
            held_for = self.cluster.held_for(pod, now_s).get(node, ())
            taken = self.cluster.refusal_beside(pod, node, held_for, now_s) if held_for else None
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
        )

    def send_away(self, store: Store, ledger: Ledger, hands: Hands) -> None:
        """From now on the chores include sending pods away that have no room where they are."""

        def misplaced_now(gpunode: GPUNode) -> Misplaced:
            return self.cluster.misplaced(gpunode, time.monotonic())

        evictions = Evictions(ConflictsCounted(store, self.telemetry), ledger, hands, misplaced_now)
        self._evicting = Evicting(self.cluster, evictions, self.telemetry, self.deliver, self._pool)

    def make_room(self, maker: RoomMaker) -> None:
        """From now on pods may be evicted for others, where the settings say so."""
        if self.settings.evict_for_memory:
            self._maker = maker

    @property
    def new_id(self) -> Callable[[], str]:
        return lambda: f"{self._name}-{uuid.uuid4().hex}"

    def verbs_app(self, ledger: Ledger, shown: Callable[[Pod], None]) -> FastAPI:
        return verbs_app(self.verbs(ledger, shown), self.telemetry, self.settings.max_body)

    def webhook_app(self) -> FastAPI:
        """The admission webhook, which has nothing to do with the ledger."""

        def surroundings(namespace: str) -> Around:
            return around(self.cluster, self.settings.wishes, namespace)

        settings = self.settings
        return webhook_app(surroundings, self.unready, self.telemetry, settings.max_body)

    def verbs(self, ledger: Ledger, shown: Callable[[Pod], None]) -> Verbs:
        async def bind(args: BindArgs, pod: Pod | None, gpunode: GPUNode | None) -> str:
            ask = BindAsk(args.pod_namespace, args.pod_name, args.pod_uid, args.node, pod, gpunode)
            if pod is not None:
                self.deliver([BindBegun(pod, ask.node)])
            began_s = time.monotonic()
            try:
                outcome = await self.loop.run_in_executor(self._pool, ledger.bind, ask)
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

    def debug_app(self, guard: Guard | None = None) -> FastAPI:
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

    async def tidy(self, ledger: Ledger) -> None:
        """Do the chores, for ever: promises that nobody needs any more are looked into at once, all
        else now and then; whatever fails is found again the next time."""
        round_at_s = 0.0
        while True:
            try:
                if time.monotonic() >= round_at_s:
                    round_at_s = time.monotonic() + CHORES_EVERY_S
                    await self.tidy_once(ledger)
                else:
                    await self.settle(ledger)
            except Exception:  # chores that stopped would let memory leak, unseen
                log.exception("chores_broken")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._unsettled.wait(), round_at_s - time.monotonic())
            self._unsettled.clear()

    async def settle(self, ledger: Ledger, everywhere: bool = False) -> None:
        """Take back what is left over on the nodes that changed, and charge who sits there without
        a promise; one of a node after the other, since they are written into one object."""
        on = self.cluster.take_unsettled()
        if self.unready():
            return  # what has not been listed yet is not missing
        after_s = self.settings.orphan_after_s
        nodes = [gpunode.name for gpunode in self.cluster.gpunodes()] if everywhere else on
        of_node: dict[str, list[Bystander | Leftover | Unmarked]] = {}
        async for some in _part_by_part(nodes):
            for found in (
                *bystanders(self.cluster, some),
                *leftovers(self.cluster, time.time(), after_s, some),
            ):
                of_node.setdefault(found.node, []).append(found)

        async def one_by_one(founds: Sequence[Bystander | Leftover | Unmarked]) -> None:
            for found in founds:
                await self._look_into(ledger, found)

        await asyncio.gather(*map(one_by_one, of_node.values()))
        if self._evicting is not None and not self.observes:
            await self._evicting.once()

    async def tidy_once(self, ledger: Ledger) -> None:
        await self.settle(ledger, everywhere=True)
        if self.unready():
            return
        if gone := dying(self.cluster):
            with _told():
                await self.loop.run_in_executor(self._pool, ledger.let_go, gone)
        waiting: list[Node] = []
        async for some in _part_by_part(self.cluster.nodes()):
            waiting += uninitialised(self.cluster, some)
        if waiting:
            with _told():
                ready = await self.loop.run_in_executor(self._pool, ledger.initialise, waiting)
                log.info("nodes_initialised", nodes=ready)
        self.cluster.overuses.look(time.monotonic())
        if not self.observes:
            await self._announcing.tell(notices(self.cluster))

    async def _look_into(self, ledger: Ledger, found: Bystander | Leftover | Unmarked) -> None:
        if isinstance(found, Bystander):
            node, uid = found.node, found.pod.metadata.uid
            charge = self.loop.run_in_executor(self._pool, ledger.charge, node, found.pod)
            log.info("bystander_charged", node=node, pod_uid=uid, charged=await charge)
            return
        node, uid = found.node, found.uid
        if isinstance(found, Leftover):
            remove = self.loop.run_in_executor(self._pool, ledger.remove, node, uid, found.left)
            log.info("promise_looked_into", node=node, pod_uid=uid, removed=await remove)
            return
        version = await self.loop.run_in_executor(
            self._pool, ledger.departed_by, node, uid, found.promise
        )
        if version:
            self.deliver([DepartureMarked(node, uid, version)])
            log.info("promise_awaits_a_sample", node=node, pod_uid=uid, lease_version=version)

    async def wake(self, ledger: Ledger) -> None:
        """Have kube-scheduler try refused pods again when there is room for them, for ever."""
        while True:
            wait_s = WAKE_EVERY_S if self._waking.pending else CHORES_EVERY_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._room_came.wait(), wait_s)
            self._room_came.clear()
            try:
                await self.wake_once(ledger)
            except Exception:  # pods that nobody wakes would wait for minutes, unseen
                log.exception("waking_broken")
            await asyncio.sleep(WAKE_EVERY_S)

    async def wake_once(self, ledger: Ledger) -> None:
        if self.unready():
            return
        if self.observes:
            await self._release(ledger)
            return
        self._released.clear()
        wakes: list[asyncio.Task[None]] = []
        resumed_s = now_s = time.monotonic()
        for named in self._waking.look(self.cluster, self.journal, now_s, time.time()):
            if named is not None:
                wakes.append(asyncio.create_task(self._wake(ledger, named)))
            elif time.monotonic() - resumed_s > LOOK_S:
                await asyncio.sleep(0)  # kube-scheduler's calls do not wait for the whole of it
                resumed_s = time.monotonic()
        await asyncio.gather(*wakes)
        if wakes:
            log.info("pods_woken", pods=len(wakes))

    async def _release(self, ledger: Ledger) -> None:
        """Have kube-scheduler try all who were refused before we only observed, once each."""
        refused = (pod for pod in self.cluster.unbound() if refused_by_us(pod))
        held = [pod for pod in refused if pod.metadata.uid not in self._released]
        self._released.update(pod.metadata.uid for pod in held)
        await asyncio.gather(*(self._wake(ledger, pod) for pod in held))
        if held:
            log.info("pods_released", pods=len(held))

    async def _wake(self, ledger: Ledger, pod: Pod) -> None:
        try:
            retry = await self.loop.run_in_executor(self._pool, ledger.wake, pod)
        except StoreError as err:
            log.warning("wake_failed", pod_uid=pod.metadata.uid, message=str(err))
            self._waking.missed(pod.metadata.uid)
            self.telemetry.wakes.labels("failed").inc()
            return
        ours = retry is not None and retry.startswith(self._name)
        self.telemetry.wakes.labels("woken" if ours else "overtaken").inc()
        if retry is not None:
            self._waking.woken(pod.metadata.uid, retry)


async def serve(
    extender: Extender,
    ledger: Ledger,
    verbs: FastAPI,
    debug: FastAPI,
    announce: Callable[[str], None],
    debug_tls: ServerTls | None = None,
) -> None:
    settings = extender.settings
    tls = ServerTls(settings.tls) if settings.tls else None
    sockets = {
        "verbs": _listen(settings.verbs_at, settings.verbs_port),
        "debug": _listen(settings.debug_at, settings.debug_port),
    }
    counted = counting(extender.calls)
    servers = {
        "verbs": _server(verbs, counted, tls),
        "debug": _server(debug, Certified, debug_tls),
    }
    if settings.webhook_tls is not None:
        sockets["webhook"] = _listen(settings.host, settings.webhook_port)
        webhook_tls = ServerTls(settings.webhook_tls)
        servers["webhook"] = _server(extender.webhook_app(), Patient, webhook_tls)

    def stop() -> None:
        extender.feed.close()  # a server that ends waits for who follows
        for server in servers.values():
            server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        extender.loop.add_signal_handler(number, stop)
    sys.setswitchinterval(SWITCH_S)
    tasks = [
        asyncio.create_task(extender.tidy(ledger)),
        asyncio.create_task(sample_lag(extender.note_lag)),
        asyncio.create_task(extender.telling.for_ever(extender.unready)),
        asyncio.create_task(extender.reloading.for_ever()),
        *(
            [asyncio.create_task(extender.preempting.for_ever(extender.idle))]
            if extender.preempting
            else []
        ),
        asyncio.create_task(_collect(extender)),
        asyncio.create_task(_watch(extender)),
    ]
    running = [
        asyncio.create_task(servers[name].serve(sockets=[sockets[name]])) for name in servers
    ]
    where = {
        name: "{}://{}:{}".format(servers[name].scheme, *sock.getsockname()[:2])
        for name, sock in sockets.items()
    }
    # The sockets listen already: whoever connects now is answered in a moment.
    announce(msgspec.json.encode({"event": "serving", **where}).decode())
    try:
        await asyncio.gather(*running)
    finally:
        for task in tasks:
            task.cancel()


async def _collect(extender: Extender) -> None:
    await extender.begun.wait()
    await collect_in_lulls(extender.calls)


async def _watch(extender: Extender) -> None:
    await extender.begun.wait()
    await watch(extender.watching, extender.feed)


def _epoch_s() -> float:
    return time.time() - time.monotonic()


async def _part_by_part(all_there_are: Sequence[T]) -> AsyncIterator[Sequence[T]]:
    """kube-scheduler's calls do not wait for a look at the whole of a fleet."""
    for start in range(0, len(all_there_are), AT_ONCE):
        yield all_there_are[start : start + AT_ONCE]
        await asyncio.sleep(0)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A chore that the store refuses keeps nobody from the next one."""
    try:
        yield
    except StoreError as err:
        log.warning("chores_failed", message=str(err))


def _was_refused(event: Event) -> bool:
    """Whether it may tell of a pod that waits for room."""
    if isinstance(event, PodSeen):
        return not event.pod.node and refused_by_us(event.pod)
    return isinstance(event, Relisted)


class _Server(uvicorn.Server):
    """Leaves signals alone: two servers share one process, and one handler stops both."""

    @property
    def scheme(self) -> str:
        return "https" if self.config.is_ssl else "http"

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: FastAPI, protocol: type[Patient], tls: ServerTls | None = None) -> _Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        http=protocol,
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
    )
    return _Server(config)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as err:
        raise OSError(f"cannot listen on {host}:{port}: {err.strerror or err}") from err
