"""Caches the nodes, GPUNodes and namespaces that admission reads, from the watches."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from contract.annotations import DEVICE_CHOICE
from contract.gpunode import GPUNode, GPUNodeStatus
from contract.kube import Namespace, Node
from extender.admission.context import AdmissionContext, GpuNode, OfNamespace, Wishes
from extender.placement.policy import Rules
from extender.state.changes import (
    Event,
    GPUNodeGone,
    GPUNodeSeen,
    NamespaceGone,
    NamespaceSeen,
    NodeGone,
    NodeSeen,
    Relisted,
)

T = TypeVar("T")

#: Kinds to watch, by their names in ``extender.kube.resources``.
KINDS = ("nodes", "namespaces", "gpunodes")


@dataclass(frozen=True, slots=True)
class _Nodes:
    """Builds the nodes only when they are iterated: most decisions depend on no node."""

    held: Callable[[], Iterable[Node]]
    status: Callable[[str], GPUNodeStatus | None]

    def __iter__(self) -> Iterator[GpuNode]:
        for node in self.held():
            yield GpuNode(node, self.status(node.metadata.name))


class KnownObjects:
    """Objects by name, the latest version of each.

    ``apply`` may be called from any thread, if the events of one kind come from one; the other
    methods may be called from any thread. Each change is one operation on a dictionary, and readers
    copy what they iterate over.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, Node] = {}
        #: Nodes with an annotated device choice.
        self._with_choice: dict[str, Node] = {}
        self._statuses: dict[str, GPUNodeStatus | None] = {}
        self._namespaces: dict[str, Namespace] = {}

    def apply(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case NodeSeen(node):
                    self._put_node(node)
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

    def around(self, rules: Rules, wishes: Wishes, namespace: str) -> AdmissionContext:
        """Return the inputs of a decision about a pod of this namespace."""
        known = self._namespaces.get(namespace)
        metadata = known.metadata if known else None
        of_namespace = OfNamespace(
            namespace,
            (metadata and metadata.annotations) or {},
            (metadata and metadata.labels) or {},
        )
        return AdmissionContext(
            rules,
            wishes,
            of_namespace,
            _Nodes(lambda: list(self._nodes.values()), self._statuses.get),
            _Nodes(lambda: list(self._with_choice.values()), self._statuses.get),
        )

    def _put_node(self, node: Node) -> None:
        name = node.metadata.name
        self._nodes[name] = node
        if DEVICE_CHOICE in (node.metadata.annotations or {}):
            self._with_choice[name] = node
        else:
            self._with_choice.pop(name, None)

    def _replace(self, listed: Relisted) -> None:
        """Apply a complete list, and drop the objects that it does not contain."""
        names = {each.metadata.name for each in listed.objects}
        for each in listed.objects:
            if isinstance(each, Node):
                self._put_node(each)
            elif isinstance(each, GPUNode):
                self._statuses[each.name] = each.status
            elif isinstance(each, Namespace):
                self._namespaces[each.metadata.name] = each
        if listed.kind is Node:
            _keep(self._nodes, names)
            _keep(self._with_choice, names)
        elif listed.kind is GPUNode:
            _keep(self._statuses, names)
        elif listed.kind is Namespace:
            _keep(self._namespaces, names)


def _keep(held: dict[str, T], names: set[str]) -> None:
    for gone in [name for name in list(held) if name not in names]:
        held.pop(gone, None)
