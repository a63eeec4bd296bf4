"""Evicts pods that use more memory than they reserved while other pods lack memory that they
reserved, and pods that use more memory than their limit.

Each eviction has two steps. First the decision is written into the GPUNode by compare-and-swap, and
an Event warns the pod's owner. After the grace period, the pod is evicted if a newer sample of the
agent still shows the pressure. Otherwise the decision is withdrawn. So all replicas act on the same
decision, and a replica that restarts continues with it. Before the eviction, the GPUNode is read
again. It must still contain the decision, and its report must show that this pod has to be evicted.
If an eviction is rejected, for example by a disruption budget, the pod is skipped for a while and
the next pod of its namespace is selected.

In mode observe, pods that would be evicted are only logged and counted. This happens after the
grace period, if a newer sample still shows the pressure and the API server accepts the eviction as
a dry run. So a pod that a disruption budget protects is not counted.
"""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import structlog

from extender.event_recorder import EventRecorder
from extender.eviction.evicting import Result, Victim, evict
from extender.ledger.ledger import Ledger
from extender.ledger.reservations import ATTEMPTS
from extender.ledger.store import Evictor, Store
from extender.overuse.metrics import OveruseMetrics
from headroom.bounded_dict import Bounded
from headroom.contract.event_reasons import EventReason
from headroom.contract.gpunode import GPUNode, OveruseEviction, Reservation
from headroom.contract.quantity import gib
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.notices import pod_notice
from headroom.core.eviction.eligibility import leaves_within
from headroom.core.overuse.decisions import (
    MOST_GRACE_S,
    latest_sample,
    overuse_evictions_on,
)
from headroom.core.overuse.selection import OveruseEvictions, Overusing, changes
from headroom.core.overuse.tracker import REJECTED_FOR_S
from headroom.errors import StoreConflict, StoreError, StoreNotFound
from headroom.runtime.loops import Loops

log = structlog.get_logger()

EVERY_S = 1.0
#: Maximum number of nodes without a decision that are checked in a round. The check of a node takes
#: up to a millisecond.
MOST_NODES = 100
#: Maximum number of remembered decisions, and of remembered pods that were logged.
DECISIONS, REMEMBERED = 2048, 4096


@dataclass(frozen=True, slots=True)
class _Observed:
    """A pod that would be selected for eviction, with the monotonic time and the sample of its
    first selection."""

    device: str
    since_s: float
    sample: str


@dataclass(frozen=True, slots=True)
class _Seen:
    """The monotonic time at which a decision was first seen, and the newest sample at that time."""

    at_s: float
    sample: str


class OveruseController:
    """Checks the nodes with overuse once a second. A failure is retried in the next round."""

    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        ledger: Ledger,
        evictor: Evictor,
        metrics: OveruseMetrics,
        event_recorder: EventRecorder,
        monotonic_s: Callable[[], float] = time.monotonic,
        most_nodes: int = MOST_NODES,
    ) -> None:
        self._monotonic_s = monotonic_s
        self._most_nodes = most_nodes
        self._cluster = cluster
        self._store = store
        self._ledger = ledger
        self._evictor = evictor
        self._metrics = metrics
        self._event_recorder = event_recorder
        #: When this process first saw a decision, by the pod's uid and the time of the decision.
        #: The clocks of two replicas are not compared.
        self._seen: Bounded[tuple[str, str], _Seen] = Bounded(DECISIONS)
        #: The pods that would be selected for eviction in the mode enforce, by node, and the pods
        #: that were already logged. Both are used only in the mode observe.
        self._observed: dict[str, dict[str, _Observed]] = {}
        self._logged: Bounded[str, None] = Bounded(REMEMBERED)
        #: The number of devices under pressure on which no pod may be evicted, by node.
        self._unresolved: dict[str, int] = {}
        #: Index of the first node without a decision that the next round checks.
        self._turn = 0

    def start(
        self,
        loops: Loops,
        unready: Callable[[], str],
        observes: Callable[[], bool],
        grace_s: Callable[[], float],
    ) -> None:
        """Start the loop. ``grace_s`` is the number of seconds from the warning to the eviction."""

        async def check() -> None:
            if not unready():
                await self.once(observes(), grace_s())

        loops.start("overuse", check, EVERY_S)

    async def once(self, observes: bool, grace_s: float) -> None:
        """Check all nodes with a decision, and up to ``most_nodes`` of the other nodes with
        overuse. The next call continues with the nodes that follow."""
        decided, others = self._cluster.overuses.nodes()
        names = {*decided, *others}
        self._observed = {name: of for name, of in self._observed.items() if name in names}
        self._unresolved = {name: of for name, of in self._unresolved.items() if name in names}
        self._turn = self._turn if self._turn < len(others) else 0
        now = others[self._turn : self._turn + self._most_nodes]
        self._turn += self._most_nodes
        for name in [*decided, *now]:
            gpunode = self._cluster.gpunode(name)
            if gpunode is not None:
                found = self._evictions(gpunode)
                self._unresolved[name] = len(found.unresolved)
                try:
                    if observes:
                        await self._observe(gpunode, found, grace_s)
                    else:
                        await self._act(gpunode, found, grace_s)
                except StoreError as err:
                    log.warning("overuse_eviction_failed", node=name, message=str(err))
            await asyncio.sleep(0)  # lets the event loop serve calls
        self._metrics.unresolved.set(sum(self._unresolved.values()))

    def _evictions(self, gpunode: GPUNode) -> OveruseEvictions:
        return overuse_evictions_on(self._cluster, gpunode, self._monotonic_s())

    async def _observe(self, gpunode: GPUNode, found: OveruseEvictions, grace_s: float) -> None:
        """Log each pod that would be evicted now, once per pod."""
        now_s, sample = self._monotonic_s(), latest_sample(self._cluster, gpunode)
        before = self._observed.get(gpunode.name, {})
        selected = self._observed[gpunode.name] = {}
        for uid, over in found.selected.items():
            first = before.get(uid)
            if first is None or first.device != over.device:
                first = _Observed(over.device, now_s, sample)
            selected[uid] = first
            pod, since_s = self._cluster.pod(uid), now_s - first.since_s
            due = since_s >= grace_s and sample != first.sample
            if pod is None or not due or uid in self._logged:
                continue
            try:
                await self._evictor.may_evict(pod)
            except StoreError:  # Repeat the dry run later, like an eviction in mode enforce.
                selected[uid] = replace(first, since_s=now_s + REJECTED_FOR_S)
                continue
            self._logged[uid] = None
            self._metrics.evictions.labels("would_evict").inc()
            name = f"{pod.metadata.namespace}/{pod.metadata.name}"
            figures = _figures(over)
            log.warning("pod_would_be_evicted", node=gpunode.name, pod=name, pod_uid=uid, **figures)

    async def _act(self, gpunode: GPUNode, found: OveruseEvictions, grace_s: float) -> None:
        if any(True for _ in changes(self._decided(gpunode), found.decided)):
            written = await self._decide(gpunode.name)
            if written is None:
                return
            gpunode = written
        for uid, reservation in gpunode.spec.reservations.items():
            if not reservation.overuse:
                continue
            if over := self._due(gpunode, uid, reservation.overuse, grace_s):
                await self._evict(gpunode.name, uid, reservation, reservation.overuse, over)

    def _due(
        self, gpunode: GPUNode, uid: str, decision: OveruseEviction, grace_s: float
    ) -> Overusing | None:
        """Return the overuse of the pod if the grace period is over and a sample that was taken
        after the decision shows that the pod must be evicted, according to this version of the
        GPUNode. Otherwise return None.

        This sample differs from the sample of the decision, and from the newest sample when this
        replica saw the decision first. So neither the node's clock nor a late watch decides which
        sample is newer.
        """
        now_s, sample = self._monotonic_s(), latest_sample(self._cluster, gpunode)
        key = uid, decision.since
        first = self._seen[key] = self._seen.get(key) or _Seen(now_s, sample)
        if now_s - first.at_s < grace_s or sample in (decision.observed_at, first.sample):
            return None
        return self._evictions(gpunode).selected.get(uid)

    async def _decide(self, node: str) -> GPUNode | None:
        """Write the decisions according to the newest version of the GPUNode, and return it."""
        for _ in range(ATTEMPTS):
            gpunode = await self._store.read_gpunode(node)
            if gpunode is None:
                return None
            before, found = self._decided(gpunode), self._evictions(gpunode)
            since, observed_at = (
                datetime.now(UTC).isoformat(),
                latest_sample(self._cluster, gpunode),
            )
            decided = {
                uid: _kept(gpunode.spec.reservations[uid], over)
                or OveruseEviction(over.device, since, observed_at)
                for uid, over in found.decided.items()
            }
            with suppress(StoreConflict, StoreNotFound):
                written = await self._ledger.reservations.decide_overuse(
                    gpunode, decided, before.keys() - found.decided.keys()
                )
                for uid, over in changes(before, found.decided):
                    await self._announce(node, uid, over)
                return written
        return None

    def _decided(self, gpunode: GPUNode) -> dict[str, str]:
        """Return the pods that must be evicted according to the ledger, with their device by uid.
        Pods that are terminating, and pods whose eviction was rejected recently, are omitted."""
        return {
            uid: reservation.overuse.device
            for uid, reservation in gpunode.spec.reservations.items()
            if reservation.overuse
            and not self._cluster.overuses.rejected_lately(
                gpunode.name, uid, reservation.overuse, self._monotonic_s()
            )
            and (pod := self._cluster.pod(uid)) is not None
            and not leaves_within(pod, MOST_GRACE_S)
        }

    async def _announce(self, node: str, uid: str, over: Overusing | None) -> None:
        if over is None:
            self._metrics.evictions.labels("withdrawn").inc()
            log.info("overuse_eviction_withdrawn", node=node, pod_uid=uid)
            return
        self._metrics.evictions.labels("decided").inc()
        log.warning("overuse_eviction_decided", node=node, pod_uid=uid, **_figures(over))
        if (pod := self._cluster.pod(uid)) is not None:
            message = _warning(over)
            await self._event_recorder.write(
                pod_notice(pod, EventReason.GPU_MEMORY_OVERUSE_EVICTION, message, key="")
            )

    async def _evict(
        self,
        node: str,
        uid: str,
        reservation: Reservation,
        decision: OveruseEviction,
        over: Overusing,
    ) -> None:
        async def is_required() -> bool:
            gpunode = await self._store.read_gpunode(node)
            held = gpunode.spec.reservations.get(uid) if gpunode else None
            if gpunode is None or held is None or held.overuse != decision:
                return False
            return self._due(gpunode, uid, decision, 0.0) is not None

        victim = Victim(reservation.namespace, reservation.name, uid, node)
        made = await evict(
            self._store, self._evictor, victim, is_required, most_grace_s=MOST_GRACE_S
        )
        if made.result is Result.REJECTED:
            await self._ledger.reservations.reject_overuse(node, uid)
            self._metrics.evictions.labels("rejected").inc()
            log.warning("overuse_eviction_rejected", node=node, pod_uid=uid, message=made.message)
            return
        if made.result is not Result.EVICTED or made.pod is None:
            # The pod was changed or deleted, or the decision withdrawn. The next round checks it
            # again.
            return
        self._metrics.evictions.labels("evicted").inc()
        log.warning("pod_evicted", node=node, pod_uid=uid, reason="overuse of GPU memory")
        await self._event_recorder.write(
            pod_notice(made.pod, EventReason.EVICTED_FOR_GPU_MEMORY_OVERUSE, _reason(over), key="")
        )


def _kept(reservation: Reservation, over: Overusing) -> OveruseEviction | None:
    decision = reservation.overuse or None
    return decision if decision and decision.device == over.device else None


def _warning(over: Overusing) -> str:
    """Return the message of the Event before the eviction."""
    uses = f"This pod uses {gib(over.used_bytes, up=True)} of device {over.device}"
    if over.exceeded_limit_bytes is not None:
        return (
            f"{uses}, and its limit is {gib(over.exceeded_limit_bytes)}. It is evicted within "
            "seconds unless it uses less. Raise annotation headroom.gpu/vram-limit, or reduce its "
            "use."
        )
    return (
        f"{uses}, and has reserved {gib(over.reserved_bytes)}. Only "
        f"{gib(max(0, over.free_bytes))} are free there, and {gib(over.needed_bytes, up=True)} are "
        "needed for the other pods. It is evicted within seconds unless memory becomes free. "
        "Request more in annotation headroom.gpu/vram, or reduce its use."
    )


def _reason(over: Overusing) -> str:
    """Return the message of the Event after the eviction."""
    if over.exceeded_limit_bytes is not None:
        return (
            "This pod used more GPU memory than its limit. It was evicted, so that its controller "
            "creates a new one. To keep it, raise annotation headroom.gpu/vram-limit."
        )
    return (
        "This pod used more GPU memory than it reserved, and other pods on its GPU lacked memory "
        "that they had reserved. It was evicted, so that its controller creates a new one. To keep "
        "it, request more in annotation headroom.gpu/vram."
    )


def _figures(over: Overusing) -> dict[str, object]:
    return {
        "device": over.device,
        "reserved_bytes": over.reserved_bytes,
        "used_bytes": over.used_bytes,
        "free_bytes": over.free_bytes,
        "needed_bytes": over.needed_bytes,
        "exceeded_limit_bytes": over.exceeded_limit_bytes,
    }
