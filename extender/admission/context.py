"""The inputs of a decision about a pod: the settings, its namespace and the GPU nodes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import msgspec

from contract.annotations import (
    DEFAULT_VRAM,
    DEVICE_CHOICE,
    NO_SCHEDULER,
    SCHEDULER,
    DeviceChoice,
    parse_device_choice,
)
from contract.errors import BadAnnotation
from contract.gpunode import Device, GPUNodeStatus
from contract.kube import Node, NodeSpec, Pod
from extender.placement.policy import Rules
from extender.state.eligible_nodes import eligible

_RULES = Rules()
#: The API server's default for ``spec.schedulerName``.
STOCK_SCHEDULER = "default-scheduler"
_OF_KUBERNETES = "node.kubernetes.io/"
_CHOSEN_BY_POD = (DeviceChoice.GATED, DeviceChoice.PINNED)


@dataclass(frozen=True, slots=True)
class Wishes:
    """The settings of the webhook."""

    #: Scheduler that calls Headroom; GPU pods that name no scheduler get it.
    scheduler: str = "headroom"
    #: Image of the gate; empty if pods get no gate.
    gate_image: str = ""
    #: Whether pods request the extended resource of the in-tree mirror.
    mirror: bool = False
    #: Whether Headroom only observes: it rejects nothing, and no pod may depend on annotations that
    #: Headroom writes when it places a pod, because pods that do not fit run without them.
    observes: bool = False


@dataclass(frozen=True, slots=True)
class OfNamespace:
    """The metadata of the pod's namespace."""

    name: str = ""
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def default_vram(self) -> str | None:
        return self.annotations.get(DEFAULT_VRAM)


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A node and its agent's report."""

    node: Node
    #: None if no agent reports.
    status: GPUNodeStatus | None = None

    @property
    def choice(self) -> DeviceChoice:
        """The node's annotated device choice; predicted if it is missing or invalid."""
        text = (self.node.metadata.annotations or {}).get(DEVICE_CHOICE)
        try:
            return DeviceChoice.PREDICTED if text is None else parse_device_choice(text)
        except BadAnnotation:
            return DeviceChoice.PREDICTED

    def devices(self, resource: str) -> list[Device]:
        devices = self.status.devices if self.status else []
        return [device for device in devices if device.resource == resource]

    def offers(self, resource: str) -> bool:
        """Return whether the node offers the resource now, or will once its device plugin runs."""
        allocatable = (self.node.status and self.node.status.allocatable) or {}
        return resource in allocatable or bool(self.devices(resource))


#: Annotation that a kubelet sets on the mirror pod of a static pod.
STATIC = "kubernetes.io/config.mirror"


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    """The inputs of a decision about a pod."""

    rules: Rules = _RULES
    wishes: Wishes = Wishes()
    namespace: OfNamespace = OfNamespace()
    #: All nodes of the cluster.
    nodes: Iterable[GpuNode] = ()
    #: The nodes with an annotated device choice; None: search ``nodes`` for them.
    annotated: Iterable[GpuNode] | None = None
    #: The node of the kubelet that sent the request; empty for any other client.
    by_node: str = ""

    def is_static(self, pod: Pod) -> bool:
        """Return whether the pod is the mirror of a static pod.

        Any user can set the annotation, so it counts only from the kubelet of the pod's node.
        """
        return pod.annotation(STATIC) is not None and bool(pod.node) and pod.node == self.by_node

    @property
    def scheduler(self) -> str | None:
        """The scheduler to set on pods that name none; None: they keep the default scheduler."""
        label = self.namespace.labels.get(SCHEDULER)
        name = self.wishes.scheduler if label is None else label
        return None if name in (NO_SCHEDULER, STOCK_SCHEDULER) else name

    def asks_headroom(self, scheduler: str | None) -> bool:
        """Return whether Headroom places the pods of this scheduler."""
        name = scheduler or STOCK_SCHEDULER
        return name == self.wishes.scheduler or name == self.scheduler

    def candidates(self, pod: Pod, resources: Sequence[str]) -> list[GpuNode]:
        """Return the nodes that the pod is eligible for, now or later.

        Node selector, node affinity and taints count. Cordons and the taints that Kubernetes sets
        for conditions do not, because they are temporary.
        """
        return [each for each in self.nodes if _could_run(pod, resources, each)]

    def has_choice(self, pod: Pod, resources: Sequence[str]) -> bool:
        """Return whether the pod is eligible for a gated or pinned node.

        Such a node needs changes of the pod.
        """
        annotated = self.nodes if self.annotated is None else self.annotated
        return any(
            each.choice in _CHOSEN_BY_POD and _could_run(pod, resources, each) for each in annotated
        )


def _could_run(pod: Pod, resources: Sequence[str], on: GpuNode) -> bool:
    return all(map(on.offers, resources)) and eligible(pod, _without_conditions(on.node))


def _without_conditions(node: Node) -> Node:
    """Return the node without its cordon and without the taints that Kubernetes sets itself."""
    if node.spec is None:
        return node
    taints = [t for t in node.spec.taints or () if not t.key.startswith(_OF_KUBERNETES)]
    return msgspec.structs.replace(node, spec=NodeSpec(taints=taints))
