"""Evicts pods that have no room on their GPU."""

import asyncio
import time
from collections.abc import Callable, Sequence

import structlog

from contract.gpunode import EVICTED, GPUNode
from contract.kube import Pod
from extender.errors import StoreError
from extender.ledger.eviction import Evictions
from extender.observability.metrics import Telemetry
from extender.state.changes import BackOffEnded, Event
from extender.state.cluster_state import ClusterState

log = structlog.get_logger()


class EvictionController:
    """Finds pods without room in this replica's cache, and has ``evictions`` check and evict them.
    Whatever fails is found again in the next round."""

    def __init__(
        self,
        cluster: ClusterState,
        evictions: Evictions,
        telemetry: Telemetry,
        deliver: Callable[[Sequence[Event]], None],
    ) -> None:
        self._cluster = cluster
        self._evictions = evictions
        self._telemetry = telemetry
        self._deliver = deliver
        #: Uids of stuck pods that already have an Event.
        self._recorded: frozenset[str] = frozenset()

    async def once(self) -> None:
        now_s = time.monotonic()
        if over := self._cluster.back_offs.over(now_s):
            self._deliver([BackOffEnded(node) for node in over])
        stuck: set[str] = set()
        for name in self._cluster.crowded:
            gpunode = self._cluster.gpunode(name)
            if gpunode is None:
                continue
            found = self._cluster.misplaced(gpunode, now_s)
            stuck |= found.stuck
            if found.leave or _marked(gpunode):
                await self._evict(name)
            await asyncio.sleep(0)  # lets kube-scheduler's calls in
        for uid in stuck - self._recorded:
            if (pod := self._cluster.pod(uid)) is not None:
                await self._record(pod)
        self._recorded = frozenset(stuck)

    async def _evict(self, node: str) -> None:
        try:
            sent = await self._evictions.evict_misplaced(node)
        except StoreError as err:
            log.warning("eviction_failed", node=node, message=str(err))
            return
        for uid in sent.evicted:
            self._telemetry.evictions.labels("evicted").inc()
            log.warning("pod_evicted", node=node, pod_uid=uid, reason="no room on its GPU")
        for uid, message in sent.rejected:
            self._telemetry.evictions.labels("rejected").inc()
            log.warning("eviction_rejected", node=node, pod_uid=uid, message=message)

    async def _record(self, pod: Pod) -> None:
        uid = pod.metadata.uid
        log.warning("pod_stuck", node=pod.node, pod_uid=uid, reason="no room on its GPU")
        await self._evictions.record_stuck(pod)


def _marked(gpunode: GPUNode) -> bool:
    return any(EVICTED in reservation.flags for reservation in gpunode.spec.reservations.values())
