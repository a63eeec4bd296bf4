"""The seam between the bind protocol and where truth is kept.

Two stores stand behind it: the Kubernetes API server, and one in memory with the same optimistic
concurrency. Every read is consistent (not from a cache). Every method may raise the errors of
``extender.errors``: ``StoreConflict``, ``StoreNotFound``, ``StoreRejected``, ``OutcomeUnknown``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from contract.annotations import TOUCHED
from contract.gpunode import GPUNode, GPUNodeSpec
from contract.kube import Pod


@dataclass(frozen=True, slots=True)
class Binding:
    """One POST of a Binding: pod to node, with both preconditions and the annotations."""

    namespace: str
    name: str
    uid: str
    #: Of the pod as it was when the decision was made; a newer pod makes the Binding fail.
    resource_version: str
    node: str
    annotations: Mapping[str, str] = field(default_factory=dict)


class Store(Protocol):
    async def read_gpunode(self, name: str) -> GPUNode | None:
        """The GPUNode, or None when there is none."""

    async def create_gpunode(self, gpunode: GPUNode) -> GPUNode:
        """Create it (metadata and spec); ``StoreConflict`` when it exists."""

    async def write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        """Turn the spec of ``before`` into ``spec`` if its resourceVersion is still the newest.

        Compare-and-swap: ``StoreConflict`` when somebody wrote the object in between.
        """

    async def let_go(self, gpunode: GPUNode) -> None:
        """Take our finalizer off a GPUNode that is being deleted, which ends it.

        ``StoreConflict`` when somebody wrote the object in between.
        """

    async def read_pod(self, namespace: str, name: str) -> Pod | None:
        """The pod, or None when there is none."""

    async def read_heartbeat_version(self, node: str) -> str:
        """The resourceVersion of the Lease of the node's agent; empty where there is none."""

    async def list_pods(self, node: str | None = None) -> list[Pod]:
        """Every pod there is, consistently; of a node those that are bound to it, and of the empty
        name those that no node has."""

    async def bind(self, binding: Binding) -> None:
        """Bind, atomically with the annotations; ``StoreConflict`` when a precondition fails."""

    async def touch_pod(self, pod: Pod, value: str, key: str = TOUCHED) -> Pod:
        """Write ``value`` under the annotation ``key``, with the uid and resourceVersion of
        ``pod`` as preconditions, so that Bindings in flight fail."""
