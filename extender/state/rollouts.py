"""Finds the pods that a rolling update ends only after the pods that replace them have started."""

from contract.kube import Pod
from extender.placement.fit import Verdicts
from extender.state.cluster_state import ClusterState
from extender.state.idle_pods import TEMPLATE_HASHES, owner_of

#: Controllers whose pods do not end by themselves, and are created again if they end.
_ENDLESS = frozenset(
    {"Deployment", "ReplicaSet", "ReplicationController", "StatefulSet", "DaemonSet", "Rollout"}
)
#: Labels that controllers give to all pods of one revision of the template.
_REVISIONS = (*TEMPLATE_HASHES, "controller-revision-hash")


def same_workload(pod: Pod, other: Pod | None) -> bool:
    """Return whether both pods have the same controller, whose pods do not end by themselves."""
    if other is None or pod.metadata.namespace != other.metadata.namespace:
        return False
    kind, name = owner_of(pod)
    return kind in _ENDLESS and (kind, name) == owner_of(other)


def replaced_pods(cluster: ClusterState, pod: Pod, verdicts: Verdicts) -> list[Pod]:
    """Return the pods of the pod's workload with another revision on nodes of the verdicts.

    They are sorted by name. Pods that are being deleted are left out.
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


def end_first(old: Pod) -> str:
    """Return the advice to end the old pod before the new one starts, without a period."""
    kind, name = owner_of(old)
    or_recreate = ", or strategy Recreate," if kind == "Deployment" else ""
    return (
        f"set maxSurge: 0 and maxUnavailable: 1{or_recreate} in {kind} {name}: its rolling update "
        f"ends the old pod on node {old.node} only when this pod is ready, and this pod fits there "
        "only without the old one"
    )


def _revision(pod: Pod) -> str:
    labels = pod.metadata.labels or {}
    return next((labels[key] for key in _REVISIONS if key in labels), "")
