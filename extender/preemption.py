"""Evicts pods for pods that lack only GPU memory, and writes Events about preemption.

kube-scheduler calls preempt only if it finds a resource missing itself. It looks for victims before
it writes that a pod is unschedulable. So a pod that has that condition because of Headroom, was
rejected here recently and has no nomination yet got no victims from kube-scheduler. The steps:

    read the pod -> dry-run the eviction of each victim -> write the attempt on the pod
                 -> evict the victims, the least important first

The attempt is written by compare-and-swap on the pod, before any eviction. So only one replica
continues, and from then on all replicas hold the memory for the pod. Before each eviction the pod
is read again: it must still wait, with this attempt. If the API server, which
evaluates disruption budgets, rejects one of the dry runs, no victim is evicted. After a later error
the next attempt continues: victims that have left count as gone.

Nothing is written into the pod's status. kube-scheduler clears a nomination that it did not make
when its next attempt fails, and newer versions retry a pod after each such write.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from extender.event_recorder import EventRecorder
from extender.eviction.evicting import Result, Victim, evict
from extender.ledger.store import Evictor, Store
from extender.metrics import Telemetry
from extender.requeue.hints import rejected_by_us
from headroom.bounded import Bounded
from headroom.contract.annotations import PREEMPTING
from headroom.contract.event_reasons import EventReason
from headroom.contract.kube import Pod
from headroom.contract.preemption import Attempt, attempt_of, encode_attempt
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.notices import Notice, pod_subject
from headroom.core.eviction.evictable_pods import may_preempt
from headroom.core.eviction.preemption_report import recorded, summary
from headroom.core.eviction.victim_search import preemption
from headroom.core.journal.decision_records import Preempted
from headroom.core.journal.journal import Journal, micros
from headroom.errors import StoreConflict, StoreError, StoreNotFound
from headroom.runtime.loops import Loops

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


@dataclass(frozen=True, slots=True)
class PreemptionResult:
    """The result of an attempt; ``evicted`` are the victims whose eviction was accepted."""

    begun: bool = False
    evicted: tuple[Pod, ...] = ()
    #: Why it failed, or failed in part; empty if all went well or another replica was faster.
    rejected: str = ""


class PreemptionWriter:
    """Evicts victims for a pod; ``wall_s`` returns the time in Unix seconds."""

    def __init__(
        self,
        store: Store,
        evictor: Evictor,
        wall_s: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._store = store
        self._evictor = evictor
        self._wall_s = wall_s
        self._new_id = new_id

    async def preempt(self, seen: Pod, node: str, victims: Sequence[Pod]) -> PreemptionResult:
        """Evict the victims from the node for the pod, if nothing has changed since ``seen``.

        The victims must still be there, and the pod may differ only in what kube-scheduler writes
        on it.
        """
        metadata = seen.metadata
        try:
            pod = await self._store.read_pod(metadata.namespace, metadata.name)
            if pod is None or not _still_waits(pod, seen):
                return PreemptionResult()
            there = [await self._read(victim, node) for victim in victims]
            if any(each is None for each in there):
                return PreemptionResult(rejected="a victim has changed or gone")
            leaving = [each for each in there if each and not each.metadata.deletion_timestamp]
            for victim in leaving:
                await self._evictor.may_evict(victim)
            attempt = Attempt(
                self._new_id(),
                node,
                int(self._wall_s()),
                tuple(victim.metadata.uid for victim in victims),
            )
            await self._store.touch_pod(pod, encode_attempt(attempt), PREEMPTING)
        except (StoreConflict, StoreNotFound):
            return PreemptionResult()  # changed or deleted, or another replica was faster
        except StoreError as err:
            return PreemptionResult(rejected=str(err))
        evicted: list[Pod] = []
        for victim in reversed(leaving):
            about = victim.metadata
            try:
                made = await evict(
                    self._store,
                    self._evictor,
                    Victim(about.namespace, about.name, about.uid, node),
                    lambda: self._is_required(pod, attempt),
                )
            except StoreError as err:
                return PreemptionResult(True, tuple(evicted), str(err))
            if made.result is Result.WITHDRAWN:
                why = f"{_name(pod)} does not wait for its victims any more"
                return PreemptionResult(True, tuple(evicted), why)
            if made.result is Result.CHANGED:
                return PreemptionResult(True, tuple(evicted), f"{_name(victim)} has changed")
            if made.result is Result.REJECTED:
                return PreemptionResult(True, tuple(evicted), made.message)
            if made.result is Result.EVICTED:
                evicted.append(victim)
        return PreemptionResult(True, tuple(evicted))

    async def _is_required(self, waiting: Pod, attempt: Attempt) -> bool:
        """Return whether the pod still waits for the victims of this attempt, which is on it."""
        pod = await self._store.read_pod(waiting.metadata.namespace, waiting.metadata.name)
        return (
            pod is not None
            and _waits(pod, waiting.metadata.uid)
            and _nominated(pod) in ("", attempt.node)
            and attempt_of(pod) == attempt
        )

    async def _read(self, victim: Pod, node: str) -> Pod | None:
        pod = await self._store.read_pod(victim.metadata.namespace, victim.metadata.name)
        same = pod is not None and pod.metadata.uid == victim.metadata.uid and pod.node == node
        return pod if same else None


class PreemptionController:
    """Evicts victims through ``writer``; None if this process must not evict pods.

    ``rejected`` returns the nodes that passed kube-scheduler's filters in the pod's last filter
    call here, and that were rejected for reasons that evictions could remove.
    """

    def __init__(
        self,
        cluster: Cluster,
        journal: Journal,
        telemetry: Telemetry,
        rejected: Callable[[str], Sequence[str]],
        writer: PreemptionWriter | None,
        event_recorder: EventRecorder,
    ) -> None:
        self._cluster = cluster
        self._journal = journal
        self._telemetry = telemetry
        self._rejected = rejected
        self._writer = writer
        self._event_recorder = event_recorder
        #: Uid of a pod -> earliest time of its next attempt, on the monotonic clock.
        self._not_before_s: Bounded[str, float] = Bounded(REMEMBERED)
        #: Uid of a pod -> the decision that its last Event is about.
        self._recorded: Bounded[str, str] = Bounded(REMEMBERED)

    def start(self, loops: Loops, unready: Callable[[], str]) -> None:
        loops.start("preemption", self.once, EVERY_S, unready=unready)

    async def once(self) -> None:
        await self._record_nominations()
        if self._writer is None:
            return
        now_s = time.monotonic()
        for pod in self._waiting(now_s)[:AT_ONCE]:
            await self._preempt(self._writer, pod)

    def _waiting(self, now_s: float) -> list[Pod]:
        """Return the pods that may preempt others, the most important and oldest first."""
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
                and abs(time.time() - decision.at_s) > SETTLED_S
                and self._not_before_s.get(uid, now_s) <= now_s
                and may_preempt(pod)
                and not pod.metadata.deletion_timestamp
                and rejected_by_us(pod)
            ):
                found.append(pod)
        return sorted(found, key=lambda pod: (-pod.priority, pod.metadata.creation_timestamp or ""))

    async def _preempt(self, writer: PreemptionWriter, pod: Pod) -> None:
        uid, began_s = pod.metadata.uid, time.monotonic()
        self._not_before_s[uid] = began_s + AGAIN_AFTER_S
        found = preemption(
            self._cluster, pod, {}, self._rejected(uid), began_s, without_violations=True
        )
        best = found.best
        if best is None or best.leaving_anyway:
            return  # no eviction helps, or the pod fits soon anyway
        took_us = micros(time.monotonic() - began_s)
        part = recorded(found, time.time(), took_us, 0, 1, "controller")
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
        """Write Events about the preemptions of kube-scheduler, once it has nominated a node."""
        for pods in self._cluster.holds.nominees(time.monotonic()).values():
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
                # Only the pod's uid, as in kube-scheduler's Event: the reader may not be allowed to
                # read that pod.
                message = (
                    f"Leaves node {part.node} for pod {uid}, which has a higher priority and needs "
                    "the memory of its GPU."
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


def _still_waits(pod: Pod, seen: Pod) -> bool:
    return (
        _waits(pod, seen.metadata.uid)
        and not _nominated(pod)
        and attempt_of(seen) == attempt_of(pod)
    )


def _waits(pod: Pod, uid: str) -> bool:
    return (
        pod.metadata.uid == uid
        and not pod.node
        and not pod.ended
        and not pod.metadata.deletion_timestamp
    )


def _nominated(pod: Pod) -> str:
    """Return the node that kube-scheduler has nominated for the pod; empty for none."""
    return (pod.status.nominated_node_name if pod.status else "") or ""


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
