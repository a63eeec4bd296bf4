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
from extender.cluster.chores import (
    Bystander,
    Leftover,
    Unmarked,
    bystanders,
    dying,
    leftovers,
    uninitialised,
)
from extender.cluster.events import DepartureMarked, Event
from extender.cluster.notices import notices
from extender.cluster.state import ClusterState
from extender.errors import StoreError
from extender.ledger.protocol import Ledger
from extender.parts import part_by_part
from extender.wiring.announcing import Announcing
from extender.wiring.evicting import Evicting

log = structlog.get_logger()

#: Between two rounds of all chores.
EVERY_S = 5.0
#: Nodes that a chore looks at before others have a turn.
AT_ONCE = 20
#: Nodes that are written to at once: connections are left for binds.
WRITTEN_AT_ONCE = 8


class Tidying:
    """``unready`` says why nothing can be told missing yet, "" when it can; ``observes``: whether
    nobody is evicted or told; ``orphan_after_s``: the age at which a promise without a bound pod is
    looked into."""

    def __init__(
        self,
        cluster: ClusterState,
        announcing: Announcing,
        deliver: Callable[[Sequence[Event]], None],
        unready: Callable[[], str],
        observes: Callable[[], bool],
        orphan_after_s: Callable[[], float],
    ) -> None:
        self._cluster = cluster
        self._announcing = announcing
        self._deliver = deliver
        self._unready = unready
        self._observes = observes
        self._orphan_after_s = orphan_after_s
        self._wanted = asyncio.Event()
        #: None where pods are nobody's to evict.
        self.evicting: Evicting | None = None

    def look_soon(self) -> None:
        """Some nodes changed so that a promise may be left over there, or missing."""
        self._wanted.set()

    async def for_ever(self, ledger: Ledger) -> None:
        """Do the chores, for ever: promises that nobody needs any more are looked into at once, all
        else now and then; whatever fails is found again the next time."""
        round_at_s = 0.0
        while True:
            try:
                if time.monotonic() >= round_at_s:
                    round_at_s = time.monotonic() + EVERY_S
                    await self.once(ledger)
                else:
                    await self._settle(ledger)
            except Exception:  # chores that stopped would let memory leak, unseen
                log.exception("chores_broken")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), round_at_s - time.monotonic())
            self._wanted.clear()

    async def once(self, ledger: Ledger) -> None:
        """Do all of them, on all nodes."""
        await self._settle(ledger, everywhere=True)
        if self._unready():
            return
        gone: list[str] = []
        async for held in part_by_part(self._cluster.gpunodes(), AT_ONCE):
            gone += dying(held)
        if gone:
            with _told():
                await ledger.let_go(gone)
        waiting: list[Node] = []
        async for some in part_by_part(self._cluster.nodes(), AT_ONCE):
            waiting += uninitialised(self._cluster, some)
        if waiting:
            with _told():
                ready = await ledger.initialise(waiting)
                log.info("nodes_initialised", nodes=ready)
        self._cluster.overuses.look(time.monotonic())
        if not self._observes():
            await self._announcing.tell(notices(self._cluster))

    async def _settle(self, ledger: Ledger, everywhere: bool = False) -> None:
        """Take back what is left over on the nodes that changed, and charge who sits there without
        a promise; one of a node after the other, since they are written into one object."""
        on = self._cluster.take_unsettled()
        if self._unready():
            return  # what has not been listed yet is not missing
        after_s = self._orphan_after_s()
        nodes = self._cluster.gpunode_names() if everywhere else on
        of_node: dict[str, list[Bystander | Leftover | Unmarked]] = {}
        async for some in part_by_part(nodes, AT_ONCE):
            for found in (
                *bystanders(self._cluster, some),
                *leftovers(self._cluster, time.time(), after_s, some),
            ):
                of_node.setdefault(found.node, []).append(found)

        turns = asyncio.Semaphore(WRITTEN_AT_ONCE)

        async def one_by_one(founds: Sequence[Bystander | Leftover | Unmarked]) -> None:
            async with turns:
                for found in founds:
                    await self._look_into(ledger, found)

        await asyncio.gather(*map(one_by_one, of_node.values()))
        if self.evicting is not None and not self._observes():
            await self.evicting.once()

    async def _look_into(self, ledger: Ledger, found: Bystander | Leftover | Unmarked) -> None:
        if isinstance(found, Bystander):
            node, uid = found.node, found.pod.metadata.uid
            charged = await ledger.charge(node, found.pod)
            log.info("bystander_charged", node=node, pod_uid=uid, charged=charged)
            return
        node, uid = found.node, found.uid
        if isinstance(found, Leftover):
            removed = await ledger.remove(node, uid, found.left)
            log.info("promise_looked_into", node=node, pod_uid=uid, removed=removed)
            return
        version = await ledger.departed_by(node, uid, found.promise)
        if version:
            self._deliver([DepartureMarked(node, uid, version)])
            log.info("promise_awaits_a_sample", node=node, pod_uid=uid, lease_version=version)


@contextlib.contextmanager
def _told() -> Iterator[None]:
    """A chore that the store refuses keeps nobody from the next one."""
    try:
        yield
    except StoreError as err:
        log.warning("chores_failed", message=str(err))
