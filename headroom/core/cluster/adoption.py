"""Reads what pods request, and computes reservations for unreserved pods: pods bound by another
scheduler, and static pods.

The reservation charges each device that the device plugin could have given to the pod, as if
Headroom had bound the pod. It may overcommit a device, because the pod already uses the node.

A pod that sets ``NVIDIA_VISIBLE_DEVICES`` itself is charged on every device of the node, if the
variable may take effect there.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import msgspec

from headroom.contract.dra import DRIVER
from headroom.contract.gpunode import (
    ADOPTED,
    CLAIMED,
    STARTING,
    Charge,
    Device,
    GPUNode,
    GPUNodeStatus,
    Reservation,
)
from headroom.contract.kube import Node, Pod
from headroom.contract.pod_limits import MAX_CONTAINERS, container_count
from headroom.contract.quantity import MAX_DEVICE_BYTES
from headroom.contract.reasons import Reason
from headroom.core.cluster.dra_allocation import holds_gpus_by_claim
from headroom.core.cluster.node_settings import NodeSettings, has_allocatable
from headroom.core.cluster.object_cache import Namespaces, ObjectCache
from headroom.core.cluster.trackers.foreign_allocators import ForeignAllocators
from headroom.core.cluster.trackers.request_drift import as_bound, asked
from headroom.core.placement.amounts import DeviceArrays, device_arrays
from headroom.core.placement.dra_nodes import suits_dra
from headroom.core.placement.placement_record import possible_charges
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import (
    Unreadable,
    VramRequest,
    asks_for_gpu,
    replicas_requested,
)
from headroom.core.placement.request_reader import RequestReader
from headroom.core.placement.visible_devices import Visible


@dataclass(frozen=True)
class AdoptingNode:
    """The facts about a node on which the reservations of its unreserved pods depend."""

    name: str
    devices: Sequence[Device]
    reserve_bytes: int
    #: Whether ``NVIDIA_VISIBLE_DEVICES`` of a pod may decide which devices the pod sees.
    obeys_environment: bool = False
    #: Resources that kube-scheduler allocates there by DRA, without a device plugin.
    by_dra: frozenset[str] = frozenset()
    #: The reason that names the foreign allocator of its GPUs, or None if there is none.
    manager: Reason | None = None

    @cached_property
    def arrays(self) -> DeviceArrays:
        """The devices as arrays, computed once for all unreserved pods of the node."""
        return device_arrays(self.devices, self.reserve_bytes)


class Adoption:
    """Reads the requests of pods, and decides which unreserved pods get which reservation.

    Any thread may call the methods, because they change nothing.
    """

    def __init__(
        self,
        rules: Rules,
        objects: ObjectCache,
        namespaces: Namespaces,
        allocators: ForeignAllocators,
    ) -> None:
        self.rules = rules
        self._objects = objects
        self._namespaces = namespaces
        self._allocators = allocators
        self._reader = RequestReader()

    def understand(self, pod: Pod) -> VramRequest | Unreadable:
        """Return the pod's request after the default of its namespace has been applied."""
        namespace, rules = pod.metadata.namespace, self.rules
        exempt = self._namespaces.are_exempt(namespace)
        if exempt and rules.reject_unannotated:
            rules = replace(rules, reject_unannotated=False)
        request = self._reader.read(pod, self._namespaces.default_vram(namespace), rules)
        if isinstance(request, Unreadable) or not request.asks:
            return request
        may_use_dra = exempt or suits_dra(request)
        return replace(request, may_use_dra=True) if may_use_dra else request

    def on(
        self,
        name: str,
        node: Node | None,
        status: GPUNodeStatus | None,
        settings: NodeSettings,
    ) -> AdoptingNode:
        """Return the facts about the node. ``status`` is its report from its agent or its
        labels."""
        manager = self._allocators.manager(name)
        return AdoptingNode(
            name,
            status.devices if status else (),
            settings.reserve_bytes,
            status is None or not status.plugin.ignores_visible_devices,
            self._by_dra(node, manager),
            manager,
        )

    def _by_dra(self, node: Node | None, manager: Reason | None) -> frozenset[str]:
        """Compute ``AdoptingNode.by_dra``."""
        if manager is not Reason.DRA_MANAGES or has_allocatable(node, self.rules):
            return frozenset()
        return self._allocators.allocation.resources

    def is_left_to_dra(self, pod: Pod) -> bool:
        """Return whether the bound pod needs no reservation, because kube-scheduler allocates its
        GPUs by DRA."""
        node, manager = self._objects.nodes.get(pod.node), self._allocators.manager(pod.node)
        return self._is_left_to_dra(pod, self._by_dra(node, manager))

    def _is_left_to_dra(self, pod: Pod, served: frozenset[str]) -> bool:
        if not served or (pod.node and not holds_gpus_by_claim(pod, self.rules)):
            return False
        request = self.understand(pod)
        if isinstance(request, Unreadable) or not request.may_use_dra:
            return False
        return all(ask.resource in served for ask in request.asks)

    def adopt(self, pod: Pod, node: AdoptingNode) -> Reservation | None:
        """Return the reservation to write for an unreserved pod on the node.

        Return None if the pod requests no GPU resource that Headroom manages, if kube-scheduler
        allocates its GPUs by DRA, or if the devices of its ResourceClaim are not known yet.
        """
        if not asks_for_gpu(pod, self.rules) or self._is_left_to_dra(pod, node.by_dra):
            return None
        if holds_gpus_by_claim(pod, self.rules):
            held = self._allocators.allocation.held(pod, node.name)
            return claimed(pod, held, node) if held else None
        by_dra = frozenset() if pod.node else node.by_dra
        if by_dra and by_dra >= replicas_requested(pod, self.rules).keys():
            return None  # kube-scheduler makes a claim for it
        default_vram = self._namespaces.default_vram(pod.metadata.namespace)
        return adopt(as_bound(pod), default_vram, node, self.rules, self._reader)

    def adopted(self, gpunode: GPUNode, node: AdoptingNode) -> dict[str, Reservation]:
        """Return the reservations to charge for pods that have none in exactly this version of the
        GPUNode. An earlier version may contain reservations that have been removed."""
        return {
            pod.metadata.uid: reservation
            for pod in self._objects.pods_on(gpunode.name)
            if pod.metadata.uid not in gpunode.spec.reservations
            and (reservation := self.adopt(pod, node)) is not None
        }


def adopt(
    pod: Pod, default_vram: str | None, node: AdoptingNode, rules: Rules, reader: RequestReader
) -> Reservation:
    """Return the reservation of an unreserved pod on the node.

    If the pod's annotations cannot be read, the pod is charged as if it had no annotations. A pod
    with more than ``MAX_CONTAINERS`` containers is charged the whole memory of every device that it
    could get.
    """
    if container_count(pod) > MAX_CONTAINERS:
        return _adopted(pod, _all_memory(pod, node.devices, rules))
    request = reader.read(pod, default_vram, rules, enforce_limits=False)
    if isinstance(request, Unreadable):
        bare = msgspec.structs.replace(pod.metadata, annotations=None)
        request = reader.read(
            msgspec.structs.replace(pod, metadata=bare),
            None,
            replace(rules, reject_unannotated=False),
            enforce_limits=False,
        )
    charges: list[Charge] = []
    start_timeout_s = 0
    if isinstance(request, VramRequest):
        start_timeout_s = request.start_timeout_s
        by_environment = node.obeys_environment and request.visible is not Visible.BY_PLUGIN
        charges = possible_charges(
            request, node.devices, node.reserve_bytes, node.arrays, by_environment
        )
    return _adopted(pod, charges, start_timeout_s)


def claimed(pod: Pod, held: Mapping[str, int | None], node: AdoptingNode) -> Reservation:
    """Return the reservation of a pod that holds GPUs by a ResourceClaim (DRA).

    It charges the memory that the claim holds on each device. ``held`` maps the UUID of each device
    to bytes, or to None for the whole device. Devices that the agent does not report are not
    charged.
    """
    allocatable = node.arrays.allocatable_bytes.tolist()
    candidates: dict[str, int] = {}
    for device, whole_bytes in zip(node.devices, allocatable, strict=True):
        if device.uuid in held:
            held_bytes = held[device.uuid]
            candidates[device.uuid] = whole_bytes if held_bytes is None else held_bytes
    # The pod is certain to have these devices, because the device plugin's choice does not matter.
    charge = Charge(
        resource=DRIVER, count=len(candidates), candidates=candidates, by_environment=True
    )
    reservation = _adopted(pod, [charge] if candidates else [])
    return msgspec.structs.replace(reservation, flags=[ADOPTED, CLAIMED])


def _adopted(pod: Pod, charges: list[Charge], start_timeout_s: int = 0) -> Reservation:
    return Reservation(
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        charges=charges,
        flags=[ADOPTED],
        asked=asked(pod),
        # Its start may have ended already. The next check of the node's starts detects that.
        phase=STARTING if start_timeout_s else "",
        start_timeout_s=start_timeout_s,
    )


def _all_memory(pod: Pod, devices: Sequence[Device], rules: Rules) -> list[Charge]:
    charges: list[Charge] = []
    for resource, count in replicas_requested(pod, rules).items():
        candidates = {
            device.uuid: min(device.memory_bytes, MAX_DEVICE_BYTES)
            for device in devices
            if device.resource == resource
        }
        charges.append(Charge(resource=resource, count=count, candidates=candidates))
    return charges
