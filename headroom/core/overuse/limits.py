"""Computes the limits of a pod (``headroom.gpu/vram-limit``) on the devices of its node."""

from collections.abc import Mapping
from typing import Protocol

from headroom.contract.annotations import VRAM_LIMIT
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Pod
from headroom.core.placement.chosen_device import by_environment
from headroom.core.placement.device_accounting import first_of_each_memory
from headroom.core.placement.placement_record import limit_charges
from headroom.core.placement.request import Unreadable, VramRequest
from headroom.core.placement.snapshot import NodeTerms


class Requests(Protocol):
    def understand(self, pod: Pod) -> VramRequest | Unreadable: ...


def limits_bytes(
    cluster: Requests, pod: Pod, gpunode: GPUNode, node: NodeTerms
) -> Mapping[str, int]:
    """Return the pod's limit on each device of the node, in bytes by UUID.

    The limit of a pod with several containers is the sum of the limits of the containers that are
    on the device, like its reservation. The result is empty if the pod has no valid limit.
    """
    if pod.annotation(VRAM_LIMIT) is None or gpunode.status is None:
        return {}
    request = cluster.understand(pod)
    if not isinstance(request, VramRequest) or not request.limit_asks or not node.devices:
        return {}
    charges = limit_charges(
        request,
        [terms.device for terms in node.devices],
        node.devices[0].reserve_bytes,
        by_environment(request, node),
    )
    rows = [row for row in gpunode.status.pods if row.uid == pod.metadata.uid]
    found: dict[str, int] = {}
    for terms in first_of_each_memory(node.devices):
        device = terms.device
        matching = [each for each in charges if device.uuid in each.candidates] or charges
        # If several devices share the memory, all containers are assumed to use it.
        shown = rows if terms.sharers == 1 else ()
        found[device.uuid] = max(each.bytes_on(device.uuid, shown) for each in matching)
    return found
