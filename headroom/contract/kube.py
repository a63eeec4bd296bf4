"""The fields of Kubernetes' own objects that Headroom reads.

Absent and null mean the same in the API, so every field except the metadata of a top-level object
has a default, and lists may be null. The decoder skips unknown fields without building objects.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

#: Integers are limited to 64 bits, because pods are encoded again.
Int64 = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Quantity = str | Int64


class KubeStruct(
    msgspec.Struct, frozen=True, rename="camel", kw_only=True, omit_defaults=True, gc=False
):
    """Base of all decoded objects. They are trees without cycles, so the garbage collector can skip
    them."""


#: Maximum length of an object's name.
MAX_NAME = 253
_SUBDOMAIN = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_KIND = re.compile(r"[A-Za-z][A-Za-z0-9]{0,62}")
_API_VERSION = re.compile(r"(([-a-z0-9.]{1,253}/)?[-a-z0-9]{1,63})?")


class OwnerReference(KubeStruct, frozen=True):
    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool | None = None

    @property
    def can_exist(self) -> bool:
        """Return whether an object can have this kind, name and API version."""
        return (
            _KIND.fullmatch(self.kind) is not None
            and _SUBDOMAIN.fullmatch(self.name) is not None
            and len(self.name) <= MAX_NAME
            and _API_VERSION.fullmatch(self.api_version) is not None
        )


class ObjectMeta(KubeStruct, frozen=True):
    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    annotations: Mapping[str, str] | None = None
    #: Size in bytes of the annotations that this process has dropped because Headroom does not read
    #: them. This is not a Kubernetes field.
    foreign_annotation_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0
    #: Number of the dropped annotations, which is not a Kubernetes field either.
    foreign_annotations: Annotated[int, msgspec.Meta(ge=0)] = 0
    labels: Mapping[str, str] | None = None
    owner_references: list[OwnerReference] | None = None
    finalizers: list[str] | None = None
    deletion_timestamp: str | None = None
    #: Seconds from the deletion to the end of the grace period.
    deletion_grace_period_seconds: Int64 | None = None
    creation_timestamp: str | None = None

    @property
    def controller(self) -> OwnerReference | None:
        """Return the owner reference of the controller, or None if there is none.

        The API server accepts any text in an owner reference. So a reference is ignored if no
        object can have its kind and name.
        """
        owners = self.owner_references or ()
        found = next((owner for owner in owners if owner.controller), None)
        return found if found is not None and found.can_exist else None


class ResourceRequirements(KubeStruct, frozen=True):
    #: Quantity of each resource. For extended resources, limits equal requests.
    limits: Mapping[str, Quantity] | None = None
    requests: Mapping[str, Quantity] | None = None
    #: Devices that DRA allocates.
    claims: list["Present"] | None = None


class Present(KubeStruct, frozen=True):
    """An object whose fields are not decoded, because only its presence matters."""


class FieldRef(KubeStruct, frozen=True):
    field_path: str = ""


class EnvVarSource(KubeStruct, frozen=True):
    """The source of a variable's value. Only sources that are fields of the pod are decoded."""

    field_ref: FieldRef | None = None


class EnvVar(KubeStruct, frozen=True):
    name: str = ""
    value: str | None = None
    value_from: EnvVarSource | None = None


class EnvFromSource(KubeStruct, frozen=True):
    """A ConfigMap or a Secret whose keys all become variables."""

    prefix: str = ""


class ContainerPort(KubeStruct, frozen=True):
    host_port: Int64 | None = None


class Container(KubeStruct, frozen=True):
    name: str = ""
    ports: list[ContainerPort] | None = None
    env: list[EnvVar] | None = None
    env_from: list[EnvFromSource] | None = None
    resources: ResourceRequirements | None = None
    #: "Always" on an init container makes it a native sidecar.
    restart_policy: str | None = None
    readiness_probe: Present | None = None
    startup_probe: Present | None = None


class VolumeMount(KubeStruct, frozen=True):
    mount_path: str = ""


class InitContainer(Container, frozen=True):
    """An init container with all fields of the Kubernetes API, because the gate is recognised by
    all its fields.

    ``contract.gate`` compares all of them. ``tests/admission/test_api_fields.py`` compares their
    names with each supported version of Kubernetes.
    """

    image: str = ""
    command: list[str] | None = None
    args: list[str] | None = None
    working_dir: str | None = None
    volume_mounts: list[VolumeMount] | None = None
    volume_devices: Any = None
    image_pull_policy: str | None = None
    lifecycle: Any = None
    liveness_probe: Any = None
    resize_policy: Any = None
    restart_policy_rules: Any = None
    security_context: Any = None
    stdin: Any = None
    stdin_once: Any = None
    termination_message_path: str | None = None
    termination_message_policy: str | None = None
    tty: Any = None


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
    """Selects pods by labels and namespaces. Without namespaces, it selects pods in its own
    namespace."""

    label_selector: LabelSelector | None = None
    namespaces: list[str] | None = None
    namespace_selector: Present | None = None


class WeightedPodAffinityTerm(KubeStruct, frozen=True):
    pod_affinity_term: PodAffinityTerm = PodAffinityTerm()


class PodAffinity(KubeStruct, frozen=True):
    """Terms of pod affinity or of pod anti-affinity."""

    required_during_scheduling_ignored_during_execution: list[PodAffinityTerm] | None = None
    preferred_during_scheduling_ignored_during_execution: list[WeightedPodAffinityTerm] | None = (
        None
    )


class Affinity(KubeStruct, frozen=True):
    node_affinity: NodeAffinity | None = None
    pod_affinity: PodAffinity | None = None
    pod_anti_affinity: PodAffinity | None = None


class Volume(KubeStruct, frozen=True):
    """A volume. Only volumes that the node must be able to attach are decoded."""

    persistent_volume_claim: Present | None = None
    ephemeral: Present | None = None


class SchedulingGate(KubeStruct, frozen=True):
    """A scheduling gate. Schedulers skip pods with scheduling gates."""

    name: str = ""


class SchedulingGroup(KubeStruct, frozen=True):
    """The group of a pod (Kubernetes 1.36 and newer)."""

    pod_group_name: str | None = None


class WorkloadReference(KubeStruct, frozen=True):
    """The group of a pod in Kubernetes 1.35: a part of a Workload, or a replica of such a part."""

    name: str = ""
    pod_group: str = ""
    pod_group_replica_key: str = ""


class PodSpec(KubeStruct, frozen=True):
    containers: list[Container] | None = None
    init_containers: list[InitContainer] | None = None
    node_name: str | None = None
    priority: Int64 | None = None
    #: Seconds between SIGTERM and SIGKILL, unless a deletion sets another value.
    termination_grace_period_seconds: Int64 | None = None
    #: With "Never", no pod is evicted to make this pod fit.
    preemption_policy: str | None = None
    scheduler_name: str | None = None
    scheduling_gates: list[SchedulingGate] | None = None
    scheduling_group: SchedulingGroup | None = None
    workload_ref: WorkloadReference | None = None
    node_selector: Mapping[str, str] | None = None
    affinity: Affinity | None = None
    tolerations: list[Toleration] | None = None
    topology_spread_constraints: list[Present] | None = None
    volumes: list[Volume] | None = None
    resource_claims: list[Present] | None = None
    #: Requests of the whole pod (Kubernetes 1.34 and newer).
    resources: ResourceRequirements | None = None
    overhead: Mapping[str, Quantity] | None = None


#: Reason of the condition that the pod garbage collector sets on a pod whose node is lost.
COLLECTED = "DeletionByPodGC"


class PodCondition(KubeStruct, frozen=True):
    type: str = ""
    status: str = ""
    reason: str = ""
    message: str = ""


class Terminated(KubeStruct, frozen=True):
    exit_code: Int64 = 0
    #: The reason why the container ended, such as "Error" or "OOMKilled".
    reason: str = ""
    #: When the container ended (RFC 3339).
    finished_at: str | None = None


class Waiting(KubeStruct, frozen=True):
    #: The reason why the container waits, such as "ImagePullBackOff".
    reason: str = ""


class ContainerState(KubeStruct, frozen=True):
    waiting: Waiting | None = None
    running: Present | None = None
    terminated: Terminated | None = None


class ContainerStatus(KubeStruct, frozen=True):
    name: str = ""
    state: ContainerState | None = None
    #: The previous state of a container that was started again.
    last_state: ContainerState | None = None
    restart_count: Int64 = 0

    @property
    def last_end(self) -> Terminated | None:
        """Return the last end of the container, or None if it has not ended."""
        ends = (each.terminated for each in (self.state, self.last_state) if each is not None)
        return next((each for each in ends if each is not None), None)


class ExtendedResourceRequest(KubeStruct, frozen=True):
    """An extended resource that a claim serves."""

    resource_name: str = ""


class ExtendedResourceClaimStatus(KubeStruct, frozen=True):
    """The ResourceClaim that kube-scheduler created for extended resources of a pod (DRA)."""

    resource_claim_name: str = ""
    request_mappings: list[ExtendedResourceRequest] | None = None


class PodStatus(KubeStruct, frozen=True):
    phase: str | None = None
    container_statuses: list[ContainerStatus] | None = None
    init_container_statuses: list[ContainerStatus] | None = None
    conditions: list[PodCondition] | None = None
    #: When the kubelet accepted the pod (RFC 3339).
    start_time: str | None = None
    #: The node on which other pods are preempted for this pod.
    nominated_node_name: str | None = None
    #: The claim for an extended resource that DRA serves. kube-scheduler sets this status before it
    #: binds the pod.
    extended_resource_claim_status: ExtendedResourceClaimStatus | None = None


class Pod(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: PodSpec = PodSpec()
    status: PodStatus | None = None
    #: Size of the pod as JSON in bytes if it exceeds ``MAX_POD_BYTES``, otherwise 0. This is not a
    #: Kubernetes field.
    json_bytes: Annotated[int, msgspec.Meta(ge=0)] = 0

    @property
    def ended(self) -> bool:
        """Return whether the containers have ended for good, according to the pod's status.

        The phase alone does not prove this. A kubelet sets it after the containers have ended. But
        for a lost node, the pod garbage collector sets the phase Failed while containers may still
        run. These are the containers that the status shows as waiting, or does not show.
        """
        status = self.status
        if status is None or status.phase not in ("Succeeded", "Failed"):
            return False
        statuses = (status.container_statuses or []) + (status.init_container_statuses or [])
        if any(each.reason == COLLECTED for each in status.conditions or ()):
            return bool(statuses) and all(each.state and each.state.terminated for each in statuses)
        return not any(each.state and each.state.running for each in statuses)

    @property
    def node(self) -> str:
        """Return the node that the pod is bound to, or an empty string while it is unbound."""
        return self.spec.node_name or ""

    @property
    def priority(self) -> int:
        return self.spec.priority or 0

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


class DeviceAttribute(KubeStruct, frozen=True):
    """An attribute. Only attributes that are strings are decoded."""

    string: str | None = None


class BasicDevice(KubeStruct, frozen=True):
    """The fields of a device in v1beta1."""

    attributes: Mapping[str, DeviceAttribute] | None = None


class SliceDevice(KubeStruct, frozen=True):
    """A device that a DRA driver offers."""

    name: str = ""
    attributes: Mapping[str, DeviceAttribute] | None = None
    basic: BasicDevice | None = None


class ResourceSliceSpec(KubeStruct, frozen=True):
    """The fields that v1, v1beta2 and v1beta1 of resource.k8s.io have in common."""

    driver: str = ""
    node_name: str | None = None
    pool: ResourcePool = ResourcePool()
    devices: list[SliceDevice] | None = None


class ResourceSlice(KubeStruct, frozen=True):
    """Devices that a DRA driver offers, usually the devices of one node."""

    metadata: ObjectMeta
    spec: ResourceSliceSpec = ResourceSliceSpec()


class DisruptionBudgetSpec(KubeStruct, frozen=True):
    selector: LabelSelector | None = None


class DisruptionBudgetStatus(KubeStruct, frozen=True):
    disruptions_allowed: int = 0
    #: The time of the eviction by pod name, for pods whose eviction the budget has already counted.
    disrupted_pods: Mapping[str, Any] | None = None


class PodDisruptionBudget(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: DisruptionBudgetSpec = DisruptionBudgetSpec()
    status: DisruptionBudgetStatus = DisruptionBudgetStatus()


class Lease(KubeStruct, frozen=True):
    metadata: ObjectMeta
