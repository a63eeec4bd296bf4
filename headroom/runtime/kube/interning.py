"""Shares equal parts of objects in memory, for example of pods of one Deployment or nodes of one
pool.

If a fleet has many equal objects, this saves a fifth of the process's memory. Because decoded
objects are never changed, nothing else can observe the sharing."""

from collections.abc import Mapping
from hashlib import blake2b
from sys import intern
from typing import Any, TypeVar
from weakref import WeakValueDictionary

import msgspec
from msgspec.structs import force_setattr, replace

from headroom.contract.gpunode import GPUNode, GPUNodeSpec, GPUNodeStatus
from headroom.contract.gpunode_json import decode_gpunode
from headroom.contract.kube import KubeStruct, Node, ObjectMeta, Pod

T = TypeVar("T")

#: Maximum number of values that one ``Interned`` keeps, and maximum bytes of their JSON. When a
#: limit is reached, all kept values are dropped.
MOST_KEPT = 4096
MAX_KEPT_BYTES = 1 << 20
#: Longer values are not shared, because the values of large Deployments are short.
MAX_VALUE_BYTES = 16 << 10


class Interned:
    """Shares equal values of one type. Only one thread may use it."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Any] = {}
        #: Length of the JSON of all kept values.
        self._kept_bytes = 0

    def one(self, value: T) -> T:
        """Return an equal value that was passed before if it is kept, otherwise ``value``."""
        if not value:
            return value
        encoded = msgspec.json.encode(value)
        if len(encoded) > MAX_VALUE_BYTES:
            return value
        kept: T | None = self._kept.get(encoded)
        if kept is not None:
            return kept
        if len(self._kept) >= MOST_KEPT or self._kept_bytes + len(encoded) > MAX_KEPT_BYTES:
            self._kept.clear()
            self._kept_bytes = 0
        self._kept[encoded] = value
        self._kept_bytes += len(encoded)
        return value


class Pods:
    """Shares parts of pods. Only one thread may use it."""

    def __init__(self) -> None:
        self._labels, self._containers, self._tolerations = Interned(), Interned(), Interned()
        self._affinities = Interned()

    def share(self, pod: Pod) -> Pod:
        """Change the pod in place so that it shares parts with earlier pods, and return it."""
        metadata, spec, status = pod.metadata, pod.spec, pod.status
        _intern(metadata, "uid", "namespace", "name")
        force_setattr(metadata, "labels", self._labels.one(metadata.labels))
        for field in ("containers", "init_containers"):
            force_setattr(spec, field, self._containers.one(getattr(spec, field)))
        force_setattr(spec, "tolerations", self._tolerations.one(spec.tolerations))
        force_setattr(spec, "affinity", self._affinities.one(spec.affinity))
        _intern(spec, "scheduler_name", "node_name")
        if status is not None:
            _intern(status, "phase")
        return pod


class Nodes:
    """Shares parts of nodes. Only one thread may use it."""

    def __init__(self) -> None:
        self._allocatable = Interned()

    def share(self, node: Node) -> Node:
        """Return an equal node with interned label keys and values, and a shared ``allocatable``.

        The mapping of labels itself is not shared, because its content differs for each node.
        """
        if node.status is not None:
            force_setattr(
                node.status, "allocatable", self._allocatable.one(node.status.allocatable)
            )
        labels = _interned_labels(node.metadata.labels)
        return replace(node, metadata=replace(node.metadata, labels=labels))


def share_report(status: GPUNodeStatus) -> None:
    """Intern, in place, the strings of a report that many objects have in common.

    Names and uids of pods are left out: thousands of reports arrive each second, and interning
    these strings would save little memory."""
    for device in status.devices:
        force_setattr(device, "uuid", intern(device.uuid))
        force_setattr(device, "model", intern(device.model))
        force_setattr(device, "resource", intern(device.resource))
        force_setattr(device, "architecture", intern(device.architecture))
        force_setattr(device, "compute_mode", intern(device.compute_mode))
    for use in status.pods:
        force_setattr(use, "device", intern(use.device))
        force_setattr(use, "namespace", intern(use.namespace))
        force_setattr(use, "container", intern(use.container))
        force_setattr(use, "source", intern(use.source))


def share_reservations(spec: GPUNodeSpec) -> None:
    """Intern, in place, the names, resources, pod uids and device UUIDs of all reservations."""
    for reservation in spec.reservations.values():
        _intern(reservation, "namespace", "name")
        for charge in reservation.charges:
            _intern(charge, "resource")
            force_setattr(charge, "candidates", _with_interned_keys(charge.candidates))
            for container in charge.containers:
                _intern(container, "name")
    force_setattr(spec, "reservations", _with_interned_keys(spec.reservations))


def _with_interned_keys(of: Mapping[str, T]) -> dict[str, T]:
    return {intern(key): value for key, value in of.items()}


def _intern(of: msgspec.Struct, *fields: str) -> None:
    for field in fields:
        if text := getattr(of, field):
            force_setattr(of, field, intern(text))


def _interned_labels(of: Mapping[str, str] | None) -> Mapping[str, str] | None:
    return of and {intern(key): intern(text) for key, text in of.items()}


class _RawParts(KubeStruct, frozen=True):
    metadata: ObjectMeta
    spec: msgspec.Raw = msgspec.Raw(b"{}")
    status: msgspec.Raw = msgspec.Raw(b"null")


_parts_decoder = msgspec.json.Decoder(_RawParts)
_spec_decoder = msgspec.json.Decoder(GPUNodeSpec)
_status_decoder = msgspec.json.Decoder(GPUNodeStatus | None)


class GPUNodeReader:
    """Decodes GPUNodes. Only one thread may use it.

    Most new versions of a GPUNode have a new report but an unchanged spec. If the spec object of an
    earlier version is still in use, the reader returns the same object, so that later code can
    compare identities.
    """

    def __init__(self) -> None:
        #: Digest of a spec's JSON -> the spec object.
        self._specs = WeakValueDictionary[bytes, GPUNodeSpec]()

    def read(self, body: bytes | msgspec.Raw) -> GPUNode:
        """Return an object equal to the result of ``decode_gpunode``. Raises the same errors."""
        try:
            parts = _parts_decoder.decode(body)
            digest = blake2b(parts.spec, digest_size=16).digest()
            spec = self._specs.get(digest)
            if spec is None:
                spec = self._specs[digest] = _spec_decoder.decode(parts.spec)
                share_reservations(spec)
            status = _status_decoder.decode(parts.status)
        except (ValueError, RecursionError):
            return decode_gpunode(body)  # raises an error that names the field
        if status is not None:
            share_report(status)
        return GPUNode(metadata=parts.metadata, spec=spec, status=status)
