"""Adds the memory of GPU pods as an extended resource that only ResourceQuotas count.

No node offers the resource, kube-scheduler ignores it (deploy/base/kube-scheduler.yaml), and the
kubelet drops resources that its node does not have. The API server counts it atomically for each
pod at creation, so there is no race between replicas (docs/design/adr/0044).

If an amount depends on the device, the amount on the largest device is counted. This is the device
in the setting ``largest_devices``, which agents cannot change, or else the largest device that an
agent reports. No pods are placed on devices that are larger than the setting, so at least the
memory that is reserved for a pod is counted. On each device, a pod may also use a tolerance beyond
its reservation without being evicted. At least this tolerance is counted, because many pods that
reserve one byte would otherwise evade their quota.
"""

from collections.abc import Mapping, Sequence

import numpy as np

from headroom.contract.annotations import COUNTED_VRAM, VRAM, Bytes
from headroom.contract.kube import Container, Pod
from headroom.contract.quantity import MAX_DEVICE_BYTES, format_bytes
from headroom.core.overuse.selection import TOLERANCE_BYTES
from headroom.core.placement.amounts import DeviceArrays, bytes_of, device_arrays
from headroom.core.placement.policy import LargestDevice
from headroom.core.placement.request import ContainerAsk, VramRequest
from headroom.core.rules.pod_requests import amount
from headroom.webhook.context import AdmissionContext, GpuNode
from headroom.webhook.json_patch import Draft, Where


def count(
    draft: Draft, requests_of: Mapping[Where, Sequence[ContainerAsk]], context: AdmissionContext
) -> None:
    """Let each container request the memory that it gets on all its devices together.

    An existing value is replaced, because it was copied from another pod or would let the pod evade
    its quota.
    """
    for where, requests in requests_of.items():
        counted_bytes = _counted_bytes(requests, context)
        declared_bytes = declared_amount(draft.container(where), COUNTED_VRAM)
        if counted_bytes and declared_bytes != counted_bytes:
            draft.limit(where, COUNTED_VRAM, format_bytes(counted_bytes))


def miscounted(pod: Pod, request: VramRequest) -> str:
    """Return the reason why a quota would count the memory of the pod incorrectly, or an empty
    string if it is counted correctly.

    If an amount depends on the device, any counted value is accepted, because the largest device
    may have changed since.
    """
    requests_of: dict[tuple[int | None, str], list[ContainerAsk]] = {}
    for ask in request.containers:
        requests_of.setdefault((ask.index, ask.name), []).append(ask)
    containers: list[tuple[int | None, Container]] = [*enumerate(pod.spec.containers or ())]
    containers += [(None, each) for each in pod.spec.init_containers or ()]
    for index, container in containers:
        if not (requests := requests_of.get((index, container.name))):
            continue
        declared_bytes = declared_amount(container, COUNTED_VRAM)
        name = f"container {container.name!r:.80}"
        if all(isinstance(ask.amount, Bytes) for ask in requests):
            counted_bytes = _counted_bytes(requests, _NO_NODES)
            if declared_bytes != counted_bytes:
                counts, asks = (format_bytes(each) for each in (declared_bytes, counted_bytes))
                return (
                    f"{name} counts as {counts} of {COUNTED_VRAM} in quotas, and {VRAM} requests "
                    f"{asks}: create the pod again to change it"
                )
        elif not declared_bytes:
            return (
                f"{name} cannot be counted in quotas: its memory depends on its device, and no "
                f"node reports a device of {requests[0].resource:.80} yet. Example of an amount: "
                f"{VRAM}: 8Gi"
            )
    return ""


_NO_NODES = AdmissionContext()


def _counted_bytes(requests: Sequence[ContainerAsk], context: AdmissionContext) -> int:
    """Return the bytes of a container on all its devices, or 0 if they depend on the device and no
    device is known."""
    total = 0
    for ask in requests:
        match ask.amount:
            case Bytes(count_bytes):
                largest = count_bytes
            case _:
                largest = _by_setting(ask, context.rules.largest_devices) or max(
                    (_by_reports(ask, node) for node in context.nodes), default=0
                )
        if not largest:
            return 0
        total += max(largest, TOLERANCE_BYTES) * ask.count
    return total


def _by_setting(ask: ContainerAsk, largest: Sequence[LargestDevice]) -> int:
    """Return the most bytes that one replica can use on the largest device in the setting, or 0 if
    the setting has no device."""
    devices = [each for each in largest if each.resource == ask.resource]
    if not devices:
        return 0
    flags = np.ones(len(devices), np.bool_)
    arrays = DeviceArrays(
        allocatable_bytes=np.array([each.memory_bytes for each in devices], np.int64),
        replicas=np.array([each.replicas for each in devices], np.int64),
        common=flags,
        sharers=np.ones(len(devices), np.int64),
        mps=flags,  # the worst case, because the processes of a pod use the most memory with MPS
    )
    return int(bytes_of(ask.amount, 1, arrays).max())


def _by_reports(ask: ContainerAsk, node: GpuNode) -> int:
    """Return the most bytes that one replica can use on a device of the node.

    Devices with implausible values are ignored, because no pods are placed on them.
    """
    devices = node.devices(ask.resource)
    arrays = device_arrays(devices, 0)
    sizes = bytes_of(ask.amount, 1, arrays)[arrays.allocatable_bytes < MAX_DEVICE_BYTES]
    return int(sizes.max(initial=0))


def declared_amount(container: Container, resource: str) -> int:
    """Return the amount that quotas count for the container, or 0 if its request and its limit
    differ."""
    resources = container.resources
    limits = (resources and resources.limits) or {}
    requests = (resources and resources.requests) or {}
    declared = {amount(each[resource]) for each in (limits, requests) if resource in each}
    return int(declared.pop()) if len(declared) == 1 else 0
