"""Tracks kube-scheduler's allocations by DRA from DeviceClasses, ResourceSlices and ResourceClaims.

DRA can serve extended resources such as ``nvidia.com/gpu`` (KEP-5004, on by default in Kubernetes
1.36 and newer). If a DeviceClass names a resource, kube-scheduler serves it by DRA on each node on
which the resource is not allocatable. It creates a ResourceClaim for the pod, and writes the name
of the claim into the pod's status before it binds the pod.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headroom.contract.dra import (
    DRIVER,
    IMPLICIT_RESOURCE,
    AllocatedDevice,
    DeviceClass,
    ResourceClaim,
    uuid_of,
)
from headroom.contract.errors import BadQuantity
from headroom.contract.kube import Pod, ResourceSlice
from headroom.contract.quantity import parse_bytes
from headroom.contract.watched import (
    ClaimGone,
    ClaimSeen,
    ClassGone,
    ClassSeen,
    DraEvent,
    SliceGone,
    SliceSeen,
)
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import replicas_requested

#: Namespace and name of a claim.
ClaimKey = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Slice:
    node: str
    pool: str
    #: UUID of each device by name.
    uuids: Mapping[str, str]


class DraAllocation:
    """The DeviceClasses, the devices of NVIDIA's DRA driver, and the claims that hold them.

    Only one thread writes. Any thread may call ``resources``, ``held`` and ``nodes``, because
    values are replaced and never changed in place.
    """

    def __init__(self) -> None:
        #: Extended resources that a DeviceClass names.
        self.resources: frozenset[str] = frozenset()
        #: The resources that each DeviceClass serves.
        self._classes: dict[str, frozenset[str]] = {}
        self._slices: dict[str, _Slice] = {}
        #: The slices of each node.
        self._slices_on: dict[str, tuple[_Slice, ...]] = {}
        #: The devices that each claim holds, and the uids of its pods.
        self._claims: dict[ClaimKey, tuple[tuple[AllocatedDevice, ...], frozenset[str]]] = {}

    def nodes(self) -> set[str]:
        """Return the nodes with devices of the driver."""
        return set(self._slices_on)

    def held(self, pod: Pod, node: str) -> dict[str, int | None]:
        """Return the bytes that the pod holds on each device of the node for its extended
        resources.

        The keys are UUIDs, and the value is None for a whole device. The result is empty if the pod
        holds no devices or its claim is unknown.
        """
        key = pod.metadata.namespace, claim_name(pod)
        devices, _ = self._claims.get(key, ((), frozenset[str]()))
        found: dict[str, int | None] = {}
        for each in devices:
            if uuid := self._uuid(node, each):
                before, more = found.get(uuid, 0), _memory_bytes(each)
                found[uuid] = None if before is None or more is None else before + more
        return found

    def _uuid(self, node: str, device: AllocatedDevice) -> str:
        for piece in self._slices_on.get(node, ()):
            if piece.pool == device.pool and device.device in piece.uuids:
                return piece.uuids[device.device]
        return ""

    def known(self, kind: type) -> list[str] | list[ClaimKey]:
        """Return the keys of the objects of this kind that have an effect."""
        if kind is ResourceClaim:
            return list(self._claims)
        return list(self._classes if kind is DeviceClass else self._slices)

    def apply(self, event: DraEvent) -> tuple[set[str], set[str]]:
        """Apply a change. Return the affected nodes and the uids of the affected pods."""
        match event:
            case ClassSeen(device_class):
                return self._put_class(device_class.metadata.name, _served(device_class)), set()
            case ClassGone(name):
                return self._put_class(name, frozenset()), set()
            case SliceSeen(piece):
                return self._put_slice(piece), set()
            case SliceGone(name):
                return self._drop_slice(name), set()
            case ClaimSeen(claim):
                return set(), self._put_claim(claim)
            case ClaimGone(namespace, name):
                return set(), self._drop_claim(namespace, name)

    def _put_class(self, name: str, resources: frozenset[str]) -> set[str]:
        self._classes.pop(name, None)
        if resources:
            self._classes[name] = resources
        before = self.resources
        self.resources = frozenset[str]().union(*self._classes.values())
        return set() if self.resources == before else self.nodes()

    def _put_slice(self, piece: ResourceSlice) -> set[str]:
        name, node = piece.metadata.name, node_of(piece)
        changed = self._drop_slice(name)
        if node:
            uuids = {each.name: uuid_of(each) for each in piece.spec.devices or ()}
            self._slices[name] = held = _Slice(node, piece.spec.pool.name, uuids)
            self._slices_on[node] = (*self._slices_on.get(node, ()), held)
            changed.add(node)
        return changed

    def _drop_slice(self, name: str) -> set[str]:
        held = self._slices.pop(name, None)
        if held is None:
            return set()
        left = tuple(each for each in self._slices_on[held.node] if each is not held)
        if left:
            self._slices_on[held.node] = left
        else:
            del self._slices_on[held.node]
        return {held.node}

    def _put_claim(self, claim: ResourceClaim) -> set[str]:
        namespace, name, status = claim.metadata.namespace, claim.metadata.name, claim.status
        uids = self._drop_claim(namespace, name)
        if status is None or status.allocation is None:
            return uids
        results = status.allocation.devices.results or ()
        devices = tuple(r for r in results if r.driver == DRIVER and not r.admin_access)
        if devices:
            consumers = status.reserved_for or ()
            pods = frozenset(each.uid for each in consumers if each.resource == "pods")
            self._claims[namespace, name] = devices, pods
            uids |= pods
        return uids

    def _drop_claim(self, namespace: str, name: str) -> set[str]:
        _, uids = self._claims.pop((namespace, name), ((), frozenset[str]()))
        return set(uids)


def node_of(piece: ResourceSlice) -> str:
    """Return the node whose GPUs NVIDIA's DRA driver publishes in this slice, or an empty string if
    there is none."""
    spec = piece.spec
    if spec.driver != DRIVER or not spec.devices:
        return ""
    return spec.node_name or spec.pool.name


def holds_gpus_by_claim(pod: Pod, rules: Rules) -> bool:
    """Return whether a claim, and not a device plugin, serves all GPUs that the pod requests."""
    claimed = pod.status.extended_resource_claim_status if pod.status else None
    served = {each.resource_name for each in (claimed and claimed.request_mappings) or ()}
    wanted = replicas_requested(pod, rules).keys() if served else ()
    return bool(wanted) and served.issuperset(wanted)


def claim_name(pod: Pod) -> str:
    """Return the name of the claim that holds the pod's extended resources.

    It is empty if DRA serves none of them, or if kube-scheduler has not allocated them yet.
    """
    claimed = pod.status.extended_resource_claim_status if pod.status else None
    return claimed.resource_claim_name if claimed else ""


def _served(device_class: DeviceClass) -> frozenset[str]:
    """Return the extended resources that the devices of the class serve."""
    implicit = f"{IMPLICIT_RESOURCE}{device_class.metadata.name}"
    named = device_class.spec.extended_resource_name
    return frozenset({implicit, named} if named else {implicit})


def _memory_bytes(device: AllocatedDevice) -> int | None:
    """Return the memory that a claim holds of the device, or None for the whole device."""
    try:
        return None if device.memory is None else parse_bytes(device.memory)
    except BadQuantity:
        return None
