"""One replica's chores: what is looked into because something changed, and what now and then.

What the chores are is told by ``cluster.chores``, what becomes of them is written by the ledger;
here it is decided when they are done, and that none keeps another, or a call, waiting.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterator, Sequence

import structlog

from contract.kube import Node
from extender.batches import part_by_part
from extender.controllers.event_recorder import EventRecorder
from extender.controllers.eviction import EvictionController
from extender.errors import StoreError
from extender.ledger.protocol import Ledger
from extender.periodic import Loops
from extender.state.changes import (
    DepartureMarked,
    Event,
    GPUNodeGone,
    GPUNodeSeen,
    NodeSeen,
)
from extender.state.cluster_state import ClusterState
from extender.state.notices import notices
from extender.state.reconcile_queue import (
    Leftover,
    Unmarked,
    UnreservedPod,
    dying,
    leftovers,
    uninitialised,
    unnoted_choices,
    unreserved_pods,
)

log = structlog.get_logger()

#: Between two rounds of all chores.
EVERY_S = 5.0
#: Between two rounds in which nodes are made ready, if one waits for it.
READY_EVERY_S = 0.25
#: A node that takes longer to look into is left to go on beside what comes next.
WAITED_S = 1.0
#: Nodes that a chore looks at before others have a turn.
AT_ONCE = 20
#: Nodes that are written to at once: connections are left for binds.
WRITTEN_AT_ONCE = 8


class ReconcileController:
    """``unready`` says why nothing can be told missing yet, "" when it can; ``observes``: whether
    nobody is evicted or told; ``orphan_after_s``: the age at which a promise without a bound pod is
    looked into."""

    def __init__(
        self,
        cluster: ClusterState,
        event_recorder: EventRecorder,
        deliver: Callable[[Sequence[Event]], None],
        unready: Callable[[], str],
        observes: Callable[[], bool],
        orphan_after_s: Callable[[], float],
        failed: Callable[[str], None] = lambda loop: None,
    ) -> None:
        self._cluster = cluster
        self._event_recorder = event_recorder
        self._deliver = deliver
        self._unready = unready
        self._observes = observes
        self._orphan_after_s = orphan_after_s
        self._count_failure = failed
        self._turns = asyncio.Semaphore(WRITTEN_AT_ONCE)
        #: Set when a reservation may be left over, or missing.
        self.wanted = asyncio.Event()
        #: Set when a GPUNode may have to be made ready, or let go.
        self.nodes_wanted = asyncio.Event()
        self._round_at_s = 0.0
        #: Nodes whose reservations are being looked into, and what does so.
        self._looking: dict[str, asyncio.Task[None]] = {}
        #: None where pods are nobody's to evict.
        self.evicting: EvictionController | None = None

    def look_soon(self) -> None:
        """Some nodes changed so that a reservation may be left over there, or missing."""
        self.wanted.set()

    def took(self, events: Sequence[Event]) -> None:
        """These have come: one may be of a node that waits to be initialised, or that is to have
        another device choice."""
        seen = [event.node.metadata.name for event in events if isinstance(event, NodeSeen)]
        held = filter(None, map(self._cluster.gpunode, seen))
        if any(map(_changes_readiness, events)) or unnoted_choices(self._cluster, held):
            self.nodes_wanted.set()

    def start(self, loops: Loops, ledger: Ledger) -> None:
        """Three loops, so that none waits for what another asks of the API server."""
        loops.start("reservations", lambda: self.settle(ledger), EVERY_S, self.wanted)
        loops.start("nodes", lambda: self.ready(ledger), EVERY_S, self.nodes_wanted, READY_EVERY_S)
        loops.start("notices", self.tell, EVERY_S)

    async def once(self, ledger: Ledger) -> None:
        """Do all of them, on all nodes."""
        self._round_at_s = 0.0
        await self.settle(ledger)
        await self.ready(ledger)
        await self.tell()

    async def ready(self, ledger: Ledger) -> None:
        """Let GPUNodes go that are deleted, initialise those that wait for it, and note which
        device choice nodes are to have."""
        if self._unready():
            return
        gone, choices = list[str](), list[tuple[str, str]]()
        async for held in part_by_part(self._cluster.gpunodes(), AT_ONCE):
            gone += dying(held)
            choices += unnoted_choices(self._cluster, held)
        if gone:
            with _told():
                await ledger.let_go(gone)
        for name, choice in choices:
            with _told():
                noted = await ledger.note_choice(name, choice)
                log.info("device_choice_noted", node=name, device_choice=choice, noted=noted)
        waiting: list[Node] = []
        async for some in part_by_part(self._cluster.nodes(), AT_ONCE):
            waiting += uninitialised(self._cluster, some)
        if waiting:
            with _told():
                ready = await ledger.initialise(waiting)
                log.info("nodes_initialised", nodes=ready)

    async def tell(self) -> None:
        """Write what people are to read in Events."""
        if self._unready():
            return
        self._cluster.overuses.look(time.monotonic())
        if not self._observes():
            await self._event_recorder.tell(notices(self._cluster))

    async def settle(self, ledger: Ledger) -> None:
        """Take back what is left over, and charge who sits on a node without a reservation: on the
        nodes that changed at once, on all of them now and then. Whatever fails is found again.

        What is found on one node is looked into one after the other, since it is written into one
        object. A node on which that takes longer keeps no other waiting.
        """
        everywhere = time.monotonic() >= self._round_at_s
        if everywhere:
            self._round_at_s = time.monotonic() + EVERY_S
        on = self._cluster.take_unsettled()
        if self._unready():
            return  # what has not been listed yet is not missing
        after_s = self._orphan_after_s()
        nodes = self._cluster.gpunode_names() if everywhere else on
        of_node: dict[str, list[UnreservedPod | Leftover | Unmarked]] = {}
        async for some in part_by_part(nodes, AT_ONCE):
            for found in (
                *unreserved_pods(self._cluster, some),
                *leftovers(self._cluster, time.time(), after_s, some),
            ):
                of_node.setdefault(found.node, []).append(found)
        begun = [
            self._look_into_all(ledger, node, founds)
            for node, founds in of_node.items()
            if node not in self._looking
        ]
        if begun:
            await asyncio.wait(begun, timeout=WAITED_S)
        if self.evicting is not None and not self._observes():
            await self.evicting.once()

    def _look_into_all(
        self, ledger: Ledger, node: str, founds: Sequence[UnreservedPod | Leftover | Unmarked]
    ) -> asyncio.Task[None]:
        async def one_by_one() -> None:
            async with self._turns:
                for found in founds:
                    await self._look_into(ledger, found)

        def done(task: asyncio.Task[None]) -> None:
            del self._looking[node]
            if not task.cancelled() and (err := task.exception()) is not None:
                self._failed(err)

        task = self._looking[node] = asyncio.create_task(one_by_one())
        task.add_done_callback(done)
        return task

    def _failed(self, err: BaseException) -> None:
        log.error("loop_failed", loop="reservations", exc_info=err)
        self._count_failure("reservations")

    async def _look_into(self, ledger: Ledger, found: UnreservedPod | Leftover | Unmarked) -> None:
        if isinstance(found, UnreservedPod):
            node, uid = found.node, found.pod.metadata.uid
            charged = await ledger.charge(node, found.pod)
            log.info("unreserved_pod_adopted", node=node, pod_uid=uid, charged=charged)
            return
        node, uid = found.node, found.uid
        if isinstance(found, Leftover):
            removed = await ledger.remove(node, uid, found.left)
            log.info("reservation_checked", node=node, pod_uid=uid, removed=removed)
            return
        version = await ledger.departed_by(node, uid, found.reservation)
        if version is not None:
            self._deliver([DepartureMarked(node, uid, version, time.monotonic())])
            log.info("reservation_awaits_a_sample", node=node, pod_uid=uid, lease_version=version)


def _changes_readiness(event: Event) -> bool:
    """Whether it may be of a node that can be initialised now, or a GPUNode to let go."""
    if isinstance(event, GPUNodeSeen):
        return not event.gpunode.spec.initialised or bool(event.gpunode.metadata.deletion_timestamp)
    return isinstance(event, GPUNodeGone)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A chore that the store refuses keeps nobody from the next one."""
    try:
        yield
    except StoreError as err:
        log.warning("reconcile_failed", message=str(err))
