"""The fields that Headroom reads and writes in DRA's claims, devices, DeviceClasses and
DeviceTaintRules.

The fields are the same in all versions of resource.k8s.io, except that v1beta1 has the attributes
of a device under ``basic``.
"""

from collections.abc import Mapping

import msgspec

from headroom.contract.kube import KubeStruct, ObjectMeta, Pod, SliceDevice

#: Name of NVIDIA's DRA driver.
DRIVER = "gpu.nvidia.com"
_UUID = ("uuid", f"{DRIVER}/uuid")
_MEMORY = ("memory", f"{DRIVER}/memory")

#: Prefix of the extended resource that each DeviceClass has even if it names none. The name of the
#: class follows the prefix. kube-scheduler does not accept such names in ``managedResources``.
IMPLICIT_RESOURCE = "deviceclass.resource.kubernetes.io/"
#: The implicit resources of the classes for GPUs and MIG devices that NVIDIA's driver installs.
IMPLICIT_GPU_RESOURCES = (
    f"{IMPLICIT_RESOURCE}{DRIVER}",
    f"{IMPLICIT_RESOURCE}mig.nvidia.com",
)

NO_SCHEDULE = "NoSchedule"
#: Label of the DeviceTaintRules that Headroom writes. Headroom never deletes other rules.
MANAGED_BY, MANAGER = "app.kubernetes.io/managed-by", "headroom-device-taints"


def implicit_gpu_resources(pod: Pod) -> list[str]:
    """Return the resources of ``IMPLICIT_GPU_RESOURCES`` that the pod requests."""
    containers = (*(pod.spec.init_containers or ()), *(pod.spec.containers or ()))
    requested: set[str] = set()
    for each in containers:
        if each.resources is not None:
            requested.update(each.resources.requests or (), each.resources.limits or ())
    return [name for name in IMPLICIT_GPU_RESOURCES if name in requested]


def uuid_of(device: SliceDevice) -> str:
    """Return the UUID that the driver publishes for a device, or an empty string if there is
    none."""
    attributes = device.attributes or (device.basic and device.basic.attributes) or {}
    for name in _UUID:
        if (attribute := attributes.get(name)) is not None and attribute.string:
            return attribute.string
    return ""


class AllocatedDevice(KubeStruct, frozen=True):
    """A device, or a part of its capacity, that a claim holds."""

    driver: str = ""
    pool: str = ""
    device: str = ""
    #: Consumed quantity of each capacity. Empty if the claim holds the whole device.
    consumed_capacity: Mapping[str, str | int] | None = None
    #: If True, the claim only observes a device that other claims hold, and consumes nothing.
    admin_access: bool | None = None

    @property
    def memory(self) -> str | None:
        """The quantity of memory that the claim consumes, or None if it consumes the whole
        device."""
        consumed = self.consumed_capacity or {}
        text = next((consumed[name] for name in _MEMORY if name in consumed), None)
        return None if text is None else str(text)


class AllocatedDevices(KubeStruct, frozen=True):
    results: list[AllocatedDevice] | None = None


class Allocation(KubeStruct, frozen=True):
    devices: AllocatedDevices = AllocatedDevices()


class Consumer(KubeStruct, frozen=True):
    """A pod that may use the claim. ``resource`` is "pods"."""

    resource: str = ""
    name: str = ""
    uid: str = ""


class ClaimStatus(KubeStruct, frozen=True):
    allocation: Allocation | None = None
    reserved_for: list[Consumer] | None = None


class ResourceClaim(KubeStruct, frozen=True):
    metadata: ObjectMeta
    status: ClaimStatus | None = None


class DeviceClassSpec(KubeStruct, frozen=True):
    #: The extended resource that devices of the class serve, such as nvidia.com/gpu.
    extended_resource_name: str | None = None


class DeviceClass(KubeStruct, frozen=True):
    """A class of devices that pods can claim, or request as an extended resource."""

    metadata: ObjectMeta
    spec: DeviceClassSpec = DeviceClassSpec()


class DeviceSelector(KubeStruct, frozen=True):
    driver: str | None = None
    pool: str | None = None
    device: str | None = None


class DeviceTaint(KubeStruct, frozen=True):
    key: str
    value: str
    effect: str


class DeviceTaintRuleSpec(KubeStruct, frozen=True):
    taint: DeviceTaint
    device_selector: DeviceSelector | None = None


class DeviceTaintRule(KubeStruct, frozen=True):
    """Taints the selected devices, so that no new claims get them."""

    metadata: ObjectMeta
    spec: DeviceTaintRuleSpec
    # Factories, because msgspec would omit plain defaults.
    kind: str = msgspec.field(default_factory=lambda: "DeviceTaintRule")
    api_version: str = msgspec.field(default="")
