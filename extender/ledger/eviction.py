"""Evict pods that have no room on their GPU: mark them in the ledger, then call the eviction API.

The mark is a compare-and-swap on the GPUNode that shows which pods must leave. So replicas never
evict two pods if one is enough. A marked pod stays at its gate, even if memory becomes free; the
mark is removed when the pod no longer has to leave. The eviction carries the pod's uid and
resourceVersion, so a pod that has started in the meantime is not evicted. If an eviction is
repeated, late or lost, the worst result is a pod that waits or that its controller replaces.

Pods are evicted, not deleted, so that disruption budgets apply. A budget does not protect a pod at
its gate: that pod is pending and serves nothing yet.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Protocol

from contract.gate import has_gate, waits
from contract.gpunode import EVICTED, GPUNode
from contract.kube import Pod
from extender.errors import StoreConflict, StoreError, StoreNotFound
from extender.ledger.ledger import Ledger
from extender.ledger.reservations import ATTEMPTS
from extender.ledger.store import Store
from extender.placement.overfull_devices import Misplaced

NO_ROOM = "NoRoomOnGPU"
NO_ROOM_EVICTED = (
    "The GPU that this pod was given has no room for it: the device plugin chose another GPU than"
    " Headroom predicted, or another process took the memory. The pod is evicted before it starts,"
    " so that its controller creates a new one."
)
NO_ROOM_WAITS = (
    "The GPU that this pod was given has no room for it: the device plugin chose another GPU than"
    " Headroom predicted, or another process took the memory. The pod waits at its gate until there"
    " is room. It is not evicted, because no controller would replace it. To place it on another"
    " GPU, delete it and create it again."
)


class Evictor(Protocol):
    """The calls that the ledger makes about pods, other than binding them."""

    async def evict(self, pod: Pod) -> None:
        """Evict the pod if it is still the version that was read; raise store errors."""

    async def record_event(self, pod: Pod, reason: str, message: str) -> None:
        """Write an Event on the pod, once per reason; raise nothing."""


@dataclass(frozen=True, slots=True)
class EvictionResult:
    """The result: uids of the evicted pods, and (uid, message) of each rejected eviction."""

    evicted: tuple[str, ...] = ()
    rejected: tuple[tuple[str, str], ...] = ()


class Evictions:
    """Evicts the pods that ``misplaced`` selects from one version of a GPUNode."""

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

    async def evict_misplaced(self, node: str) -> EvictionResult:
        """Evict the pods that must leave the node. Raise store errors, except those about a single
        pod, which are returned."""
        for _ in range(ATTEMPTS):
            gpunode = await self._store.read_gpunode(node)
            if gpunode is None:
                return EvictionResult()
            leave = self._misplaced(gpunode).leave
            with suppress(StoreConflict, StoreNotFound):
                return await self._evict(await self._ledger.reclaimer.mark(gpunode, leave))
        return EvictionResult()

    async def record_stuck(self, pod: Pod) -> None:
        await self._evictor.record_event(pod, NO_ROOM, NO_ROOM_WAITS)

    async def _evict(self, gpunode: GPUNode) -> EvictionResult:
        evicted: list[str] = []
        rejected: list[tuple[str, str]] = []
        for uid, reservation in gpunode.spec.reservations.items():
            if EVICTED not in reservation.flags:
                continue
            try:
                # Read after the mark is written: from then on the agent does not let the pod start.
                pod = await self._store.read_pod(reservation.namespace, reservation.name)
                if pod is not None and _may_go(pod, uid, gpunode.name):
                    await self._evictor.evict(pod)
                    evicted.append(uid)
                    await self._evictor.record_event(pod, NO_ROOM, NO_ROOM_EVICTED)
            except (StoreConflict, StoreNotFound):
                continue  # changed or deleted: the next round checks it again
            except StoreError as err:
                rejected.append((uid, str(err)))
        return EvictionResult(tuple(evicted), tuple(rejected))


def _may_go(pod: Pod, uid: str, node: str) -> bool:
    metadata = pod.metadata
    is_here = metadata.uid == uid and pod.node == node and not pod.ended
    return is_here and not metadata.deletion_timestamp and (waits(pod) or not has_gate(pod))
