"""How a pod is sent away that has no room where it is: marked in the ledger, then evicted.

The mark is a compare-and-swap on the object of the node that says who has to leave, so that of any
number of replicas two never send two pods away where one was enough. From the mark on the node's
agent keeps the pod at its gate, however much room there comes to be; so the mark is taken back
where it is not needed any more. The eviction carries the pod's uid and resourceVersion: one that
has begun meanwhile, as far as its kubelet told, is not evicted. Done twice, late or never, nothing
worse happens than that a pod waits, or that its controller makes another one.

Evictions, not deletions: a disruption budget has its say. It has none for a pod at its gate, which
is pending, and disrupts nobody.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from contract.gate import has_gate, waits
from contract.gpunode import EVICTED, GPUNode
from contract.kube import Pod
from extender.errors import StoreConflict, StoreError, StoreNotFound
from extender.ledger.protocol import ATTEMPTS, Ledger
from extender.ledger.store import Store
from extender.placement.overfull_devices import Misplaced

NO_ROOM = "NoRoomOnGPU"
LEAVES = (
    "The GPU that this pod was given has no room for it: the device plugin chose another one than"
    " could be foreseen, or somebody else took the memory. It is evicted before it starts, so that"
    " its controller makes another one."
)
STAYS = (
    "The GPU that this pod was given has no room for it: the device plugin chose another one than"
    " could be foreseen, or somebody else took the memory. It waits at its gate until there is"
    " room. It is not evicted, because no controller would make another one; to have it placed"
    " elsewhere, delete it and create it again."
)


class Evictor(Protocol):
    """What is done to pods besides binding them."""

    async def evict(self, pod: Pod) -> None:
        """Have the pod ended, if it still is the one that was read; raises store errors."""

    async def tell(self, pod: Pod, reason: str, message: str) -> None:
        """Write an Event on the pod, once for each reason; raises nothing."""


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of it: uids of pods that were evicted, and of those that could not be, with why."""

    evicted: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()


class Evictions:
    """``misplaced`` decides on one very object of a node."""

    def __init__(
        self,
        store: Store,
        ledger: Ledger,
        evictor: Evictor,
        misplaced: Callable[[GPUNode], Misplaced],
    ) -> None:
        self._store = store
        self._ledger = ledger
        self._evictor = evictor
        self._misplaced = misplaced

    async def send_away(self, node: str) -> Sent:
        """Have those leave the node that are to; store errors are raised but where they are about
        one pod."""
        for _ in range(ATTEMPTS):
            gpunode = await self._store.read_gpunode(node)
            if gpunode is None:
                return Sent()
            leave = self._misplaced(gpunode).leave
            with suppress(StoreConflict, StoreNotFound):
                return await self._evict(await self._ledger.mark(gpunode, leave))
        return Sent()

    async def tell_stuck(self, pod: Pod) -> None:
        await self._evictor.tell(pod, NO_ROOM, STAYS)

    async def _evict(self, gpunode: GPUNode) -> Sent:
        evicted: list[str] = []
        rejected: list[tuple[str, str]] = []
        for uid, reservation in gpunode.spec.reservations.items():
            if EVICTED not in reservation.flags:
                continue
            try:
                # After the mark: from now on its agent does not let it start.
                pod = await self._store.read_pod(reservation.namespace, reservation.name)
                if pod is not None and _may_go(pod, uid, gpunode.name):
                    await self._evictor.evict(pod)
                    evicted.append(uid)
                    await self._evictor.tell(pod, NO_ROOM, LEAVES)
            except (StoreConflict, StoreNotFound):
                continue  # it changed or went: the next round looks again
            except StoreError as err:
                rejected.append((uid, str(err)))
        return Sent(tuple(evicted), tuple(rejected))


def _may_go(pod: Pod, uid: str, node: str) -> bool:
    metadata = pod.metadata
    there = metadata.uid == uid and pod.node == node and not pod.ended
    return there and not metadata.deletion_timestamp and (waits(pod) or not has_gate(pod))
