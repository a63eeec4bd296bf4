"""Writes Events on pending pods. An Event states why the pod fits no node, and changes with the
reason.

The controller runs in the background and explains a few pods per second, each pod at most once in
``AGAIN_AFTER_S`` seconds. The replica that rejected a pod writes the Event, because it has the
decision. If the controller's state is lost, or another replica serves the pod, the same Event is
written again.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from extender.event_recorder import EventRecorder
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.journal.journal import Decision, Journal
from headroom.core.placement.snapshot import Snapshot
from headroom.core.whatif.pending_pods import Explaining, Pending
from headroom.runtime.follow.pending_counter import EVERY_S, PendingPods
from headroom.runtime.loops import Loops

log = structlog.get_logger()

#: Minimum number of seconds between two explanations of a pod, and so between two changes of its
#: Event.
AGAIN_AFTER_S = 60.0
#: Number of seconds after which a round explains no further pods.
SPENT_S = 0.1


@dataclass(slots=True)
class _Explained:
    explained_at_s: float
    message: str = ""


class PendingEventsController:
    """Explains at most ``per_round`` pods per round, if there is an API server for Events."""

    def __init__(
        self,
        cluster: Cluster,
        journal: Journal,
        event_recorder: EventRecorder,
        per_round: int,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._event_recorder = event_recorder
        self.limit(per_round)
        self._monotonic_s = monotonic_s
        #: The last explanation of each pod, by uid.
        self._explained: dict[str, _Explained] = {}
        self._pods = PendingPods(cluster, journal.of_uid)

    @property
    def pending(self) -> Pending:
        """Return the pending pods of the last round."""
        return self._pods.pending

    def limit(self, per_round: int) -> None:
        """Explain at most ``per_round`` pods per round from now on."""
        self._per_round = per_round if self._event_recorder.writes else 0

    def start(self, loops: Loops, unready: Callable[[], str]) -> None:
        loops.start("waiting", lambda: self.once(self._monotonic_s()), EVERY_S, unready=unready)

    async def once(self, now_s: float) -> None:
        """Run one round, which counts the pending pods and explains each pod whose explanation is
        due."""
        there = {pod.metadata.uid for pod in self._cluster.unbound()}
        self._explained = {u: e for u, e in self._explained.items() if u in there}
        due: list[tuple[float, str, Pod, Decision]] = []
        for pod, decision in await self._pods.once():
            uid = pod.metadata.uid
            explained = self._explained.get(uid)
            if explained is None or now_s - explained.explained_at_s >= AGAIN_AFTER_S:
                due.append((explained.explained_at_s if explained else -1.0, uid, pod, decision))
        if self._per_round and due:
            first = heapq.nsmallest(self._per_round, due, key=lambda each: each[:2])
            due_now = [(pod, decision) for *_, pod, decision in first]
            snap, loop = self._cluster.snapshot(), asyncio.get_running_loop()
            await loop.run_in_executor(
                self._event_recorder.pool, self._explain, due_now, snap, now_s
            )

    def _explain(self, due: Sequence[tuple[Pod, Decision]], snap: Snapshot, now_s: float) -> None:
        explaining = Explaining(self._cluster, snap, now_s)
        until_s = self._monotonic_s() + SPENT_S
        for pod, decision in due:
            if self._monotonic_s() > until_s:
                return  # in a large cluster, each kind of request takes a while
            again = pod.metadata.uid in self._explained
            explained = self._explained.setdefault(pod.metadata.uid, _Explained(now_s))
            explained.explained_at_s = now_s
            notice = explaining.notice(pod, decision, again)
            if notice is None or notice.message == explained.message:
                continue
            if not self._event_recorder.write_now(notice):
                explained.explained_at_s = -1.0
                return  # the API server does not respond, so the other Events would fail too
            explained.message = notice.message
