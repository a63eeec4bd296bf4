"""Makes room for a pod that only GPU memory keeps from a node, by evicting pods.

    read the pod -> dry-run the eviction of each victim -> write the attempt on the pod
                 -> evict the victims, the least important first

The attempt is written by compare-and-swap on the pod, before any eviction. So only one replica
continues, and from then on all replicas hold the memory for the pod. If the API server, which
evaluates disruption budgets, rejects one of the dry runs, no victim is evicted. An error after that
costs at most the hold: victims that have left count as gone in the next attempt.

Nothing is written into the pod's status. kube-scheduler clears a nomination that it did not make
when its next attempt fails, and newer versions retry a pod after each such write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contract.annotations import PREEMPTING
from contract.kube import Pod
from contract.preemption import Attempt, attempt_of, encode_attempt
from extender.errors import StoreConflict, StoreError, StoreNotFound
from extender.ledger.store import Store


class VictimEvictor(Protocol):
    """The calls about victims; both raise store errors if the API server rejects the eviction."""

    async def may_evict(self, pod: Pod) -> None:
        """Dry-run the eviction of the pod; nothing is changed."""

    async def evict(self, pod: Pod) -> None:
        """Evict the pod if it is still the version that was read."""


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
        evictors: VictimEvictor,
        wall_s: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._store = store
        self._evictors = evictors
        self._wall_s = wall_s
        self._new_id = new_id

    async def make_room(self, seen: Pod, node: str, victims: Sequence[Pod]) -> PreemptionResult:
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
                await self._evictors.may_evict(victim)
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
            try:
                await self._evictors.evict(victim)
            except (StoreConflict, StoreNotFound):
                # It changed since it was read: try again with the newer version.
                if not await self._again(victim, node):
                    return PreemptionResult(True, tuple(evicted), f"{_name(victim)} has changed")
            except StoreError as err:
                return PreemptionResult(True, tuple(evicted), str(err))
            evicted.append(victim)
        return PreemptionResult(True, tuple(evicted))

    async def _read(self, victim: Pod, node: str) -> Pod | None:
        pod = await self._store.read_pod(victim.metadata.namespace, victim.metadata.name)
        same = pod is not None and pod.metadata.uid == victim.metadata.uid and pod.node == node
        return pod if same else None

    async def _again(self, victim: Pod, node: str) -> bool:
        try:
            pod = await self._read(victim, node)
            if pod is not None:
                await self._evictors.evict(pod)
        except StoreError:
            return False
        return True  # deleted, or evicted


def _still_waits(pod: Pod, seen: Pod) -> bool:
    before, now = attempt_of(seen), attempt_of(pod)
    return (
        pod.metadata.uid == seen.metadata.uid
        and not pod.node
        and not pod.ended
        and not pod.metadata.deletion_timestamp
        and not (pod.status and pod.status.nominated_node_name)
        and before == now
    )


def _name(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"
