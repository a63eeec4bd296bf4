"""Finds the pods that use a device without a reservation, from the report of the node."""

from collections import Counter
from collections.abc import Container, Iterable

from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.kube import Pod
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.occupancy import Holder
from headroom.core.placement.report_index import memories_of


def unreserved_pods(
    status: GPUNodeStatus | None, terms: DeviceTerms, pods: Iterable[Pod] = ()
) -> tuple[Holder, ...]:
    """Return the pods that use the memory of the device without a reservation, largest first.

    Namespace and name come from the report, or else from ``pods``, and are empty if both lack them.
    A pod whose use is 0 or unknown is left out.
    """
    if status is None or not terms.unreserved_pods_bytes:
        return ()
    uuids = _uuids_of_memory(status, terms.device.uuid)
    reserved = {each.uid for each in terms.holders}
    found = _used_bytes(status, uuids, reserved)
    names = {pod.metadata.uid: (pod.metadata.namespace, pod.metadata.name) for pod in pods}
    names |= {use.uid: (use.namespace, use.name) for use in status.pods if use.name}
    return tuple(
        Holder(uid, *names.get(uid, ("", "")), 0, used_bytes, observed=True)
        for uid, used_bytes in sorted(found.items(), key=lambda each: (-each[1], each[0]))
        if used_bytes > 0
    )


def _used_bytes(
    status: GPUNodeStatus, uuids: Container[str], reserved: Container[str]
) -> Counter[str]:
    found = Counter[str]()
    for use in status.pods:
        if use.device in uuids and use.uid not in reserved:
            found[use.uid] += max(0, use.used_bytes or 0)
    return found


def _uuids_of_memory(status: GPUNodeStatus, uuid: str) -> set[str]:
    """Return the UUIDs of the devices that share the memory of this device, including itself."""
    for device, memory in zip(status.devices, memories_of(status.devices), strict=True):
        if device.uuid == uuid:
            return {status.devices[slot].uuid for slot in memory}
    return {uuid}
