"""A store in memory with the API server's optimistic concurrency, for demos and tests.

All objects share one counter of resourceVersions. A write of the ledger fails if its precondition
is not the newest version. Watchers receive changes in the order of the writes. Tests can inject
network faults.
"""

import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol, TypeVar

import msgspec

from extender.ledger.store import Binding, Store
from headroom.contract.annotations import TOUCHED
from headroom.contract.gpunode import GPUNode, GPUNodeSpec, GPUNodeStatus
from headroom.contract.kube import Pod, PodSpec
from headroom.contract.watched import GPUNodeGone, GPUNodeSeen, PodGone, PodSeen
from headroom.core.cluster.changes import Event
from headroom.errors import StoreConflict, StoreNotFound

T = TypeVar("T")

#: A callback that receives the name of an operation and "before" or "after". It may sleep or raise
#: a StoreError. If it raises "before", the operation is not done. If it raises "after", the result
#: or error of the operation is lost.
Fault = Callable[[str, str], None]


def no_fault(operation: str, when: str) -> None:
    """Inject no fault."""


class SyncStore(Protocol):
    """A ``Store`` with synchronous methods."""

    def read_gpunode(self, name: str) -> GPUNode | None: ...
    def create_gpunode(self, gpunode: GPUNode) -> GPUNode: ...
    def write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode: ...
    def remove_finalizer(self, gpunode: GPUNode) -> None: ...
    def read_pod(self, namespace: str, name: str) -> Pod | None: ...
    def read_heartbeat_version(self, node: str) -> str: ...
    def list_pods(self, node: str | None = None) -> list[Pod]: ...
    def bind(self, binding: Binding) -> None: ...
    def touch_pod(self, pod: Pod, value: str, key: str = TOUCHED) -> Pod: ...


class AsyncStore(Store):
    """Adapts a synchronous store to ``Store``. Its coroutines never suspend."""

    def __init__(self, store: SyncStore) -> None:
        self._store = store

    async def read_gpunode(self, name: str) -> GPUNode | None:
        return self._store.read_gpunode(name)

    async def create_gpunode(self, gpunode: GPUNode) -> GPUNode:
        return self._store.create_gpunode(gpunode)

    async def write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        return self._store.write_spec(before, spec)

    async def remove_finalizer(self, gpunode: GPUNode) -> None:
        self._store.remove_finalizer(gpunode)

    async def read_pod(self, namespace: str, name: str) -> Pod | None:
        return self._store.read_pod(namespace, name)

    async def read_heartbeat_version(self, node: str) -> str:
        return self._store.read_heartbeat_version(node)

    async def list_pods(self, node: str | None = None) -> list[Pod]:
        return self._store.list_pods(node)

    async def bind(self, binding: Binding) -> None:
        self._store.bind(binding)

    async def touch_pod(self, pod: Pod, value: str, key: str = TOUCHED) -> Pod:
        return self._store.touch_pod(pod, value, key)


class EmbeddedStore:
    """A synchronous store (``SyncStore``) that is safe to use from several threads."""

    def __init__(
        self,
        deliver: Callable[[list[Event]], None],
        monotonic_s: Callable[[], float],
        fault: Fault = no_fault,
        watch: Callable[[list[Event]], None] | None = None,
    ) -> None:
        """``deliver`` applies changes immediately. ``watch`` queues the agents' reports. Without
        it, ``deliver`` applies reports too.

        ``watch`` also receives each write and deletion of a GPUNode after ``deliver``, so that a
        report queued earlier cannot undo the change.
        """
        self._watch = watch or deliver
        self._has_watch = watch is not None
        self._deliver = deliver
        self._monotonic_s = monotonic_s
        self._fault = fault
        self._lock = threading.Lock()
        self._version = 0
        self._gpunodes: dict[str, GPUNode] = {}
        self._pods: dict[tuple[str, str], Pod] = {}
        #: The resourceVersions with which ``admit`` was called, by pod uid.
        self._shown: dict[str, set[str]] = {}

    # Calls of the ledger.

    def read_gpunode(self, name: str) -> GPUNode | None:
        return self._do("read_gpunode", lambda: self._gpunodes.get(name))

    def create_gpunode(self, gpunode: GPUNode) -> GPUNode:
        def create() -> GPUNode:
            if gpunode.name in self._gpunodes:
                raise StoreConflict(f"GPUNode {gpunode.name} exists already")
            # Like the API server, assign a uid and create no status.
            metadata = msgspec.structs.replace(gpunode.metadata, uid=f"gpunode-{uuid.uuid4()}")
            return self._put_gpunode(
                msgspec.structs.replace(gpunode, metadata=metadata, status=None)
            )

        return self._do("create_gpunode", create)

    def write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        def write() -> GPUNode:
            held = self._unchanged(before)
            if held.spec == spec:
                return held  # as on the API server, an unchanged object keeps its version
            return self._put_gpunode(msgspec.structs.replace(held, spec=spec))

        return self._do("write_spec", write)

    def remove_finalizer(self, gpunode: GPUNode) -> None:
        def remove() -> None:
            self._unchanged(gpunode)
            del self._gpunodes[gpunode.name]
            self._changed(GPUNodeGone(gpunode.name))

        self._do("remove_finalizer", remove)

    def read_pod(self, namespace: str, name: str) -> Pod | None:
        return self._do("read_pod", lambda: self._pods.get((namespace, name)))

    def read_heartbeat_version(self, node: str) -> str:
        # A deleted pod has ended (``delete_pod``), so no reservation is kept until a later sample.
        return ""

    def list_pods(self, node: str | None = None) -> list[Pod]:
        def pods() -> list[Pod]:
            return [pod for pod in self._pods.values() if node in (None, pod.node)]

        return self._do("list_pods", pods)

    def bind(self, binding: Binding) -> None:
        def bind() -> None:
            pod = self._held_pod(binding.namespace, binding.name)
            subject = f"pod {binding.namespace}/{binding.name}"
            if pod.metadata.uid != binding.uid:
                raise StoreConflict(f"{subject} has another uid")
            if pod.metadata.resource_version != binding.resource_version:
                raise StoreConflict(f"{subject} was changed by another client")
            if pod.node:
                raise StoreConflict(f"{subject} is already assigned to node {pod.node}")
            if pod.metadata.deletion_timestamp:
                raise StoreConflict(f"{subject} is being deleted")
            annotations = {**(pod.metadata.annotations or {}), **binding.annotations}
            spec = msgspec.structs.replace(pod.spec, node_name=binding.node)
            self._put_pod(pod, annotations, spec)

        self._do("bind", bind)

    def touch_pod(self, pod: Pod, value: str, key: str = TOUCHED) -> Pod:
        def touch() -> Pod:
            held = self._held_pod(pod.metadata.namespace, pod.metadata.name)
            ours, theirs = pod.metadata, held.metadata
            if (ours.uid, ours.resource_version) != (theirs.uid, theirs.resource_version):
                raise StoreConflict(
                    f"pod {ours.namespace}/{ours.name} was changed by another client"
                )
            if held.annotation(key) == value:
                return held
            return self._put_pod(held, {**(theirs.annotations or {}), key: value}, held.spec)

        return self._do("touch_pod", touch)

    # Calls of the rest of the cluster. Users create and delete pods, and agents write reports.

    def admit(self, pod: Pod) -> Pod:
        """Create the pod, or update it while it is not bound. Return the stored pod.

        A pod of the same name with another uid replaces the old pod, as if the old pod had been
        deleted. The pod keeps the resourceVersion that its creator gave it. If it has none, the
        store assigns one. A version that was submitted before is ignored, so that it cannot undo a
        later change of the pod.
        """

        def create() -> Pod:
            key, version = (
                (pod.metadata.namespace, pod.metadata.name),
                pod.metadata.resource_version,
            )
            held = self._pods.get(key)
            if held is not None and held.metadata.uid != pod.metadata.uid:
                self._forget_pod(held)
                held = None
            shown = self._shown.setdefault(pod.metadata.uid, set())
            if held is not None and (held.node or version in shown):
                return held
            shown.add(version)
            if not version:
                return self._put_pod(pod, pod.metadata.annotations, pod.spec)
            self._pods[key] = pod
            self._deliver([PodSeen(pod)])
            return pod

        return self._do("admit", create)

    def delete_pod(self, namespace: str, name: str) -> Pod:
        """Remove a pod immediately, as if its containers had terminated. Raise ``StoreNotFound`` if
        it does not exist."""

        def delete() -> Pod:
            pod = self._held_pod(namespace, name)
            self._forget_pod(pod)
            return pod

        return self._do("delete_pod", delete)

    def delete_gpunode(self, name: str) -> None:
        """Remove a GPUNode immediately, even if it has finalizers. Raise ``StoreNotFound`` if it
        does not exist."""

        def delete() -> None:
            self._held(name)
            del self._gpunodes[name]
            self._changed(GPUNodeGone(name))

        self._do("delete_gpunode", delete)

    def report(self, reports: Iterable[tuple[str, GPUNodeStatus]]) -> None:
        """Replace the status of GPUNodes, as their agents do. If a GPUNode does not exist, raise
        ``StoreNotFound`` and replace no status."""

        def write() -> None:
            pairs = [(self._held(name), status) for name, status in reports]
            seen: list[Event] = [
                self._written(msgspec.structs.replace(held, status=status))
                for held, status in pairs
            ]
            self._watch(seen)

        self._do("report", write)

    def _do(self, operation: str, action: Callable[[], T]) -> T:
        """Run ``action`` under the lock, and call the fault before and after it."""
        self._fault(operation, "before")
        try:
            with self._lock:
                return action()
        finally:
            self._fault(operation, "after")

    # The methods below require the lock.

    def _held(self, name: str) -> GPUNode:
        if name not in self._gpunodes:
            raise StoreNotFound(f"GPUNode {name} does not exist")
        return self._gpunodes[name]

    def _unchanged(self, gpunode: GPUNode) -> GPUNode:
        held = self._held(gpunode.name)
        if held.metadata.resource_version != gpunode.metadata.resource_version:
            raise StoreConflict(f"GPUNode {gpunode.name} was written by another client")
        return held

    def _held_pod(self, namespace: str, name: str) -> Pod:
        if (namespace, name) not in self._pods:
            raise StoreNotFound(f"pod {namespace}/{name} does not exist")
        return self._pods[namespace, name]

    def _forget_pod(self, pod: Pod) -> None:
        del self._pods[pod.metadata.namespace, pod.metadata.name]
        self._shown.pop(pod.metadata.uid, None)
        self._deliver([PodGone(pod.metadata.uid, ended=True)])

    def _next_version(self) -> str:
        self._version += 1
        return str(self._version)

    def _put_gpunode(self, gpunode: GPUNode) -> GPUNode:
        seen = self._written(gpunode)
        self._changed(seen)
        return seen.gpunode

    def _changed(self, event: Event) -> None:
        self._deliver([event])
        if self._has_watch:
            self._watch([event])

    def _written(self, gpunode: GPUNode) -> GPUNodeSeen:
        metadata = msgspec.structs.replace(gpunode.metadata, resource_version=self._next_version())
        gpunode = msgspec.structs.replace(gpunode, metadata=metadata)
        self._gpunodes[gpunode.name] = gpunode
        return GPUNodeSeen(gpunode, self._monotonic_s())

    def _put_pod(self, pod: Pod, annotations: Mapping[str, str] | None, spec: PodSpec) -> Pod:
        metadata = msgspec.structs.replace(
            pod.metadata, annotations=annotations, resource_version=f"e{self._next_version()}"
        )
        pod = msgspec.structs.replace(pod, metadata=metadata, spec=spec)
        self._pods[pod.metadata.namespace, pod.metadata.name] = pod
        self._deliver([PodSeen(pod)])
        return pod
