"""How we make room ourselves for a pod that only GPU memory keeps from a node.

    read the pod -> ask of each victim whether it may be evicted -> write the attempt on the pod
                 -> evict them, the least important first

The attempt is written by compare-and-swap on the pod, and before anybody is evicted: of any number
of replicas one alone goes on, and from then on the place is held for the pod on all of them. Nobody
is evicted while one of the victims may not be: that is asked of the API server, which keeps the
disruption budgets, without doing anything yet. What goes wrong after that costs at most the hold:
those who have left already count as gone the next time.

Nothing is written into the pod's status: kube-scheduler takes a nomination back that it did not
make as soon as it tries the pod in vain, and newer ones try a pod again for each such write.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from contract.annotations import PREEMPTING
from contract.kube import Pod
from contract.preemption import Attempt, attempt_of, encode_attempt
from extender.errors import StoreConflict, StoreError, StoreNotFound
from extender.ledger.store import Store


class Evictors(Protocol):
    """What is done to victims; both raise store errors where it is refused."""

    async def may_evict(self, pod: Pod) -> None:
        """Have the API server say whether the pod could be evicted now; nothing is done."""

    async def evict(self, pod: Pod) -> None:
        """Have the pod ended, if it still is the one that was read."""


@dataclass(frozen=True, slots=True)
class Made:
    """What came of an attempt; ``evicted`` are the victims whose eviction was accepted."""

    begun: bool = False
    evicted: tuple[Pod, ...] = ()
    #: Why not, or not all; empty where all went well or another replica was faster.
    rejected: str = ""


class RoomMaker:
    """``wall_s`` is the time in Unix seconds."""

    def __init__(
        self,
        store: Store,
        evictors: Evictors,
        wall_s: Callable[[], float],
        new_id: Callable[[], str],
    ) -> None:
        self._store = store
        self._evictors = evictors
        self._wall_s = wall_s
        self._new_id = new_id

    async def make_room(self, seen: Pod, node: str, victims: Sequence[Pod]) -> Made:
        """Evict the victims from the node for the pod, if nothing has changed since ``seen``:
        neither the pod, but for what kube-scheduler says of it, nor that they are there."""
        metadata = seen.metadata
        try:
            pod = await self._store.read_pod(metadata.namespace, metadata.name)
            if pod is None or not _still_waits(pod, seen):
                return Made()
            there = [await self._read(victim, node) for victim in victims]
            if any(each is None for each in there):
                return Made(rejected="a victim has changed or gone")
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
            return Made()  # it changed or went, or another replica was faster
        except StoreError as err:
            return Made(rejected=str(err))
        evicted: list[Pod] = []
        for victim in reversed(leaving):
            try:
                await self._evictors.evict(victim)
            except (StoreConflict, StoreNotFound):
                # It changed in a moment: as it is now it may be evicted as well.
                if not await self._again(victim, node):
                    return Made(True, tuple(evicted), f"{_name(victim)} has changed")
            except StoreError as err:
                return Made(True, tuple(evicted), str(err))
            evicted.append(victim)
        return Made(True, tuple(evicted))

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
        return True  # it is gone, or going


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
