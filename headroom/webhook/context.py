"""The inputs of a decision about a pod: the settings, the pod's namespace and the GPU nodes."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

import msgspec

from headroom.contract.annotations import (
    DEFAULT_VRAM,
    DEVICE_CHOICE,
    GATED,
    NO_SCHEDULER,
    SCHEDULER,
    SHARE,
    DeviceChoice,
    ShareMode,
    parse_device_choice,
    parse_gated,
    parse_share,
)
from headroom.contract.errors import BadAnnotation
from headroom.contract.foreign_keys import MIRRORED
from headroom.contract.gpunode import Device, GPUNode, GPUNodeStatus
from headroom.contract.kube import Namespace, Node, NodeSpec, ObjectMeta, Pod
from headroom.contract.vramprofile import ProfileController, VRAMProfile
from headroom.contract.watched import (
    GPUNodeGone,
    GPUNodeSeen,
    NamespaceGone,
    NamespaceSeen,
    NodeGone,
    NodeSeen,
    Relisted,
    WatchEvent,
)
from headroom.core.placement.policy import Rules
from headroom.core.recommend.families import profile_controller
from headroom.core.recommend.programs import Program
from headroom.core.rules.eligible_nodes import eligible
from headroom.runtime.settings.webhook import WebhookSettings

T = TypeVar("T")

#: Kinds to watch, by their names in ``runtime.kube.resources``.
KINDS = ("nodes", "namespaces", "gpunodes")
_RULES, _SETTINGS = Rules(), WebhookSettings()
#: The API server's default for ``spec.schedulerName``.
STOCK_SCHEDULER = "default-scheduler"
#: Prefix of the taints that Kubernetes sets itself, for conditions of a node and for cordons.
_KUBERNETES_TAINTS = "node.kubernetes.io/"


@dataclass(frozen=True, slots=True)
class NamespaceMetadata:
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
    #: The report of the node's agent, or None if no agent reports.
    status: GPUNodeStatus | None = None

    @property
    def choice(self) -> DeviceChoice:
        """The device choice in the node's annotation, or the predicted device choice if the
        annotation is missing or invalid."""
        text = (self.node.metadata.annotations or {}).get(DEVICE_CHOICE)
        try:
            return DeviceChoice.PREDICTED if text is None else parse_device_choice(text)
        except BadAnnotation:
            return DeviceChoice.PREDICTED

    def devices(self, resource: str) -> list[Device]:
        devices = self.status.devices if self.status else []
        return [device for device in devices if device.resource == resource]

    def offers(self, resource: str) -> bool:
        """Return whether the node offers the resource now, or will offer it when its device plugin
        runs."""
        allocatable = (self.node.status and self.node.status.allocatable) or {}
        return resource in allocatable or bool(self.devices(resource))


@dataclass(frozen=True, slots=True)
class AdmissionContext:
    """The inputs of a decision about a pod."""

    rules: Rules = _RULES
    settings: WebhookSettings = _SETTINGS
    namespace: NamespaceMetadata = NamespaceMetadata()
    #: All nodes of the cluster.
    nodes: Iterable[GpuNode] = ()
    #: The nodes with a device choice in an annotation. If None, ``nodes`` is searched for them.
    annotated: Iterable[GpuNode] | None = None
    #: The node of the kubelet that sent the request. Empty for any other client.
    kubelet_node: str = ""
    #: The program of each container of the pod, and the pod's generateName. The request ``auto``
    #: needs both.
    programs: Mapping[str, Program] = field(default_factory=lambda: MappingProxyType({}))
    generate_name: str = ""
    #: A function that returns the profile of pods with a controller in a namespace.
    profile: Callable[[str, ProfileController], VRAMProfile | None] = lambda *_: None
    #: The current Unix time in seconds, which determines the weights of lives.
    now_s: float = 0.0

    def profile_of(self, pod: Pod) -> VRAMProfile | None:
        return self.profile(self.namespace.name, profile_controller(pod, self.generate_name))

    def is_static(self, pod: Pod) -> bool:
        """Return whether the pod is the mirror of a static pod.

        Any user can set the annotation, so it counts only if the kubelet of the pod's node sent the
        request.
        """
        return pod.annotation(MIRRORED) is not None and pod.node == self.kubelet_node != ""

    @property
    def is_exempt(self) -> bool:
        """Whether the mutating webhook skips the namespace."""
        return self.namespace.labels.get(SCHEDULER) == NO_SCHEDULER

    @property
    def counts(self) -> bool:
        """Whether quotas count the GPU memory of the namespace's pods."""
        return self.settings.counts and not self.is_exempt

    @property
    def scheduler(self) -> str | None:
        """The scheduler to set on pods that name no scheduler. If None, these pods keep the default
        scheduler."""
        label = self.namespace.labels.get(SCHEDULER)
        name = self.settings.scheduler if label is None else label
        return None if name in (NO_SCHEDULER, STOCK_SCHEDULER) else name

    def asks_headroom(self, scheduler: str | None) -> bool:
        """Return whether this scheduler calls Headroom. None stands for the default scheduler."""
        name = scheduler or STOCK_SCHEDULER
        return name == self.settings.scheduler or name == self.scheduler

    def candidates(self, pod: Pod, resources: Sequence[str]) -> list[GpuNode]:
        """Return the nodes that are eligible for the pod, now or later.

        Node selectors, node affinity and taints count. Cordons and the taints that Kubernetes sets
        for conditions do not count, because they are temporary.
        """
        return [each for each in self.nodes if _could_run(pod, resources, each)]

    def may_run(self, pod: Pod, resource: str, on: GpuNode) -> bool:
        """Return whether this node is one of the pod's ``candidates``."""
        return _could_run(pod, [resource], on)

    def has_gated_node(self, pod: Pod, resources: Sequence[str]) -> bool:
        """Return whether a gated node is eligible for the pod."""
        annotated = self.nodes if self.annotated is None else self.annotated
        return any(
            each.choice is DeviceChoice.GATED and _could_run(pod, resources, each)
            for each in annotated
        )

    def gate_option(self, pod: Pod) -> bool | None:
        """Return whether the pod should get a gate, or None if no annotation states it."""
        return self._option(pod, GATED, parse_gated)

    def share_mode(self, pod: Pod) -> ShareMode:
        """Return whether the pod's share of a device is exposed or limited. The default is
        neither."""
        return self._option(pod, SHARE, parse_share) or ShareMode.NONE

    def _option(self, pod: Pod, key: str, parse: Callable[[str], T]) -> T | None:
        """Return the value of the annotation on the pod, or else on its namespace. Return None if
        it is missing or invalid.

        Validation rejects an invalid annotation on a pod, and warns about an invalid annotation on
        a namespace.
        """
        for text in (pod.annotation(key), self.namespace.annotations.get(key)):
            if text is not None:
                try:
                    return parse(text)
                except BadAnnotation:
                    return None
        return None


def _could_run(pod: Pod, resources: Sequence[str], on: GpuNode) -> bool:
    """Return whether the node offers all resources and is eligible for the pod, now or later."""
    return all(map(on.offers, resources)) and eligible(pod, _without_conditions(on.node))


def _without_conditions(node: Node) -> Node:
    """Return the node without its cordon and without the taints that Kubernetes sets itself."""
    if node.spec is None:
        return node
    taints = [t for t in node.spec.taints or () if not t.key.startswith(_KUBERNETES_TAINTS)]
    return msgspec.structs.replace(node, spec=NodeSpec(taints=taints))


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Nodes with their reports, built only when they are iterated.

    This saves time, because most decisions do not depend on nodes.
    """

    held: Mapping[str, Node]
    status: Callable[[str], GPUNodeStatus | None]

    def __iter__(self) -> Iterator[GpuNode]:
        for name, node in list(self.held.items()):
            yield GpuNode(node, self.status(name))


class ObjectCache:
    """Caches the latest versions of nodes, GPUNodes and namespaces that the watches deliver.

    ``apply`` may be called from several threads if all events of a kind come from the same thread,
    and ``context`` may be called from any thread. Each change is one operation on a dictionary, and
    readers copy a dictionary before they iterate over it.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        #: The nodes with an annotated device choice.
        self._with_choice: dict[str, Node] = {}
        self._statuses: dict[str, GPUNodeStatus | None] = {}
        self._namespaces: dict[str, Namespace] = {}

    def apply(self, events: Sequence[WatchEvent]) -> None:
        for event in events:
            match event:
                case NodeSeen(node):
                    self._nodes[node.metadata.name] = node
                    if _has_choice(node):
                        self._with_choice[node.metadata.name] = node
                    else:
                        self._with_choice.pop(node.metadata.name, None)
                case NodeGone(name):
                    self._nodes.pop(name, None)
                    self._with_choice.pop(name, None)
                case GPUNodeSeen(gpunode):
                    self._statuses[gpunode.name] = gpunode.status
                case GPUNodeGone(name):
                    self._statuses.pop(name, None)
                case NamespaceSeen(namespace):
                    self._namespaces[namespace.metadata.name] = namespace
                case NamespaceGone(name):
                    self._namespaces.pop(name, None)
                case Relisted():
                    self._replace(event)

    def context(self, rules: Rules, settings: WebhookSettings, namespace: str) -> AdmissionContext:
        """Return the inputs of a decision about a pod of this namespace."""
        known = self._namespaces.get(namespace)
        metadata = known.metadata if known else ObjectMeta()
        found = NamespaceMetadata(namespace, metadata.annotations or {}, metadata.labels or {})
        nodes, annotated = (
            _Nodes(held, self._statuses.get) for held in (self._nodes, self._with_choice)
        )
        return AdmissionContext(rules, settings, found, nodes, annotated)

    def _replace(self, listed: Relisted) -> None:
        """Replace all objects of one kind with a complete list."""
        objects = {each.metadata.name: each for each in listed.objects}
        if listed.kind is Node:
            nodes = {k: each for k, each in objects.items() if isinstance(each, Node)}
            self._nodes = nodes
            self._with_choice = {k: each for k, each in nodes.items() if _has_choice(each)}
        elif listed.kind is GPUNode:
            self._statuses = {
                k: each.status for k, each in objects.items() if isinstance(each, GPUNode)
            }
        elif listed.kind is Namespace:
            self._namespaces = {
                k: each for k, each in objects.items() if isinstance(each, Namespace)
            }


def _has_choice(node: Node) -> bool:
    return DEVICE_CHOICE in (node.metadata.annotations or {})
