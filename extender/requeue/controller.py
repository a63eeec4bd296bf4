"""Requeues rejected pods in kube-scheduler when they fit on a node that gained headroom.

``requeue.hints`` decides which pods are worth another attempt. This module decides when to
check.
"""

import asyncio
import time
from collections.abc import Callable

import structlog

from extender.ledger.ledger import Ledger
from extender.metrics import Telemetry
from extender.requeue.hints import RequeueHints, rejected_by_us
from headroom.contract.kube import Pod
from headroom.contract.watched import PodSeen, Relisted
from headroom.core.cluster.changes import Effects, Event
from headroom.core.cluster.cluster import Cluster
from headroom.core.journal.journal import Journal
from headroom.errors import StoreError
from headroom.runtime.loops import Loops
from headroom.runtime.settings.settings import Mode, Settings

log = structlog.get_logger()

#: Minimum number of seconds between two checks of the pending pods. Nodes that gain headroom in the
#: meantime are checked together.
EVERY_S = 0.25
#: Number of seconds between two checks if no pod is known to wait and no node has gained headroom.
IDLE_S = 5.0
#: Maximum number of pods that are written concurrently. The other connections are left for binds.
REQUEUED_AT_ONCE = 8
#: Number of seconds for which a check runs before the event loop serves other tasks.
SLICE_S = 0.003


class RequeueController:
    """Requeues pods through the ledger.

    ``unready`` returns the reason why nothing can be decided yet, or "" if decisions are possible.
    In mode observe, no pod is rejected. The ids that this process writes begin with ``name``.
    """

    def __init__(
        self,
        cluster: Cluster,
        journal: Journal,
        telemetry: Telemetry,
        settings: Settings,
        unready: Callable[[], str],
        name: str,
    ) -> None:
        self._cluster = cluster
        self._journal = journal
        self._telemetry = telemetry
        self._settings = settings
        self._unready = unready
        self._name = name
        self._requeue_hints = RequeueHints()
        self._due = asyncio.Event()
        self._latest_gain = 0
        #: Uids of rejected pods that were requeued after the mode became observe.
        self._released: set[str] = set()
        self._writes = asyncio.Semaphore(REQUEUED_AT_ONCE)

    def follow(self, settings: Settings) -> None:
        """Use these settings from now on. Rejected pods may wait for a reason that no longer
        applies."""
        self._settings = settings
        self._due.set()

    def react(self, effects: Effects) -> None:
        """Schedule a check if an event may be about a rejected pod, or if a node has gained
        headroom."""
        has_gained = self._cluster.latest_gain != self._latest_gain
        self._latest_gain = self._cluster.latest_gain
        if has_gained or any(map(_was_rejected, effects.events)):
            self._due.set()

    def start(self, loops: Loops, ledger: Ledger) -> None:
        async def check() -> None:
            await self.once(ledger)
            if self._requeue_hints.pending:
                self._due.set()

        loops.start("requeues", check, IDLE_S, self._due, EVERY_S)

    async def once(self, ledger: Ledger) -> None:
        if self._unready():
            return
        if self._settings.mode is Mode.OBSERVE:
            await self._release(ledger)
            return
        self._released.clear()
        requeues: list[asyncio.Task[bool]] = []
        resumed_s = now_s = time.monotonic()
        for named in self._requeue_hints.due(self._cluster, self._journal, now_s, time.time()):
            if named is not None:
                requeues.append(asyncio.create_task(self._requeue(ledger, named)))
            elif time.monotonic() - resumed_s > SLICE_S:
                await asyncio.sleep(0)  # lets the event loop serve calls
                resumed_s = time.monotonic()
        await asyncio.gather(*requeues)
        if requeues:
            log.info("pods_requeued", pods=len(requeues))

    async def _release(self, ledger: Ledger) -> None:
        """Requeue once each pod that was rejected before the mode became observe."""
        unbound = self._cluster.unbound()
        self._released &= {pod.metadata.uid for pod in unbound}
        rejected = (pod for pod in unbound if rejected_by_us(pod))
        held = [pod for pod in rejected if pod.metadata.uid not in self._released]

        async def release(pod: Pod) -> None:
            if await self._requeue(ledger, pod):
                self._released.add(pod.metadata.uid)

        await asyncio.gather(*map(release, held))
        if held:
            log.info("pods_released", pods=len(held))

    async def _requeue(self, ledger: Ledger, pod: Pod) -> bool:
        """Requeue the pod and return whether that succeeded. If it failed, the next check finds the
        pod again."""
        try:
            async with self._writes:
                retry = await ledger.requeue(pod)
        except Exception as err:
            self._requeue_hints.missed(pod.metadata.uid)
            self._telemetry.requeues.labels("failed").inc()
            if not isinstance(err, StoreError):
                raise
            log.warning("requeue_failed", pod_uid=pod.metadata.uid, message=str(err))
            return False
        ours = retry is not None and retry.startswith(self._name)
        self._telemetry.requeues.labels("requeued" if ours else "overtaken").inc()
        if retry is not None:
            self._requeue_hints.requeued(pod.metadata.uid, retry)
        return True


def _was_rejected(event: Event) -> bool:
    """Return whether the event may be about a rejected pod."""
    if isinstance(event, PodSeen):
        return not event.pod.node and rejected_by_us(event.pod)
    return isinstance(event, Relisted)
