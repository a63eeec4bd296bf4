"""What a pod's request comes to in MiB, as others count: limits of the driver and of MPS, and the
extended resource of the in-tree mirror.

A request in bytes is known before the pod has a device; a share of one, or what a replica is worth,
is not. Limits are rounded down, so that those of one device never add up to more than was promised
of it; what the mirror counts is rounded up, so that it never promises more than there is.
"""

from collections.abc import Sequence

from contract.annotations import Bytes
from extender.admission.context import GpuNode
from extender.placement.policy import MIB
from extender.placement.request import ContainerAsk

#: First driver with limits of memory by cgroup.
LIMITING_DRIVER = 615
#: Name of the source of an agent that reads them.
LIMITS_SOURCE = "limits"


def mirrored_mib(asks: Sequence[ContainerAsk]) -> int | None:
    """Of all devices of one container; None where an amount is not known yet."""
    total = 0
    for ask in asks:
        if not isinstance(ask.amount, Bytes):
            return None
        total += -(-ask.amount.count_bytes // MIB) * ask.count
    return total


def cap_mib(asks: Sequence[ContainerAsk], places: Sequence[GpuNode]) -> int | None:
    """Of each device of a container, where every node that it could go to can hold it to that."""
    amount = _single(asks)
    if amount is None or not places or not all(_caps(place, asks[0].resource) for place in places):
        return None
    return amount // MIB or None


def mps_mib(asks: Sequence[ContainerAsk], places: Sequence[GpuNode], processes: int) -> int | None:
    """Of each process of a container on the one device that it sees; None unless that is less than
    MPS allows it anyway, on every device that it could be given: a larger one would be ignored."""
    amount = _single(asks)
    if amount is None or asks[0].count != 1 or not places:
        return None
    each_mib = amount // processes // MIB
    for place in places:
        devices = place.devices(asks[0].resource)
        if not devices or any(device.sharing != "mps" for device in devices):
            return None
        if any(d.memory_bytes // max(d.replicas.total, 1) // MIB <= each_mib for d in devices):
            return None
    return each_mib or None


def _single(asks: Sequence[ContainerAsk]) -> int | None:
    """Bytes of each device, of a container that asks for one resource by an amount."""
    if len(asks) != 1 or not isinstance(asks[0].amount, Bytes):
        return None
    return asks[0].amount.count_bytes


def _caps(place: GpuNode, resource: str) -> bool:
    """As far as its agent sees: the driver, cgroups of version 2, devices handed over by CDI, and
    none of them MIG. The versions of toolkit and plugin it does not see."""
    status = place.status
    if status is None:
        return False
    major = status.driver_version.partition(".")[0]
    devices = place.devices(resource)
    return (
        major.isdecimal()
        and len(major) < 6
        and int(major) >= LIMITING_DRIVER
        and any(each.name == LIMITS_SOURCE and each.state == "ok" for each in status.sources)
        and "cdi" in status.plugin.device_list_strategy
        and bool(devices)
        and all(device.kind == "gpu" for device in devices)
    )
