"""Derives the single changes from a complete list of one kind."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from contract.gpunode import GPUNode
from contract.kube import Lease, Namespace, Node, Pod, PodDisruptionBudget, ResourceSlice
from extender.state.changes import (
    BudgetGone,
    BudgetSeen,
    Event,
    GPUNodeGone,
    GPUNodeSeen,
    HeartbeatGone,
    HeartbeatSeen,
    Listed,
    NamespaceGone,
    NamespaceSeen,
    NodeGone,
    NodeSeen,
    PodGone,
    PodSeen,
    Relisted,
    SliceGone,
    SliceSeen,
)
from extender.state.disruption_budgets import key

#: The uid of a pod, namespace and name of a PodDisruptionBudget, else the name.
Key = str | tuple[str, str]

_GONE: Mapping[type, Callable[[str], Event]] = {
    Node: NodeGone,
    Namespace: NamespaceGone,
    GPUNode: GPUNodeGone,
    Lease: HeartbeatGone,
    ResourceSlice: SliceGone,
}


def changes_of(event: Relisted, known: Iterable[Key]) -> Iterator[Event | None]:
    """Yield the deletions of ``known`` objects that are not in the list, then the listed objects.
    Yield None after each step without a change, so that the caller can interrupt long lists."""
    listed: set[Key] = set()
    for o in event.objects:
        listed.add(_key(o))
        yield None
    for each in known:
        yield _gone(event.kind, each) if each not in listed else None
    for o in event.objects:
        yield _seen(o, event.at_s)


def _key(o: Listed) -> Key:
    if isinstance(o, PodDisruptionBudget):
        return key(o)
    return o.metadata.uid if isinstance(o, Pod) else o.metadata.name


def _gone(kind: type, each: Key) -> Event:
    if isinstance(each, tuple):
        return BudgetGone(*each)
    if kind is Pod:
        # The last version held may not be the last one that existed, as the watch was down.
        return PodGone(each, is_last=False)
    return _GONE[kind](each)


def _seen(o: Listed, at_s: float) -> Event:
    match o:
        case Pod():
            return PodSeen(o)
        case Node():
            return NodeSeen(o)
        case Namespace():
            return NamespaceSeen(o)
        case GPUNode():
            return GPUNodeSeen(o, at_s)
        case Lease():
            return HeartbeatSeen(o, at_s)
        case ResourceSlice():
            return SliceSeen(o)
        case PodDisruptionBudget():
            return BudgetSeen(o)
