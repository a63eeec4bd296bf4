"""Evicts pods for pods that lack only GPU memory, and writes Events about preemption.

kube-scheduler calls preempt only if one of its own checks finds that a resource is short. It
searches for victims before it writes the condition that a pod is unschedulable. So if a pod has
this condition because of Headroom, was rejected by this replica recently and is not nominated yet,
kube-scheduler has found no victims for it. ``writer`` evicts victims for such pods.
"""

import time
from collections.abc import Callable, Sequence

import structlog

from extender.event_recorder import EventRecorder
from extender.metrics import Telemetry
from extender.preemption.writer import PreemptionWriter
from extender.requeue.hints import rejected_by_us
from headroom.bounded_dict import Bounded
from headroom.contract.event_reasons import EventReason
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.notices import Notice, pod_subject
from headroom.core.journal.decision_records import Preempted
from headroom.core.journal.journal import Journal, micros
from headroom.core.preemption.evictable_pods import may_preempt
from headroom.core.preemption.report import recorded, summary
from headroom.core.preemption.victim_search import preemption
from headroom.runtime.loops import Loops

log = structlog.get_logger()

EVERY_S = 1.0
#: Number of seconds that this controller waits after a rejection, so that kube-scheduler can act
#: first.
SETTLED_S = 0.5
#: Number of seconds before the next attempt for a pod without possible victims, or with victims
#: that cannot be evicted.
AGAIN_AFTER_S = 15.0
#: Maximum number of pods per round. Pods with the highest priority come first.
AT_ONCE = 4
#: Maximum number of pods whose last Event and last attempt are remembered.
REMEMBERED = 1024


class PreemptionController:
    """Evicts victims through ``writer``, which is None if this process must not evict pods.

    ``rejected`` returns the nodes that passed kube-scheduler's own filters in the pod's last filter
    call to this replica, and that Headroom rejected for reasons that evictions could resolve.
    """

    def __init__(
        self,
        cluster: Cluster,
        journal: Journal,
        telemetry: Telemetry,
        rejected: Callable[[str], Sequence[str]],
        writer: PreemptionWriter | None,
        event_recorder: EventRecorder,
        monotonic_s: Callable[[], float] = time.monotonic,
        wall_s: Callable[[], float] = time.time,
    ) -> None:
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        self._cluster = cluster
        self._journal = journal
        self._telemetry = telemetry
        self._rejected = rejected
        self._writer = writer
        self._event_recorder = event_recorder
        #: The earliest time of the next attempt for each pod, by uid, on the monotonic clock.
        self._not_before_s: Bounded[str, float] = Bounded(REMEMBERED)
        #: The decision that the last Event of each pod describes, by the pod's uid.
        self._recorded: Bounded[str, str] = Bounded(REMEMBERED)

    def start(self, loops: Loops, unready: Callable[[], str]) -> None:
        loops.start("preemption", self.once, EVERY_S, unready=unready)

    async def once(self) -> None:
        await self._record_nominations()
        if self._writer is None:
            return
        now_s = self._monotonic_s()
        for pod in self._waiting(now_s)[:AT_ONCE]:
            await self._preempt(self._writer, pod)

    def _waiting(self, now_s: float) -> list[Pod]:
        """Return the pods that may preempt others. Pods with the highest priority come first, and
        older pods before younger pods."""
        nominees = self._cluster.holds.nominees(now_s)
        held = {pod.metadata.uid for pods in nominees.values() for pod in pods}
        found: list[Pod] = []
        for pod in self._cluster.unbound():
            uid = pod.metadata.uid
            decision = self._journal.of_uid(uid)
            if (
                uid not in held
                and decision is not None
                and not decision.fits
                and abs(self._wall_s() - decision.at_s) > SETTLED_S
                and self._not_before_s.get(uid, now_s) <= now_s
                and may_preempt(pod)
                and not pod.metadata.deletion_timestamp
                and rejected_by_us(pod)
            ):
                found.append(pod)
        return sorted(found, key=lambda pod: (-pod.priority, pod.metadata.creation_timestamp or ""))

    async def _preempt(self, writer: PreemptionWriter, pod: Pod) -> None:
        uid, began_s = pod.metadata.uid, self._monotonic_s()
        self._not_before_s[uid] = began_s + AGAIN_AFTER_S
        found = preemption(
            self._cluster, pod, {}, self._rejected(uid), began_s, without_violations=True
        )
        best = found.best
        if best is None or best.leaving_anyway:
            return  # no eviction helps, or the pod will fit soon without one
        took_us = micros(self._monotonic_s() - began_s)
        part = recorded(found, self._wall_s(), took_us, 0, 1, "controller")
        decision = self._journal.of_uid(uid)
        self._journal.note(decision.pod if decision else pod, part, part.at_s)
        made = await writer.preempt(pod, best.node, best.pods)
        log.info(
            "pods_preempted" if made.begun else "preemption_not_begun",
            pod_uid=uid,
            node=best.node,
            victims=list(best.uids),
            evicted=[victim.metadata.uid for victim in made.evicted],
            message=made.rejected,
        )
        if made.begun:
            self._telemetry.preemptions.labels("controller").inc()
            await self._record(pod, part)
        outcomes = self._telemetry.evictions
        outcomes.labels("evicted").inc(len(made.evicted))
        if made.rejected:
            outcomes.labels("rejected").inc()

    async def _record_nominations(self) -> None:
        """Write an Event about each preemption by kube-scheduler after it has nominated a node."""
        for pods in self._cluster.holds.nominees(self._monotonic_s()).values():
            for pod in pods:
                uid = pod.metadata.uid
                decided = self._journal.preempted_for(uid)
                if decided is None or not (pod.status and pod.status.nominated_node_name):
                    continue
                decision_id, part = decided
                if (
                    part.node == pod.status.nominated_node_name
                    and self._recorded.get(uid) != decision_id
                ):
                    await self._record(pod, part)

    async def _record(self, pod: Pod, part: Preempted) -> None:
        uid = pod.metadata.uid
        decided = self._journal.preempted_for(uid)
        decision_id = decided[0] if decided else ""
        notices = [
            Notice(
                pod_subject(pod),
                EventReason.OTHERS_LEAVE_GPU,
                summary(part),
                decision_id,
                decision_id=decision_id,
            )
        ]
        for victim in part.victims:
            leaves = self._cluster.pod(victim.uid)
            if leaves is not None:
                # As in kube-scheduler's Event, name only the pod's uid, because the reader may not
                # be allowed to read that pod.
                message = (
                    f"Preempted on node {part.node} by pod {uid}, which has a higher priority and "
                    "needs the memory of this pod's GPU."
                )
                notices.append(
                    Notice(
                        pod_subject(leaves),
                        EventReason.LEAVES_FOR_GPU_MEMORY,
                        message,
                        decision_id,
                        decision_id=decision_id,
                    )
                )
        for notice in notices:
            await self._event_recorder.write(notice)
        self._recorded[uid] = decision_id
