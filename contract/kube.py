"""The few fields of Kubernetes' own objects that we read, decoded straight into them.

Absent and null mean the same on this wire, so every field has a default and lists may be null.
Unknown fields are passed over without being built.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec


class KubeStruct(
    msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True, gc=False
):
    """Base of everything decoded from Kubernetes: trees, in which no collector finds a cycle."""


class OwnerReference(KubeStruct, frozen=True):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None


class ObjectMeta(KubeStruct, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: Mapping[str, str] | None = None
    #: Not of Kubernetes: bytes of annotations that were left out because nothing reads them.
    foreign_annotation_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    labels: Mapping[str, str] | None = None
    owner_references: list[OwnerReference] | None = None
    finalizers: list[str] | None = None
    deletion_timestamp: str | None = None
    creation_timestamp: str | None = None


class ResourceRequirements(KubeStruct, frozen=True):
    #: Resource name -> quantity. Of an extended resource, limits equal requests.
    limits: Mapping[str, str | int] | None = None
    requests: Mapping[str, str | int] | None = None


class Present(KubeStruct, frozen=True):
    """An object of which only matters that it is there."""


class FieldRef(KubeStruct, frozen=True):
    field_path: str = ""


class EnvVarSource(KubeStruct, frozen=True):
    """Where a value comes from; of other places than the pod itself only that it does."""

    field_ref: FieldRef | None = None


class EnvVar(KubeStruct, frozen=True):
    name: str = ""
    value: str | None = None
    value_from: EnvVarSource | None = None


class EnvFromSource(KubeStruct, frozen=True):
    """A ConfigMap or a Secret, all of it."""

    prefix: str = ""


class ContainerPort(KubeStruct, frozen=True):
    host_port: int | None = None


class Container(KubeStruct, frozen=True):
    name: str = ""
    ports: list[ContainerPort] | None = None
    env: list[EnvVar] | None = None
    env_from: list[EnvFromSource] | None = None
    resources: ResourceRequirements | None = None
    #: "Always" on an init container makes it a native sidecar.
    restart_policy: str | None = None


class VolumeMount(KubeStruct, frozen=True):
    mount_path: str = ""


class InitContainer(Container, frozen=True):
    """With what it runs, which is read of one init container only: the gate (contract.gate)."""

    image: str = ""
    command: list[str] | None = None
    args: list[str] | None = None
    working_dir: str | None = None
    volume_mounts: list[VolumeMount] | None = None
    volume_devices: list[Present] | None = None


class Toleration(KubeStruct, frozen=True):
    key: str = ""
    operator: str = ""
    value: str = ""
    effect: str = ""


class NodeSelectorRequirement(KubeStruct, frozen=True):
    key: str = ""
    operator: str = ""
    values: list[str] | None = None


class NodeSelectorTerm(KubeStruct, frozen=True):
    match_expressions: list[NodeSelectorRequirement] | None = None
    match_fields: list[NodeSelectorRequirement] | None = None


class NodeSelector(KubeStruct, frozen=True):
    node_selector_terms: list[NodeSelectorTerm] | None = None


class NodeAffinity(KubeStruct, frozen=True):
    required_during_scheduling_ignored_during_execution: NodeSelector | None = None
    preferred_during_scheduling_ignored_during_execution: list[Present] | None = None


class LabelSelector(KubeStruct, frozen=True):
    match_labels: Mapping[str, str] | None = None
    match_expressions: list[NodeSelectorRequirement] | None = None


class PodAffinityTerm(KubeStruct, frozen=True):
    """Which pods it is about; neither given: those of the same namespace as the pod's that says
    it."""

    label_selector: LabelSelector | None = None
    namespaces: list[str] | None = None
    namespace_selector: Present | None = None


class WeightedPodAffinityTerm(KubeStruct, frozen=True):
    pod_affinity_term: PodAffinityTerm = PodAffinityTerm()


class PodAffinity(KubeStruct, frozen=True):
    """Of affinity and anti-affinity alike."""

    required_during_scheduling_ignored_during_execution: list[PodAffinityTerm] | None = None
    preferred_during_scheduling_ignored_during_execution: list[WeightedPodAffinityTerm] | None = (
        None
    )


class Affinity(KubeStruct, frozen=True):
    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class Volume(KubeStruct, frozen=True):
    """Of the volumes that a node must be able to attach only that they are."""

    persistent_volume_claim: Present | None = None
    ephemeral: Present | None = None


class SchedulingGate(KubeStruct, frozen=True):
    """While a pod has any, no scheduler tries it."""

    name: str = ""


class PodSpec(KubeStruct, frozen=True):
    containers: list[Container] | None = None
    init_containers: list[InitContainer] | None = None
    node_name: str | None = None
    priority: int | None = None
    #: "Never": it waits, and nobody leaves for it.
    preemption_policy: str | None = None
    scheduler_name: str | None = None
    scheduling_gates: list[SchedulingGate] | None = None
    node_selector: Mapping[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: list[Toleration] | None = None
    topology_spread_constraints: list[Present] | None = None
    volumes: list[Volume] | None = None
    resource_claims: list[Present] | None = None
    overhead: Mapping[str, str | int] | None = None


class PodCondition(KubeStruct, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class Terminated(KubeStruct, frozen=True):
    exit_code: int = 0


class ContainerState(KubeStruct, frozen=True):
    running: Present | None = None
    terminated: Terminated | None = None


class ContainerStatus(KubeStruct, frozen=True):
    name: str = ""
    state: ContainerState | None = None


class PodStatus(KubeStruct, frozen=True):
    phase: str | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    conditions: list[PodCondition] | None = None
    #: When its kubelet took it.
    start_time: str | None = None
    #: The node on which others leave for it.
    nominated_node_name: str | None = None


class Pod(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: PodSpec = PodSpec()
    status: PodStatus | None = None
    #: Not of Kubernetes: its size as JSON, where that is beyond ``contract.pod_limits``.
    json_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def ended(self) -> bool:
        """Whether its containers have been seen to end for good.

        The phase alone is no proof: the garbage collector calls pods of a lost node Failed, while
        their containers may run there still. A kubelet waits for them.
        """
        status = self.status
        if status is None or status.phase not in ("Succeeded", "Failed"):
            return False
        statuses = (status.container_statuses or []) + (status.init_container_statuses or [])
        return not any(one.state and one.state.running for one in statuses)

    @property
    def node(self) -> str:
        """The node it is bound to; empty while it is not."""
        return self.spec.node_name or ""

    def annotation(self, key: str) -> str | None:
        return (self.metadata.annotations or {}).get(key)


class Taint(KubeStruct, frozen=True):
    key: str = ""
    value: str = ""
    effect: str = ""


class NodeSpec(KubeStruct, frozen=True):
    unschedulable: bool | None = None
    taints: list[Taint] | None = None


class NodeStatus(KubeStruct, frozen=True):
    allocatable: Mapping[str, str | int] | None = None


class Node(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: NodeSpec | None = None
    status: NodeStatus | None = None


class Namespace(KubeStruct, frozen=True):
    metadata: ObjectMeta


class ResourcePool(KubeStruct, frozen=True):
    name: str = ""


class ResourceSliceSpec(KubeStruct, frozen=True):
    """The same fields in v1, v1beta2 and v1beta1 of resource.k8s.io."""

    driver: str = ""
    node_name: str | None = None
    pool: ResourcePool = ResourcePool()
    devices: list[Present] | None = None


class ResourceSlice(KubeStruct, frozen=True):
    """Devices that a DRA driver offers, of one node as a rule."""

    metadata: ObjectMeta
    spec: ResourceSliceSpec = ResourceSliceSpec()


class DisruptionBudgetSpec(KubeStruct, frozen=True):
    selector: LabelSelector | None = None


class DisruptionBudgetStatus(KubeStruct, frozen=True):
    disruptions_allowed: int = 0
    #: By name: pods whose eviction has been counted already.
    disrupted_pods: Mapping[str, Any] | None = None


class PodDisruptionBudget(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: DisruptionBudgetSpec = DisruptionBudgetSpec()
    status: DisruptionBudgetStatus = DisruptionBudgetStatus()


class Lease(KubeStruct, frozen=True):
    metadata: ObjectMeta
