"""Evicts the bound pods of a group together if the group cannot work without its other pods.

kube-scheduler calls the binds of a group at the same time. If an extender is killed or the API
server is too slow, only a part of the group may be bound. This part holds memory that it cannot
use, while kube-scheduler tries the other pods again. If the group still lacks pods
``evict_partial_groups_after_s`` after its last pod was bound or has reserved memory, its bound pods
are evicted, and their controllers create them again.

All replicas check the groups, without leader election. Before a replica evicts a group, it decides
again with the state of the API server. Each eviction is conditional on the pod's resourceVersion,
so if two replicas evict the same group, each pod is evicted only once. Before that, the evictions
of all pods are tried as a dry run. If the API server rejects one of them, for example because of a
disruption budget, no pod is evicted.

One group is evicted at a time: the group with the lowest priority, or the youngest of several such
groups. After that, the waiting time of the other groups starts again, because the memory that
becomes free may allow the rest of their pods to be bound.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import structlog

from extender.event_recorder import EventRecorder
from extender.eviction.evicting import Result, Victim, evict
from extender.ledger.store import Evictor, Store
from extender.metrics import Telemetry
from headroom.contract.event_reasons import EventReason
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.notices import pod_notice
from headroom.core.groups.membership import Group, named_group_of
from headroom.core.groups.partial import Members, partly_bound, pods_to_evict
from headroom.errors import StoreError
from headroom.runtime.loops import Loops

log = structlog.get_logger()

EVERY_S = 5.0


class GroupReader(Protocol):
    async def read(self, group: Group) -> Members:
        """Read the group from the API server. Raises store errors."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """The pods of a group that are bound or being bound, and the time when the last of them was
    added."""

    pods: frozenset[str]
    since_s: float


class PartialGroupsController:
    def __init__(
        self,
        cluster: Cluster,
        store: Store,
        groups: GroupReader,
        evictor: Evictor,
        telemetry: Telemetry,
        event_recorder: EventRecorder,
        monotonic_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cluster = cluster
        self._store = store
        self._groups = groups
        self._evictor = evictor
        self._telemetry = telemetry
        self._event_recorder = event_recorder
        self._monotonic_s = monotonic_s
        self._seen: dict[Group, _Seen] = {}

    def start(
        self, loops: Loops, unready: Callable[[], str], after_s: Callable[[], float | None]
    ) -> None:
        """Start the loop. ``after_s`` returns the setting evict_partial_groups_after_s."""
        loops.start("partial groups", lambda: self.once(after_s()), EVERY_S, unready=unready)

    async def once(self, after_s: float | None) -> None:
        """Evict one group that has been bound only in part for ``after_s`` seconds. With None,
        evict no group."""
        bound = partly_bound(self._cluster) if after_s is not None else {}
        now_s, being_bound = self._monotonic_s(), self._being_bound(bound)
        self._seen = {
            group: self._see(group, {*being_bound[group], *uids(pods)}, now_s)
            for group, pods in bound.items()
        }
        due = [
            group
            for group, seen in self._seen.items()
            if after_s is not None and now_s - seen.since_s >= after_s
        ]
        due.sort(key=lambda group: min(map(_created, bound[group])), reverse=True)
        due.sort(key=lambda group: max(pod.priority for pod in bound[group]))
        for group in due:
            self._restart(group)
            if await self._evict(group):
                for other in self._seen:
                    self._restart(other)
                return

    def _being_bound(self, groups: dict[Group, list[Pod]]) -> dict[Group, set[str]]:
        """Return the unbound pods of these groups for which any replica has reserved memory."""
        found: dict[Group, set[str]] = {group: set() for group in groups}
        for pod in self._cluster.unbound() if groups else ():
            group, uid = named_group_of(pod), pod.metadata.uid
            if group in found and group and self._cluster.unfinished_binds.nodes_of(uid):
                found[group].add(uid)
        return found

    def _see(self, group: Group, now: set[str], now_s: float) -> _Seen:
        before = self._seen.get(group)
        was_added = before is None or not now <= before.pods
        return _Seen(frozenset(now), now_s if before is None or was_added else before.since_s)

    def _restart(self, group: Group) -> None:
        self._seen[group] = _Seen(self._seen[group].pods, self._monotonic_s())

    async def _evict(self, group: Group) -> bool:
        """Evict all bound pods of the group, or none. Return whether any pod was evicted."""
        about = {"namespace": group.namespace, "group": group.name}
        try:
            members = await self._groups.read(group)
            victims = pods_to_evict(members)
            if isinstance(victims, str):
                log.info("group_not_evicted", **about, reason=victims)
                return False
            for pod in victims:
                await self._evictor.may_evict(pod)
            # The dry runs took time. In the meantime, a pod of the group may have been bound or
            # changed.
            again = pods_to_evict(await self._groups.read(group))
            if isinstance(again, str) or uids(again) != uids(victims):
                return False
        except StoreError as err:
            self._telemetry.evictions.labels("rejected").inc()
            log.warning("group_not_evicted", **about, reason=str(err))
            return False
        message = (
            f"Only {members.present} of the {members.minimum} pods that group {group.name} needs "
            "are bound, and the others do not get a node. The bound pods were evicted together, "
            "because they held GPU memory that they could not use."
        )
        evicted = [pod for pod in victims if await self._evict_one(pod, message)]
        log.warning("group_evicted", **about, bound=members.present, minimum=members.minimum)
        return bool(evicted)

    async def _evict_one(self, pod: Pod, message: str) -> bool:
        metadata = pod.metadata

        async def is_required() -> bool:
            return True  # after the first eviction, the other pods cannot work

        victim = Victim(metadata.namespace, metadata.name, metadata.uid, pod.node)
        try:
            made = await evict(self._store, self._evictor, victim, is_required)
        except StoreError as err:
            log.warning("eviction_failed", pod_uid=metadata.uid, message=str(err))
            return False
        if made.result is Result.REJECTED:
            self._telemetry.evictions.labels("rejected").inc()
            log.warning("eviction_rejected", pod_uid=metadata.uid, message=made.message)
        if made.result is not Result.EVICTED:
            return False
        self._telemetry.evictions.labels("evicted").inc()
        log.warning("pod_evicted", node=pod.node, pod_uid=metadata.uid, reason=message)
        await self._event_recorder.write(
            pod_notice(pod, EventReason.EVICTED_WITH_GROUP, message, key="")
        )
        return True


def uids(pods: Sequence[Pod]) -> set[str]:
    return {pod.metadata.uid for pod in pods}


def _created(pod: Pod) -> tuple[str, str]:
    return pod.metadata.creation_timestamp or "", pod.metadata.uid
