"""What many objects say alike is kept once: pods of one Deployment differ in their names, and nodes
of one pool in theirs. Of such a fleet it saves a fifth of what the process takes in memory.

What was decoded is not changed any more, so nobody can tell whether others have it too.
"""

from collections.abc import Mapping
from sys import intern
from typing import Any, TypeVar

import msgspec
from msgspec.structs import force_setattr, replace

from contract.gpunode import GPUNodeSpec, GPUNodeStatus
from contract.kube import Node, Pod

T = TypeVar("T")

#: Beyond this number of different values, or bytes of them as JSON, all are forgotten and kept
#: again as they come.
MOST_KEPT = 4096
MAX_KEPT_BYTES = 1 << 20
#: A longer value is never shared: objects of one Deployment are short, or they are few.
MAX_VALUE_BYTES = 16 << 10


class Alike:
    """Values of one type; for one thread."""

    def __init__(self) -> None:
        self._kept: dict[bytes, Any] = {}
        self._kept_bytes = 0

    def one(self, value: T) -> T:
        """An equal one, the same each time."""
        if not value:
            return value
        written = msgspec.json.encode(value)
        if len(written) > MAX_VALUE_BYTES:
            return value
        kept: T | None = self._kept.get(written)
        if kept is not None:
            return kept
        if len(self._kept) >= MOST_KEPT or self._kept_bytes + len(written) > MAX_KEPT_BYTES:
            self._kept.clear()
            self._kept_bytes = 0
        self._kept[written] = value
        self._kept_bytes += len(written)
        return value

    @property
    def kept(self) -> int:
        return len(self._kept)

    @property
    def kept_bytes(self) -> int:
        """Length of all values as JSON."""
        return self._kept_bytes


class Pods:
    def __init__(self) -> None:
        self._labels, self._containers, self._tolerations = Alike(), Alike(), Alike()
        self._affinities = Alike()

    def share(self, pod: Pod) -> Pod:
        """The same pod."""
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
    def __init__(self) -> None:
        self._allocatable = Alike()

    def share(self, node: Node) -> Node:
        """An equal node: its labels are written alike, and are not all the same."""
        if node.status is not None:
            force_setattr(
                node.status, "allocatable", self._allocatable.one(node.status.allocatable)
            )
        labels = _interned(node.metadata.labels)
        return replace(node, metadata=replace(node.metadata, labels=labels))


def share_report(status: GPUNodeStatus) -> None:
    """Not what names pods: thousands of reports come in a second, and it would gain little."""
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
    for reservation in spec.reservations.values():
        _intern(reservation, "namespace", "name")
        for charge in reservation.charges:
            _intern(charge, "resource")
            force_setattr(charge, "candidates", _keyed_alike(charge.candidates))
    force_setattr(spec, "reservations", _keyed_alike(spec.reservations))


def _keyed_alike(of: Mapping[str, T]) -> dict[str, T]:
    return {intern(key): value for key, value in of.items()}


def _intern(of: msgspec.Struct, *fields: str) -> None:
    for field in fields:
        if text := getattr(of, field):
            force_setattr(of, field, intern(text))


def _interned(of: Mapping[str, str] | None) -> Mapping[str, str] | None:
    return of and {intern(key): intern(text) for key, text in of.items()}
