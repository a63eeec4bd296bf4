"""Marks pods that do not fit on the GPU that they got in the ledger, and then evicts them.

The mark is written by compare-and-swap on the version of the GPUNode that shows which pods must
leave, so replicas never evict two pods if one eviction is enough. A marked pod stays at its gate
even if memory becomes free. The mark is removed when the pod no longer has to leave. Before the
eviction the mark is read again (``eviction.evicting``), and a pod that has started in the meantime
is not evicted. If an eviction is repeated, late or lost, the worst result is a pod that waits or
that its controller replaces.

Pods are evicted, not deleted, so that disruption budgets apply. A budget does not protect a pod at
its gate, because such a pod is pending and serves nothing yet.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import structlog

from extender.event_recorder import EventRecorder
from extender.eviction.evicting import Result, Victim, evict
from extender.ledger.ledger import Ledger
from extender.ledger.reservations import ATTEMPTS
from extender.ledger.store import Evictor, Store
from extender.metrics import Telemetry
from headroom.contract.event_reasons import EventReason
from headroom.contract.gate import has_gate, waits
from headroom.contract.gpunode import EVICTED, GPUNode
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.notices import pod_notice
from headroom.core.eviction.misplaced_pods import Misplaced
from headroom.errors import StoreConflict, StoreError, StoreNotFound

log = structlog.get_logger()

_WHY = "not enough free memory on its GPU"
DOES_NOT_FIT_EVICTED = (
    "The GPU that this pod got does not have enough free memory, is unhealthy, or is cordoned: the"
    " device plugin chose another GPU than Headroom predicted, or another process took the memory."
    " The pod is evicted before it starts, so that its controller creates a new one. If it has no"
    " controller, create it again."
)
DOES_NOT_FIT_WAITS = (
    "The GPU that this pod got does not have enough free memory, is unhealthy, or is cordoned: the"
    " device plugin chose another GPU than Headroom predicted, or another process took the memory."
    " The pod waits at its gate. It is not evicted, because no controller would replace it. To"
    " place it on another GPU, delete it and create it again."
)


@dataclass(frozen=True, slots=True)
class EvictionResult:
    """The evicted pods, and (uid, message) of each rejected eviction."""

    evicted: tuple[Pod, ...] = ()
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
        """Evict the pods that must leave the node. Raise store errors, but return errors about a
        single pod."""
        for _ in range(ATTEMPTS):
            gpunode = await self._store.read_gpunode(node)
            if gpunode is None:
                return EvictionResult()
            leave = self._misplaced(gpunode).leave
            with suppress(StoreConflict, StoreNotFound):
                marked = await self._ledger.reservations.mark(gpunode, leave)
                return await self._evict(marked)
        return EvictionResult()

    async def _evict(self, gpunode: GPUNode) -> EvictionResult:
        evicted: list[Pod] = []
        rejected: list[tuple[str, str]] = []
        for uid, reservation in gpunode.spec.reservations.items():
            if EVICTED not in reservation.flags:
                continue
            victim = Victim(reservation.namespace, reservation.name, uid, gpunode.name)
            required = partial(self._is_required, gpunode.name, uid)
            try:
                # Read the pod after the mark is written, because from then on the agent does not
                # let the pod start.
                made = await evict(self._store, self._evictor, victim, required, _has_not_started)
            except StoreError as err:
                rejected.append((uid, str(err)))
                continue
            if made.result is Result.REJECTED:
                rejected.append((uid, made.message))
            elif made.result is Result.EVICTED and made.pod is not None:
                evicted.append(made.pod)
        return EvictionResult(tuple(evicted), tuple(rejected))

    async def _is_required(self, node: str, uid: str) -> bool:
        """Return whether the ledger marks the pod and the newest report shows that the pod must
        leave."""
        gpunode = await self._store.read_gpunode(node)
        reservation = gpunode.spec.reservations.get(uid) if gpunode else None
        if gpunode is None or reservation is None or EVICTED not in reservation.flags:
            return False
        return uid in self._misplaced(gpunode).leave


class EvictionController:
    """Finds pods that do not fit on their GPU in this replica's cache. ``evictions`` checks them
    against the API server and evicts them. A failure is retried in the next round."""

    def __init__(
        self,
        cluster: Cluster,
        evictions: Evictions,
        telemetry: Telemetry,
        event_recorder: EventRecorder,
    ) -> None:
        self._cluster = cluster
        self._evictions = evictions
        self._telemetry = telemetry
        self._event_recorder = event_recorder
        #: Uids of stuck pods that already have an Event.
        self._recorded: frozenset[str] = frozenset()

    async def once(self) -> None:
        now_s = time.monotonic()
        stuck: set[str] = set()
        for name in self._cluster.crowded:
            gpunode = self._cluster.gpunode(name)
            if gpunode is None:
                continue
            found = self._cluster.misplaced(gpunode, now_s)
            stuck |= found.stuck
            if found.leave or _marked(gpunode):
                await self._evict(name)
            await asyncio.sleep(0)  # lets the event loop serve calls
        for uid in stuck - self._recorded:
            if (pod := self._cluster.pod(uid)) is not None:
                log.warning("pod_stuck", node=pod.node, pod_uid=uid, reason=_WHY)
                await self._event_recorder.write(
                    pod_notice(pod, EventReason.INSUFFICIENT_GPU_MEMORY, DOES_NOT_FIT_WAITS, key="")
                )
        self._recorded = frozenset(stuck)

    async def _evict(self, node: str) -> None:
        try:
            sent = await self._evictions.evict_misplaced(node)
        except StoreError as err:
            log.warning("eviction_failed", node=node, message=str(err))
            return
        for pod in sent.evicted:
            uid = pod.metadata.uid
            self._telemetry.evictions.labels("evicted").inc()
            log.warning("pod_evicted", node=node, pod_uid=uid, reason=_WHY)
            await self._event_recorder.write(
                pod_notice(pod, EventReason.INSUFFICIENT_GPU_MEMORY, DOES_NOT_FIT_EVICTED, key="")
            )
        for uid, message in sent.rejected:
            self._telemetry.evictions.labels("rejected").inc()
            log.warning("eviction_rejected", node=node, pod_uid=uid, message=message)


def _marked(gpunode: GPUNode) -> bool:
    return any(EVICTED in reservation.flags for reservation in gpunode.spec.reservations.values())


def _has_not_started(pod: Pod) -> bool:
    return waits(pod) or not has_gate(pod)
