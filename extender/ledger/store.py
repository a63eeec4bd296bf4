"""The interface between the bind protocol and the store of its objects.

It has two implementations: the Kubernetes API server, and a store in memory with the same
optimistic concurrency. All reads are consistent (not from a cache). All methods may raise the
errors of ``headroom.errors``: ``StoreConflict``, ``StoreNotFound``, ``StoreRejected``,
``OutcomeUnknown``.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from headroom.contract.annotations import TOUCHED
from headroom.contract.gpunode import GPUNode, GPUNodeSpec
from headroom.contract.kube import Pod


@dataclass(frozen=True, slots=True)
class Binding:
    """The content of a Binding: the pod, the node, annotations, and the preconditions uid and
    resourceVersion."""

    namespace: str
    name: str
    uid: str
    #: The version of the pod on which the decision is based. If the pod is newer, the Binding
    #: fails.
    resource_version: str
    node: str
    annotations: Mapping[str, str] = field(default_factory=dict)


class Evictor(Protocol):
    """Evicts pods. Both methods raise store errors if the API server rejects the eviction."""

    async def may_evict(self, pod: Pod) -> None:
        """Dry-run the eviction of the pod. Raises the error that ``evict`` would raise."""

    async def evict(self, pod: Pod, most_grace_s: int | None = None) -> None:
        """Evict the pod if it is still the version that was read.

        ``most_grace_s`` is the maximum grace period in seconds. A longer grace period of the pod is
        shortened to it.
        """


class Store(Protocol):
    """Reads and writes the objects of the ledger."""

    async def read_gpunode(self, name: str) -> GPUNode | None:
        """Return the GPUNode, or None if it does not exist."""

    async def create_gpunode(self, gpunode: GPUNode) -> GPUNode:
        """Create the GPUNode with its metadata and spec. Raise ``StoreConflict`` if it exists."""

    async def write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        """Replace the spec of ``before`` by ``spec`` if its resourceVersion is still the newest.

        This is a compare-and-swap, which raises ``StoreConflict`` if another client has written the
        object in the meantime.
        """

    async def remove_finalizer(self, gpunode: GPUNode) -> None:
        """Remove Headroom's finalizer from a GPUNode that is being deleted, which completes the
        deletion.

        Raise ``StoreConflict`` if another client has written the object in the meantime.
        """

    async def read_pod(self, namespace: str, name: str) -> Pod | None:
        """Return the pod, or None if it does not exist."""

    async def read_heartbeat_version(self, node: str) -> str:
        """Return the resourceVersion of the Lease of the node's agent, or an empty string if the
        agent has no Lease."""

    async def list_pods(self, node: str | None = None) -> list[Pod]:
        """Return all pods with a consistent read. With the name of a node, return the pods bound to
        it. With an empty name, return the pods that are not bound."""

    async def bind(self, binding: Binding) -> None:
        """Bind the pod and write its annotations in one atomic step. Raise ``StoreConflict`` if a
        precondition fails."""

    async def touch_pod(self, pod: Pod, value: str, key: str = TOUCHED) -> Pod:
        """Write ``value`` to the annotation ``key`` and return the changed pod.

        The uid and resourceVersion of ``pod`` are preconditions. Raises ``StoreConflict`` if one of
        them fails. The change makes Bindings in flight fail.
        """
