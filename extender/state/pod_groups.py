"""Groups of pods that kube-scheduler binds together, after it has chosen a node for each pod."""

from contract.kube import Pod

#: Label with the name of a pod's group, for the Coscheduling plugin.
POD_GROUP = "scheduling.x-k8s.io/pod-group"


def group_of(pod: Pod) -> tuple[str, str] | None:
    """Return the namespace and the name of the pod's group; None if it has none."""
    name = (pod.metadata.labels or {}).get(POD_GROUP)
    return (pod.metadata.namespace, name) if name else None
