"""Changes reports for the simulation, so that devices become idle, shared or allocated."""

from collections.abc import Iterable, Mapping
from math import inf

import msgspec

from headroom.contract.gpunode import Charge, Device, GPUNodeStatus, PodUse, Replicas
from headroom.contract.reasons import Reason
from headroom.core.placement.snapshot import NodeTerms

#: Temporary reasons, which do not apply to an added node even if they apply to its model node.
_PASSING = frozenset({Reason.EVICTED_RECENTLY})


def shared_resources(status: GPUNodeStatus) -> set[str]:
    """Return the resources with shared devices, because these can be steered."""
    return {each.resource for each in status.devices if each.sharing != "none" and each.resource}


def allocated(device: Device, count: int) -> Device:
    """Return the device with ``count`` more of its free replicas allocated."""
    replicas = device.replicas
    taken = msgspec.structs.replace(
        replicas, free=replicas.free - count, allocated=replicas.allocated + count
    )
    return msgspec.structs.replace(device, replicas=taken)


def with_pod(
    status: GPUNodeStatus, uid: str, count_of: Mapping[str, int], used_bytes: int = 0
) -> GPUNodeStatus:
    """Return the report after the pod has got its replicas of these devices (by UUID).

    The pod uses ``used_bytes`` of each device.
    """
    devices = [allocated(each, count_of.get(each.uuid, 0)) for each in status.devices]
    rows = [
        PodUse(uid=uid, device=device, replica=f"{device}::{uid}-{n}", used_bytes=used_bytes)
        for device, count in count_of.items()
        for n in range(count)
    ]
    return msgspec.structs.replace(status, devices=devices, pods=[*status.pods, *rows])


def chosen_replicas(charges: Iterable[Charge]) -> dict[str, int]:
    """Return the replicas of each device that Headroom chose for a pod, by UUID.

    The result is empty if the device plugin chooses.
    """
    return {uuid: count for each in charges for uuid, count in each.chosen_replicas.items()}


def idle(status: GPUNodeStatus, suffix: str) -> GPUNodeStatus:
    """Return the status of another machine with the same devices, all of them healthy and idle."""
    devices = [
        msgspec.structs.replace(
            device,
            uuid=device.uuid + suffix,
            parent=device.parent + suffix if device.parent else device.parent,
            used_bytes=min(device.used_bytes, 0),
            unattributed_bytes=0,
            sm_activity=None,
            healthy=device.memory_bytes > 0,
            health_reason=device.health_reason if device.memory_bytes <= 0 else "",
            replicas=Replicas(free=device.replicas.total),
        )
        for device in status.devices
    ]
    return msgspec.structs.replace(status, devices=devices, pods=[], unattributed_processes=[])


def shared(device: Device, count: int) -> Device:
    """Return the device with ``count`` replicas. A count of 1 disables sharing.

    Raises ``ValueError`` if more than ``count`` replicas are in use or unhealthy.
    """
    replicas, sharing = device.replicas, device.sharing
    taken = replicas.allocated + replicas.unhealthy
    if taken > count:
        taken_replicas = "1 replica" if taken == 1 else f"{taken} replicas"
        raise ValueError(f"{device.uuid} has {taken_replicas} in use or unhealthy")
    if count == 1:
        sharing = "none"
    elif sharing == "none":
        sharing = "time-slicing"
    return msgspec.structs.replace(
        device, sharing=sharing, replicas=msgspec.structs.replace(replicas, free=count - taken)
    )


def as_added(terms: NodeTerms, name: str) -> NodeTerms:
    """Return the terms of an added node, with a fresh report."""
    return msgspec.structs.replace(
        terms,
        name=name,
        reason=None if terms.reason in _PASSING else terms.reason,
        fresh_until_s=inf,
        ageing_from_s=inf,
        degraded=False,
    )
