"""Makes room for pods that only GPU memory keeps from a node, and writes Events about preemption.

kube-scheduler calls preempt only if it finds a resource missing itself. It looks for victims before
it writes that a pod is unschedulable. So a pod that has that condition because of Headroom, was
rejected here recently and has no nomination yet got no victims from kube-scheduler.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

import structlog

from contract.kube import Pod
from extender.bounded import Bounded
from extender.controllers.event_recorder import Post
from extender.ledger.preemption_writer import PreemptionWriter
from extender.observability.metrics import Telemetry
from extender.periodic import Loops
from extender.state.cluster_state import ClusterState
from extender.state.decision_records import Preempted
from extender.state.evictable_pods import may_preempt
from extender.state.journal import Journal, micros
from extender.state.nominations import priority
from extender.state.notices import Notice, pod_subject
from extender.state.preemption_report import recorded, summary
from extender.state.requeue_hints import rejected_by_us
from extender.state.victim_search import Preemption, preemption

log = structlog.get_logger()

EVERY_S = 1.0
#: Time that kube-scheduler gets to act on a rejection before this controller does.
SETTLED_S = 0.5
#: Retry interval for a pod without possible victims, or whose victims cannot be evicted.
AGAIN_AFTER_S = 15.0
#: Pods per round, the most important first.
AT_ONCE = 4
#: Pods whose last Event and last attempt are remembered.
REMEMBERED = 1024
VICTIM, NEWCOMER = "LeavesForGPUMemory", "OthersLeaveGPU"


class PreemptionController:
    """Evicts victims through ``maker``; None if this process must not evict pods.

    ``rejected`` returns the nodes that passed kube-scheduler's filters in the pod's last filter
    call here, and that were rejected for reasons that evictions could remove. ``post`` writes an
    Event, on a thread of ``pool``.
    """

    def __init__(
        self,
        cluster: ClusterState,
        journal: Journal,
        telemetry: Telemetry,
        rejected: Callable[[str], Sequence[str]],
        maker: PreemptionWriter | None,
        post: Post,
        pool: Executor,
    ) -> None:
        self._cluster = cluster
        self._journal = journal
        self._telemetry = telemetry
        self._rejected = rejected
        self._maker = maker
        self._post = post
        self._pool = pool
        #: Uid of a pod -> earliest time of its next attempt, on the monotonic clock.
        self._not_before_s: Bounded[str, float] = Bounded(REMEMBERED)
        #: Uid of a pod -> the decision that its last Event is about.
        self._announced: Bounded[str, str] = Bounded(REMEMBERED)

    def start(self, loops: Loops, unready: Callable[[], str]) -> None:
        loops.start("preemption", self.once, EVERY_S, unready=unready)

    async def once(self) -> None:
        await self._announce_nominations()
        if self._maker is None:
            return
        now_s = time.monotonic()
        for pod in self._waiting(now_s)[:AT_ONCE]:
            await self._make_room(self._maker, pod)

    def _waiting(self, now_s: float) -> list[Pod]:
        """Return the pods that may preempt others, the most important and oldest first."""
        held = {pod.metadata.uid for pods in self._cluster.nominees(now_s).values() for pod in pods}
        found: list[Pod] = []
        for pod in self._cluster.unbound():
            uid = pod.metadata.uid
            decision = self._journal.of_uid(uid)
            if (
                uid not in held
                and decision is not None
                and not decision.fits
                and abs(time.time() - decision.at_s) > SETTLED_S
                and self._not_before_s.get(uid, now_s) <= now_s
                and may_preempt(pod)
                and not pod.metadata.deletion_timestamp
                and rejected_by_us(pod)
            ):
                found.append(pod)
        return sorted(
            found, key=lambda pod: (-priority(pod), pod.metadata.creation_timestamp or "")
        )

    async def _make_room(self, maker: PreemptionWriter, pod: Pod) -> None:
        uid, began_s = pod.metadata.uid, time.monotonic()
        self._remember_not_before(uid, began_s + AGAIN_AFTER_S)
        rejected = self._rejected(uid)
        found = preemption(self._cluster, pod, {}, rejected, began_s, without_violations=True)
        best = found.best
        if best is None or best.leaving_anyway:
            return  # no eviction helps, or there is room soon anyway
        part = self._note(pod, found, len(rejected), time.monotonic() - began_s)
        made = await maker.make_room(pod, best.node, best.pods)
        log.info(
            "room_made" if made.begun else "no_room_made",
            pod_uid=uid,
            node=best.node,
            victims=list(best.uids),
            evicted=[victim.metadata.uid for victim in made.evicted],
            message=made.rejected,
        )
        if made.begun:
            self._telemetry.preemptions.labels("controller").inc()
            await self._announce(pod, part)
        outcomes = self._telemetry.evictions
        outcomes.labels("evicted").inc(len(made.evicted))
        if made.rejected:
            outcomes.labels("rejected").inc()

    def _note(self, pod: Pod, found: Preemption, offered: int, took_s: float) -> Preempted:
        part = recorded(found, time.time(), micros(took_s), 0, 1, "controller")
        decision = self._journal.of_uid(pod.metadata.uid)
        self._journal.note(decision.pod if decision else pod, part, part.at_s)
        return part

    async def _announce_nominations(self) -> None:
        """Write Events about the preemptions of kube-scheduler, once it has nominated a node."""
        for pods in self._cluster.nominees(time.monotonic()).values():
            for pod in pods:
                uid = pod.metadata.uid
                decided = self._journal.preempted_for(uid)
                if decided is None or not (pod.status and pod.status.nominated_node_name):
                    continue
                decision_id, part = decided
                if (
                    part.node == pod.status.nominated_node_name
                    and self._announced.get(uid) != decision_id
                ):
                    await self._announce(pod, part)

    async def _announce(self, pod: Pod, part: Preempted) -> None:
        uid = pod.metadata.uid
        decided = self._journal.preempted_for(uid)
        decision_id = decided[0] if decided else ""
        notices = [
            Notice(pod_subject(pod), NEWCOMER, summary(part), decision_id, decision_id=decision_id)
        ]
        for victim in part.victims:
            leaves = self._cluster.pod(victim.uid)
            if leaves is not None:
                # Only the pod's uid, as in kube-scheduler's Event: the reader may not be allowed to
                # read that pod.
                message = (
                    f"Leaves node {part.node} for pod {uid}, which has a higher priority and needs "
                    "the memory of its GPU."
                )
                notices.append(
                    Notice(
                        pod_subject(leaves), VICTIM, message, decision_id, decision_id=decision_id
                    )
                )
        loop = asyncio.get_running_loop()
        for notice in notices:
            await loop.run_in_executor(self._pool, self._post, notice)
        self._announced[uid] = decision_id

    def _remember_not_before(self, uid: str, until_s: float) -> None:
        self._not_before_s[uid] = until_s
