"""One replica: cluster state, ledger, verbs and debug API around a store, and its two servers."""

import asyncio
import contextlib
import signal
import socket
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import structlog
import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from contract.gpunode import GPUNode
from contract.kube import Pod
from contract.reasons import Reason
from extender.cluster.chores import (
    Leftover,
    Unmarked,
    dying,
    leftovers,
    to_wake,
    uninitialised,
)
from extender.cluster.events import (
    BindBegun,
    BindEnded,
    DepartureMarked,
    Event,
    GPUNodeSeen,
    PodGone,
    PodSeen,
)
from extender.cluster.state import ClusterState
from extender.errors import StoreError
from extender.journal import Journal
from extender.ledger.protocol import BindAsk, Bound, Declined, Ledger
from extender.ledger.store import Store
from extender.placement.placed import Placement
from extender.settings import Settings
from extender.telemetry import Telemetry
from extender.tls import ServerTls
from extender.web.debug import debug_app
from extender.web.serving import verbs_app
from extender.web.verbs import Verbs
from extender.web.wire import BindArgs

log = structlog.get_logger()

#: Longer than kube-scheduler keeps a connection that it does not use (90 s): it is the one to close
#: it, since a call that is sent while we do fails, and with it the attempt to place a pod.
KEEP_ALIVE_S = 120
#: Binds open at once; kube-scheduler has no bound of its own.
BIND_THREADS = 16
CHORES_EVERY_S = 5.0
#: What gets room within this is looked at together: a thousand pods that wait cost 0.1 s.
WAKE_AFTER_S = 0.5
#: The rest waits for the next room, or for kube-scheduler's own retry.
WAKE_AT_ONCE = 64


class Extender:
    """One replica: state, ledger and both applications, around a store."""

    def __init__(self, settings: Settings, unready: Callable[[], str]) -> None:
        self.settings = settings
        self.loop = asyncio.get_running_loop()
        self._owner = threading.get_ident()
        epoch_s = time.time() - time.monotonic()
        self.cluster = ClusterState(settings.rules, settings.stale_after_s, epoch_s)
        self.journal = Journal()
        self.telemetry = Telemetry(CollectorRegistry())
        self.unready = unready
        self._inbox: deque[Sequence[Event]] = deque()
        self._snapshot_due = False
        self._pod_went = asyncio.Event()
        self._room_came = asyncio.Event()
        self._pool = ThreadPoolExecutor(BIND_THREADS, thread_name_prefix="bind")

    def deliver(self, events: Sequence[Event]) -> None:
        """Take events from any thread; they are applied on the loop's, in the order of calls."""
        self._inbox.append(events)
        if threading.get_ident() == self._owner:
            self._take()
        else:
            self.loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        """Apply all that has come so far: what another thread handed in first goes first."""
        while self._inbox:
            events = self._inbox.popleft()
            self.cluster.apply(events)
            if any(map(_makes_room, events)):
                self._pod_went.set()
        if self.cluster.has_roomier:
            self._room_came.set()
        if not self._snapshot_due:
            self._snapshot_due = True
            self.loop.call_soon(self._make_snapshot)

    def _make_snapshot(self) -> None:
        """So that the next call finds it made: once for all that came together, since it costs
        as much for one node as for all of them."""
        self._snapshot_due = False
        self.cluster.snapshot()

    def open_ledger(self, store: Store) -> Ledger:
        def judge(pod: Pod, gpunode: GPUNode) -> Placement | Reason:
            return self.cluster.judge(pod, gpunode, time.monotonic())

        return Ledger(
            store,
            judge,
            self.cluster.adopt,
            written=lambda gpunode: self.deliver([GPUNodeSeen(gpunode, time.monotonic())]),
            wall_s=time.time,
            new_id=lambda: uuid.uuid4().hex,
        )

    def verbs_app(self, ledger: Ledger, shown: Callable[[Pod], None]) -> FastAPI:
        async def bind(args: BindArgs, pod: Pod | None, gpunode: GPUNode | None) -> str:
            ask = BindAsk(args.pod_namespace, args.pod_name, args.pod_uid, args.node, pod, gpunode)
            if pod is not None:
                self.deliver([BindBegun(pod, ask.node)])
            try:
                outcome = await self.loop.run_in_executor(self._pool, ledger.bind, ask)
            finally:
                self.deliver([BindEnded(ask.uid, ask.node)])
            self.telemetry.binds.labels(type(outcome).__name__.lower()).inc()
            log.info(
                "bind",
                pod=f"{ask.namespace}/{ask.name}",
                pod_uid=ask.uid,
                node=ask.node,
                outcome=type(outcome).__name__.lower(),
            )
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
        )
        return verbs_app(verbs, self.telemetry, self.settings.max_body)

    def debug_app(self) -> FastAPI:
        return debug_app(
            self.cluster, self.journal, self.telemetry, self.unready, time.monotonic, time.time
        )

    async def tidy(self, ledger: Ledger) -> None:
        """Do the chores, for ever: when a pod has gone, and now and then; whatever fails is found
        again the next time."""
        while True:
            self._pod_went.clear()
            try:
                await self.tidy_once(ledger)
            except Exception:  # chores that stopped would let memory leak, unseen
                log.exception("chores_broken")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._pod_went.wait(), CHORES_EVERY_S)

    async def tidy_once(self, ledger: Ledger) -> None:
        if self.unready():
            return  # what has not been listed yet is not missing
        for found in leftovers(self.cluster, time.time(), self.settings.orphan_after_s):
            await self._look_into(ledger, found)
        try:
            for node in dying(self.cluster):
                await self.loop.run_in_executor(self._pool, ledger.let_go, node)
            if waiting := uninitialised(self.cluster):
                ready = await self.loop.run_in_executor(self._pool, ledger.initialise, waiting)
                log.info("nodes_initialised", nodes=ready)
        except StoreError as err:
            log.warning("chores_failed", message=str(err))

    async def _look_into(self, ledger: Ledger, found: Leftover | Unmarked) -> None:
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
            await self._room_came.wait()
            await asyncio.sleep(WAKE_AFTER_S)
            self._room_came.clear()
            try:
                await self.wake_once(ledger)
            except Exception:  # pods that nobody wakes would wait for minutes, unseen
                log.exception("waking_broken")

    async def wake_once(self, ledger: Ledger) -> None:
        roomier, refused = self.cluster.take_roomier(), self.journal.refused()
        woken = to_wake(self.cluster, refused, roomier, time.monotonic())[:WAKE_AT_ONCE]
        for pod in woken:
            try:
                await self.loop.run_in_executor(self._pool, ledger.wake, pod)
            except StoreError as err:
                log.warning("wake_failed", pod_uid=pod.metadata.uid, message=str(err))
        if woken:
            log.info("pods_woken", pods=len(woken), nodes=len(roomier))


async def serve(
    extender: Extender,
    ledger: Ledger,
    verbs: FastAPI,
    debug: FastAPI,
    announce: Callable[[str], None],
) -> None:
    settings = extender.settings
    tls = ServerTls(settings.tls) if settings.tls else None
    sockets = {
        name: _listen(settings.host, port)
        for name, port in (("verbs", settings.verbs_port), ("debug", settings.debug_port))
    }
    servers = {"verbs": _server(verbs, tls), "debug": _server(debug)}

    def stop() -> None:
        for server in servers.values():
            server.should_exit = True

    for number in (signal.SIGINT, signal.SIGTERM):
        extender.loop.add_signal_handler(number, stop)
    chores = asyncio.create_task(extender.tidy(ledger))
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
        chores.cancel()


def _makes_room(event: Event) -> bool:
    return isinstance(event, PodGone) or (isinstance(event, PodSeen) and event.pod.ended)


class _Server(uvicorn.Server):
    """Leaves signals alone: two servers share one process, and one handler stops both."""

    @property
    def scheme(self) -> str:
        return "https" if self.config.is_ssl else "http"

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _server(app: FastAPI, tls: ServerTls | None = None) -> _Server:
    config = uvicorn.Config(
        app,
        log_config=None,
        access_log=False,
        lifespan="off",
        timeout_keep_alive=KEEP_ALIVE_S,
        ssl_context_factory=None if tls is None else lambda *_: tls.context,
    )
    return _Server(config)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as err:
        raise OSError(f"cannot listen on {host}:{port}: {err.strerror or err}") from err
