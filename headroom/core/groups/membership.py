"""Groups of pods that a scheduler binds together, after it has chosen a node for each pod."""

from enum import StrEnum
from typing import NamedTuple

from headroom.contract.kube import Pod

#: Label with the name of a pod's group, for the Coscheduling plugin.
POD_GROUP = "scheduling.x-k8s.io/pod-group"
#: Label with the name of a group that Kueue admits as one workload.
KUEUE_GROUP = "kueue.x-k8s.io/pod-group-name"


class GroupKind(StrEnum):
    """The component that defines the group."""

    KUBERNETES = "kubernetes"
    KUBERNETES_1_35 = "kubernetes-1.35"
    COSCHEDULING = "coscheduling"
    KUEUE = "kueue"


class Group(NamedTuple):
    """A group of pods of one namespace."""

    kind: GroupKind
    namespace: str
    name: str


def group_of(pod: Pod) -> Group | None:
    """Return the pod's group, whose pods are bound together, or None if it has no group.

    The group of kube-scheduler's own Workload API takes precedence: ``spec.schedulingGroup``, and
    in Kubernetes 1.35 ``spec.workloadRef``. Like the Coscheduling plugin, kube-scheduler 1.35 tries
    the pods of a group one by one, and lets them wait until the last pod has a node.
    """
    spec, namespace = pod.spec, pod.metadata.namespace
    if spec.scheduling_group is not None and (name := spec.scheduling_group.pod_group_name):
        return Group(GroupKind.KUBERNETES, namespace, name)
    if (ref := spec.workload_ref) is not None:
        parts = ref.name, ref.pod_group, ref.pod_group_replica_key
        return Group(GroupKind.KUBERNETES_1_35, namespace, "/".join(filter(None, parts)))
    if name := (pod.metadata.labels or {}).get(POD_GROUP):
        return Group(GroupKind.COSCHEDULING, namespace, name)
    return None


def named_group_of(pod: Pod) -> Group | None:
    """Return the group that a user sees: the result of ``group_of``, or otherwise a group of Kueue.

    Kueue admits the pods of a group together, and then kube-scheduler binds them one by one.
    """
    if (group := group_of(pod)) is not None:
        return group
    name = (pod.metadata.labels or {}).get(KUEUE_GROUP)
    return Group(GroupKind.KUEUE, pod.metadata.namespace, name) if name else None
