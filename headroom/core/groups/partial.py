"""Finds groups that are bound only in part, and decides which groups to evict."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headroom.contract.kube import Pod
from headroom.core.groups.membership import Group, named_group_of


class Cluster(Protocol):
    """The part of the cluster's state that the decisions read."""

    def pods(self) -> list[Pod]: ...

    def unbound(self) -> list[Pod]: ...


@dataclass(frozen=True, slots=True)
class Members:
    """A group as the API server shows it."""

    #: Minimum number of pods with which the group can work, or None if no object contains it.
    minimum: int | None
    #: All pods of the group, including pods that need no GPU.
    pods: Sequence[Pod]

    @property
    def present(self) -> int:
        """The number of pods that are bound, or have ended successfully."""
        return sum(bool(pod.node) and _phase(pod) != "Failed" for pod in self.pods)


def partly_bound(cluster: Cluster) -> dict[Group, list[Pod]]:
    """Return the bound pods of each group that also has waiting pods."""
    waiting = {group for each in cluster.unbound() if (group := named_group_of(each)) is not None}
    namespaces, found = {group.namespace for group in waiting}, dict[Group, list[Pod]]()
    for pod in cluster.pods() if waiting else ():
        if pod.metadata.namespace not in namespaces or pod.ended or not pod.node:
            continue
        group = named_group_of(pod)
        if group is not None and group in waiting:
            found.setdefault(group, []).append(pod)
    return found


def pods_to_evict(group: Members) -> Sequence[Pod] | str:
    """Return the bound pods of a group if they cannot work without the waiting pods.

    If they must not be evicted, return the reason as a sentence. A pod that is being deleted still
    counts as bound, because the pod that replaces it can be bound only when its memory is free.
    """
    if group.minimum is None:
        return "no PodGroup states how many pods it needs"
    if group.present >= group.minimum:
        return "it has as many pods as it needs"
    if not any(map(_waits, group.pods)):
        return "none of its pods waits for a node"
    bound = [pod for pod in group.pods if pod.node and not pod.ended]
    if any(pod.metadata.controller is None for pod in bound):
        return "a pod has no controller that would replace it"
    return bound


def _waits(pod: Pod) -> bool:
    gated = bool(pod.spec.scheduling_gates)
    return not (pod.node or pod.ended or gated or _is_deleted(pod))


def _is_deleted(pod: Pod) -> bool:
    return bool(pod.metadata.deletion_timestamp)


def _phase(pod: Pod) -> str:
    return (pod.status.phase if pod.status else "") or ""
