"""What a decision about a pod looks at besides the pod: settings, its namespace, the GPU nodes."""

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
from extender.state.selectors import eligible

_RULES = Rules()
#: What the API server fills in where a pod names no scheduler.
STOCK_SCHEDULER = "default-scheduler"
_OF_KUBERNETES = "node.kubernetes.io/"
_CHOSEN_BY_POD = (DeviceChoice.GATED, DeviceChoice.PINNED)


@dataclass(frozen=True, slots=True)
class Wishes:
    """The settings that decide what becomes of pods."""

    #: Scheduler that asks Headroom, which GPU pods are given that name none.
    scheduler: str = "headroom"
    #: Of the gate; empty: there is none to be had.
    gate_image: str = ""
    #: Whether pods ask for the extended resource of the in-tree mirror.
    mirror: bool = False
    #: Whether Headroom only observes: nothing is refused, and no pod is made to depend on what a
    #: placement says, which pods without room do not get then.
    observes: bool = False


@dataclass(frozen=True, slots=True)
class OfNamespace:
    name: str = ""
    annotations: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def default_vram(self) -> str | None:
        return self.annotations.get(DEFAULT_VRAM)


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A node, and what is known of its devices; None: no agent reports."""

    node: Node
    status: GPUNodeStatus | None = None

    @property
    def choice(self) -> DeviceChoice:
        """Who chooses the device there, as annotated; what cannot be read decides nothing."""
        text = (self.node.metadata.annotations or {}).get(DEVICE_CHOICE)
        try:
            return DeviceChoice.PREDICTED if text is None else parse_device_choice(text)
        except BadAnnotation:
            return DeviceChoice.PREDICTED

    def devices(self, resource: str) -> list[Device]:
        devices = self.status.devices if self.status else []
        return [device for device in devices if device.resource == resource]

    def offers(self, resource: str) -> bool:
        """Now, or as soon as its plugin is back."""
        allocatable = (self.node.status and self.node.status.allocatable) or {}
        return resource in allocatable or bool(self.devices(resource))


#: Annotation of the pod by which a kubelet shows a static one to the API server.
STATIC = "kubernetes.io/config.mirror"


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    """``nodes`` are those of the cluster; which of them matter is found out where it does."""

    rules: Rules = _RULES
    wishes: Wishes = Wishes()
    namespace: OfNamespace = OfNamespace()
    nodes: Iterable[GpuNode] = ()
    #: Those of them on which something is annotated about who chooses; None: look for them.
    annotated: Iterable[GpuNode] | None = None
    #: The node of the kubelet that asks; empty if no kubelet does.
    by_node: str = ""

    def is_static(self, pod: Pod) -> bool:
        """Whether the pod is the mirror of a static one. Any author can write the annotation, so
        it is believed only from the kubelet of the pod's node."""
        return pod.annotation(STATIC) is not None and bool(pod.node) and pod.node == self.by_node

    @property
    def scheduler(self) -> str | None:
        """The scheduler of pods that name none; None: they keep the stock one."""
        label = self.namespace.labels.get(SCHEDULER)
        given = self.wishes.scheduler if label is None else label
        return None if given in (NO_SCHEDULER, STOCK_SCHEDULER) else given

    def asks_us(self, scheduler: str | None) -> bool:
        """Whether a pod of this scheduler is placed by Headroom."""
        name = scheduler or STOCK_SCHEDULER
        return name == self.wishes.scheduler or name == self.scheduler

    def places(self, pod: Pod, resources: Sequence[str]) -> list[GpuNode]:
        """Where the pod could run some time, by its selector, its node affinity and taints that
        are there to stay."""
        return [each for each in self.nodes if _could_run(pod, resources, each)]

    def has_choice(self, pod: Pod, resources: Sequence[str]) -> bool:
        """Whether the pod could go to a node for which it has to be made ready."""
        annotated = self.nodes if self.annotated is None else self.annotated
        return any(
            each.choice in _CHOSEN_BY_POD and _could_run(pod, resources, each) for each in annotated
        )


def _could_run(pod: Pod, resources: Sequence[str], on: GpuNode) -> bool:
    return all(map(on.offers, resources)) and eligible(pod, _at_its_best(on.node))


def _at_its_best(node: Node) -> Node:
    """Not cordoned, and without what Kubernetes itself taints it with while it is not well."""
    if node.spec is None:
        return node
    taints = [t for t in node.spec.taints or () if not t.key.startswith(_OF_KUBERNETES)]
    return msgspec.structs.replace(node, spec=NodeSpec(taints=taints))
