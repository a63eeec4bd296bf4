"""Evicts the victims of a preemption after writing the attempt to the preempting pod.

    read the pod -> dry-run the eviction of each victim -> write the attempt on the pod
                 -> evict the victims, the least important first

The attempt is written by compare-and-swap on the pod before any eviction. So only one replica
continues, and from then on all replicas hold the memory for the pod. Before each eviction the pod
is read again. It must still wait and have the same attempt. If the API server, which evaluates
disruption budgets, rejects one of the dry runs, no victim is evicted. After a later error, the next
attempt evicts the remaining victims.

Nothing is written into the pod's status. If another component nominates a node, kube-scheduler
clears the nomination when its next attempt fails, and newer versions retry a pod after each such
write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from extender.eviction.evicting import Result, Victim, evict
from extender.ledger.store import Evictor, Store
from headroom.contract.annotations import PREEMPTING
from headroom.contract.kube import Pod
from headroom.contract.preemption import Attempt, attempt_of, encode_attempt
from headroom.errors import StoreConflict, StoreError, StoreNotFound


@dataclass(frozen=True, slots=True)
class PreemptionResult:
    """The result of an attempt. ``evicted`` contains the victims whose eviction was accepted."""

    begun: bool = False
    evicted: tuple[Pod, ...] = ()
    #: The reason why the attempt failed completely or in part. Empty if it succeeded, or if another
    #: replica was faster.
    rejected: str = ""


class PreemptionWriter:
    """Evicts victims for a pod. ``wall_s`` returns the time in Unix seconds."""

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

        The victims must still exist, and only the fields that kube-scheduler writes may have
        changed in the pod.
        """
        metadata = seen.metadata
        try:
            pod = await self._store.read_pod(metadata.namespace, metadata.name)
            if pod is None or not _still_waits(pod, seen):
                return PreemptionResult()
            there = [await self._read(victim, node) for victim in victims]
            if any(each is None for each in there):
                return PreemptionResult(rejected="a victim has changed or no longer exists")
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
                why = f"{_name(pod)} no longer waits for its victims"
                return PreemptionResult(True, tuple(evicted), why)
            if made.result is Result.CHANGED:
                return PreemptionResult(True, tuple(evicted), f"{_name(victim)} has changed")
            if made.result is Result.REJECTED:
                return PreemptionResult(True, tuple(evicted), made.message)
            if made.result is Result.EVICTED:
                evicted.append(victim)
        return PreemptionResult(True, tuple(evicted))

    async def _is_required(self, waiting: Pod, attempt: Attempt) -> bool:
        """Return whether the pod still waits for the victims of this attempt, which is recorded on
        the pod."""
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
    """Return the node that kube-scheduler has nominated for the pod, or an empty string if there is
    none."""
    return (pod.status.nominated_node_name if pod.status else "") or ""


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
