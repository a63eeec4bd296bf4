"""Tells the authors of refused pods why, in the background: a few a second, each pod now and then,
and only what is new.

It is the replica that refused a pod that tells, since it knows the decision. Where another one
takes over, it tells each pod once more, in the same Event. All that is remembered may be lost.
"""

import asyncio
import heapq
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import structlog

from contract.kube import Pod
from contract.reasons import Reason
from extender.cluster.state import ClusterState
from extender.cluster.waiting import Explaining, Pending, main_reason, told_by_condition
from extender.journal import Decision, Journal
from extender.placement.snapshot import Snapshot
from extender.wiring.announcing import Post
from extender.wiring.loops import Loops

log = structlog.get_logger()

#: Between two rounds.
EVERY_S = 1.0
#: Between two looks at a pod, and so at least between two changes of its Event.
AGAIN_AFTER_S = 60.0
#: In one round no other pod is begun with after so long.
SPENT_S = 0.1
#: Pods that are looked at before others have a turn.
LOOKED_AT_TOGETHER = 128


@dataclass(slots=True)
class _Told:
    looked_at_s: float
    message: str = ""


class Telling:
    """``post`` writes an Event, on a thread of ``pool``; None where nobody is to be told.

    ``per_round`` pods at most are reckoned with and told in one round. ``give_way`` is called
    before each, on the thread.
    """

    def __init__(
        self,
        cluster: ClusterState,
        journal: Journal,
        post: Post | None,
        per_round: int,
        give_way: Callable[[], None],
        pool: Executor,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._journal = journal
        self._post = post
        self._per_round = per_round if post is not None else 0
        self._give_way = give_way
        self._pool = pool
        self._monotonic_s = monotonic_s
        #: Uid -> what was told.
        self._told: dict[str, _Told] = {}
        #: Uid -> a pod, and what its condition says.
        self._conditions: dict[str, tuple[Pod, dict[Reason, int]]] = {}
        #: Who waits, as of the last round; replaced, never changed in place.
        self.pending = Pending()

    def at_most(self, per_round: int) -> None:
        """From now on tell so many in one round."""
        self._per_round = per_round if self._post is not None else 0

    def start(self, loops: Loops, unready: Callable[[], str]) -> None:
        async def look() -> None:
            if not unready():
                await self.once(self._monotonic_s())

        loops.start("waiting", look, EVERY_S)

    async def once(self, now_s: float) -> None:
        """One round: see who waits, and tell those whose turn it is."""
        unbound = self._cluster.unbound()
        there = {pod.metadata.uid for pod in unbound}
        self._told = {uid: told for uid, told in self._told.items() if uid in there}
        self._conditions = {uid: c for uid, c in self._conditions.items() if uid in there}
        pending = Pending()
        due: list[tuple[float, str, Pod, Decision]] = []
        for number, pod in enumerate(unbound):
            if number % LOOKED_AT_TOGETHER == 0:
                await asyncio.sleep(0)  # kube-scheduler's calls do not wait for all of them
            uid = pod.metadata.uid
            decision = self._journal.of_uid(uid)
            if decision is None:
                refused: Mapping[Reason, int] = self._said(pod)
            elif decision.fits:
                continue  # it is being bound
            else:
                refused = decision.refused
                told = self._told.get(uid)
                if told is None or now_s - told.looked_at_s >= AGAIN_AFTER_S:
                    due.append((told.looked_at_s if told else -1.0, uid, pod, decision))
            pending.add(main_reason(refused), pod.metadata.creation_timestamp or "")
        self.pending = pending
        if self._per_round and due:
            first = heapq.nsmallest(self._per_round, due, key=lambda each: each[:2])
            turn = [(pod, decision) for *_, pod, decision in first]
            snap, loop = self._cluster.snapshot(), asyncio.get_running_loop()
            await loop.run_in_executor(self._pool, self._tell, turn, snap, now_s)

    def _said(self, pod: Pod) -> dict[Reason, int]:
        uid = pod.metadata.uid
        known = self._conditions.get(uid)
        if known is None or known[0] is not pod:
            known = self._conditions[uid] = pod, told_by_condition(pod)
        return known[1]

    def _tell(self, turn: Sequence[tuple[Pod, Decision]], snap: Snapshot, now_s: float) -> None:
        assert self._post is not None
        explaining = Explaining(self._cluster, snap, now_s)
        until_s = self._monotonic_s() + SPENT_S
        for pod, decision in turn:
            if self._monotonic_s() > until_s:
                return  # of a large fleet each kind of request takes a while
            self._give_way()
            again = pod.metadata.uid in self._told
            told = self._told.setdefault(pod.metadata.uid, _Told(now_s))
            told.looked_at_s = now_s
            notice = explaining.notice(pod, decision, again)
            if notice is None or notice.message == told.message:
                continue
            if not self._post(notice):
                told.looked_at_s = -1.0
                return  # who does not answer now will not answer for the others
            told.message = notice.message
