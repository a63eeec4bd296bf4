"""A small API server as an immutable value. Every operation returns the next world.

The explorer keeps many worlds at the same time, which is impossible with a store that has a lock
and watchers. ``tests.ledger.store_behaviour`` checks that this store behaves like all stores.
"""

import functools
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from extender.ledger.store import Binding
from headroom.contract.annotations import TOUCHED
from headroom.contract.gpunode import GPUNode, GPUNodeSpec
from headroom.contract.kube import Pod
from headroom.errors import StoreConflict, StoreError, StoreNotFound

#: A resourceVersion that always matches, for mutated protocols without a precondition.
ANY = "*"

changed = msgspec.structs.replace


@dataclass(frozen=True)
class Call:
    """A message to the server."""

    operation: str
    arguments: tuple[Any, ...]

    @property
    def writes(self) -> bool:
        return not self.operation.startswith(("read", "list"))

    @functools.cached_property
    def key(self) -> bytes:
        return msgspec.json.encode((self.operation, self.arguments))


@dataclass(frozen=True)
class World:
    """The state of the server. Operations never change its maps in place.

    Each object has its own counter of versions, so that two steps in either order lead to equal
    worlds.
    """

    pods: Mapping[str, Pod] = field(default_factory=dict)
    #: Deleted pods whose containers still run, by UID.
    ghosts: Mapping[str, Pod] = field(default_factory=dict)
    gpunodes: Mapping[str, GPUNode] = field(default_factory=dict)
    versions: Mapping[str, int] = field(default_factory=dict)

    @functools.cached_property
    def key(self) -> bytes:
        held = self.pods, self.ghosts, self.gpunodes, self.versions
        return msgspec.json.encode(held, order="sorted")

    def perform(self, call: Call) -> "tuple[World, Any]":
        """Return the world after the call, and the response, which can be an error."""
        try:
            done: tuple[World, Any] = getattr(self, f"_{call.operation}")(*call.arguments)
            return done
        except StoreError as err:
            return self, err

    # The methods below are actions of users, agents and administrators.

    def with_pod(self, pod: Pod) -> "World":
        version, after = self._haunted(pod.metadata.name, by=pod.metadata.uid)._versioned(
            "pod", pod.metadata.name
        )
        pod = changed(pod, metadata=changed(pod.metadata, resource_version=version))
        return replace(after, pods={**after.pods, pod.metadata.name: pod})

    def with_gpunode(self, gpunode: GPUNode) -> "World":
        version, after = self._versioned("gpunode", gpunode.name)
        metadata = changed(gpunode.metadata, resource_version=version)
        gpunodes = {**after.gpunodes, gpunode.name: changed(gpunode, metadata=metadata)}
        return replace(after, gpunodes=gpunodes)

    def without_pod(self, name: str) -> "World":
        pods = {n: pod for n, pod in self.pods.items() if n != name}
        return replace(self._haunted(name), pods=pods)

    def _haunted(self, name: str, by: str = "") -> "World":
        """Return the world in which the containers of the pod with this name keep running as a
        ghost. Change nothing if the pod ``by``, which replaces the pod, is the same pod.
        """
        pod = self.pods.get(name)
        if pod is None or not pod.node or pod.ended or pod.metadata.uid == by:
            return self
        return replace(self, ghosts={**self.ghosts, pod.metadata.uid: pod})

    def without_gpunode(self, name: str) -> "World":
        return replace(self, gpunodes={n: g for n, g in self.gpunodes.items() if n != name})

    def _versioned(self, kind: str, name: str) -> "tuple[str, World]":
        number = self.versions.get(f"{kind} {name}", 0) + 1
        versions = {**self.versions, f"{kind} {name}": number}
        return f"v{number}", replace(self, versions=versions)

    # The methods below are the operations of the store.

    def _read_gpunode(self, name: str) -> "tuple[World, GPUNode | None]":
        return self, self.gpunodes.get(name)

    def _create_gpunode(self, gpunode: GPUNode) -> "tuple[World, GPUNode]":
        if gpunode.name in self.gpunodes:
            raise StoreConflict(f"GPUNode {gpunode.name} exists already")
        version, _ = self._versioned("gpunode", gpunode.name)
        metadata = changed(gpunode.metadata, uid=f"{gpunode.name}-{version}")
        after = self.with_gpunode(changed(gpunode, metadata=metadata, status=None))
        return after, after.gpunodes[gpunode.name]

    def _write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> "tuple[World, GPUNode]":
        held = self.gpunodes.get(before.name)
        if held is None:
            raise StoreNotFound(f"GPUNode {before.name} does not exist")
        if before.metadata.resource_version not in (ANY, held.metadata.resource_version):
            raise StoreConflict(f"GPUNode {before.name} was written by another client")
        after = self if held.spec == spec else self.with_gpunode(changed(held, spec=spec))
        return after, after.gpunodes[before.name]

    def _read_pod(self, namespace: str, name: str) -> "tuple[World, Pod | None]":
        return self, self.pods.get(name)

    def _list_pods(self, node: str | None) -> "tuple[World, list[Pod]]":
        return self, [pod for pod in self.pods.values() if node in (None, pod.node)]

    def _bind(self, binding: Binding) -> "tuple[World, None]":
        pod = self._guarded(binding.name, binding.uid, binding.resource_version)
        if pod.node:
            raise StoreConflict(f"pod {binding.name} is already assigned to node {pod.node}")
        annotations = {**(pod.metadata.annotations or {}), **binding.annotations}
        metadata = changed(pod.metadata, annotations=annotations)
        spec = changed(pod.spec, node_name=binding.node)
        return self.with_pod(changed(pod, metadata=metadata, spec=spec)), None

    def _touch_pod(self, pod: Pod, value: str) -> "tuple[World, Pod]":
        held = self._guarded(pod.metadata.name, pod.metadata.uid, pod.metadata.resource_version)
        if held.annotation(TOUCHED) == value:
            return self, held
        annotations = {**(held.metadata.annotations or {}), TOUCHED: value}
        after = self.with_pod(
            changed(held, metadata=changed(held.metadata, annotations=annotations))
        )
        return after, after.pods[pod.metadata.name]

    def _guarded(self, name: str, uid: str, version: str) -> Pod:
        """Return the pod. Raise an error unless the pod has this UID and version."""
        held = self.pods.get(name)
        if held is None:
            raise StoreNotFound(f"pod {name} does not exist")
        if held.metadata.uid != uid or version not in (ANY, held.metadata.resource_version):
            raise StoreConflict(f"pod {name} was changed by another client")
        return held


class Seam:
    """A ``SyncStore`` that passes every call to one function."""

    def __init__(self, call: Callable[[Call], Any]) -> None:
        self._call = call

    def read_gpunode(self, name: str) -> GPUNode | None:
        found: GPUNode | None = self._call(Call("read_gpunode", (name,)))
        return found

    def create_gpunode(self, gpunode: GPUNode) -> GPUNode:
        created: GPUNode = self._call(Call("create_gpunode", (gpunode,)))
        return created

    def write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        written: GPUNode = self._call(Call("write_spec", (before, spec)))
        return written

    def read_heartbeat_version(self, node: str) -> str:
        raise AssertionError("no actor of the model looks for the proof that a pod has left")

    def read_pod(self, namespace: str, name: str) -> Pod | None:
        found: Pod | None = self._call(Call("read_pod", (namespace, name)))
        return found

    def list_pods(self, node: str | None = None) -> list[Pod]:
        found: list[Pod] = self._call(Call("list_pods", (node,)))
        return found

    def bind(self, binding: Binding) -> None:
        self._call(Call("bind", (binding,)))

    def touch_pod(self, pod: Pod, value: str, key: str = TOUCHED) -> Pod:
        touched: Pod = self._call(Call("touch_pod", (pod, value)))
        return touched


def again(answer: Any) -> Any:
    """Return the response. If it is an error, raise a copy, because an exception records where it
    was raised.
    """
    if isinstance(answer, StoreError):
        raise type(answer)(*answer.args)
    return answer


class WorldStore(Seam):
    """A store that applies each call to its current world."""

    def __init__(self, world: World) -> None:
        super().__init__(self._perform)
        self.world = world
        self._lock = threading.Lock()

    def _perform(self, call: Call) -> Any:
        with self._lock:
            self.world, answer = self.world.perform(call)
        return again(answer)
