"""Finds the pods that a rolling update ends only after the pods that replace them have started."""

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass
from itertools import islice

from headroom.console.facts import fixes
from headroom.contract.kube import Pod
from headroom.contract.owners import TEMPLATE_HASHES
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.idle_pods import owner_of
from headroom.core.placement.fit import Verdicts

#: Controllers whose pods run until they are deleted, and are then replaced.
_ENDLESS = frozenset(
    {"Deployment", "ReplicaSet", "ReplicationController", "StatefulSet", "DaemonSet", "Rollout"}
)
#: Labels by which controllers mark all pods of one revision of the template.
_REVISIONS = (*TEMPLATE_HASHES, "controller-revision-hash")


def same_workload(pod: Pod, other: Pod | None) -> bool:
    """Return whether both pods have the same controller, of a kind that keeps its pods running."""
    if other is None or pod.metadata.namespace != other.metadata.namespace:
        return False
    kind, name = owner_of(pod)
    return kind in _ENDLESS and (kind, name) == owner_of(other)


@dataclass(frozen=True, slots=True)
class Replaced:
    """Old pods on one node that the rollout could end before it starts the new pod."""

    node: str
    uids: Set[str]
    #: The advice to end the old pods first, as a sentence without a period.
    sentence: str
    #: The command that carries out the advice; empty if there is none.
    fix: str


def replaced(cluster: Cluster, pod: Pod, verdicts: Verdicts, most: int) -> Iterator[Replaced]:
    """Yield the old pods of the pod's workload: first one by one, then all old pods of each node
    together.

    Yields at most ``most`` results of each kind. Old pods can end together only if the workload is
    a Deployment, because only its strategy Recreate does that.
    """
    olds = _replaced_pods(cluster, pod, verdicts)
    for old in olds[:most]:
        uids = frozenset({old.metadata.uid})
        yield Replaced(old.node, uids, _end_first(old), fixes.end_old_pods_first(pod))
    if owner_of(pod)[0] != "Deployment":
        return
    of_node: dict[str, list[Pod]] = defaultdict(list)
    for old in olds:
        of_node[old.node].append(old)
    for node, together in islice(((n, p) for n, p in of_node.items() if len(p) > 1), most):
        uids = frozenset(old.metadata.uid for old in together)
        yield Replaced(node, uids, _end_all_first(together), fixes.end_all_old_pods_first(pod))


def _replaced_pods(cluster: Cluster, pod: Pod, verdicts: Verdicts) -> list[Pod]:
    """Return the pods of the same workload that have another revision and a node of the verdicts.

    They are sorted by name. Terminating pods are left out.
    """
    eligible = {verdicts.snap.nodes[row].name for row in verdicts.rows.tolist()}
    found = [
        other
        for other in cluster.pods()
        if other.node in eligible
        and same_workload(pod, other)
        and not other.ended
        and other.metadata.deletion_timestamp is None
        and _revision(other) != _revision(pod)
    ]
    return sorted(found, key=lambda each: each.metadata.name)


def _end_first(old: Pod) -> str:
    kind, name = owner_of(old)
    or_recreate = ", or strategy Recreate," if kind == "Deployment" else ""
    return (
        f"set maxSurge: 0 and maxUnavailable: 1{or_recreate} in {kind} {name}: its rolling update "
        f"ends the old pod on node {old.node} only when this pod is ready, and this pod fits there "
        "only without the old pod"
    )


def _end_all_first(olds: Sequence[Pod]) -> str:
    kind, name = owner_of(olds[0])
    return (
        f"set strategy Recreate in {kind} {name}: its rolling update ends the {len(olds)} old pods "
        f"on node {olds[0].node} only when this pod is ready, and this pod fits there only without "
        "them"
    )


def _revision(pod: Pod) -> str:
    labels = pod.metadata.labels or {}
    return next((labels[key] for key in _REVISIONS if key in labels), "")
