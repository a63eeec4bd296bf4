"""What a pod is charged that sits on a node without our promise: bound by somebody else, or static.

It is charged as if it had asked us, on every device that it could have been given; the truth is
charged even when that overcommits.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from contract.gpunode import MAX_DEVICE_BYTES, Charge, Device, Reservation
from contract.kube import Pod
from extender.placement.amounts import largest
from extender.placement.request import Unreadable, VramRequest, understand
from extender.placement.rules import Rules

ADOPTED = "adopted"


def adopt(
    pod: Pod, default_vram: str | None, devices: Sequence[Device], reserve_bytes: int, rules: Rules
) -> Reservation:
    """The reservation of a pod that never asked for one, on a node with these devices.

    What cannot be read in its annotations is charged as what its replicas are worth.
    """
    request = understand(pod, default_vram, rules)
    if isinstance(request, Unreadable):
        bare = msgspec.structs.replace(pod.metadata, annotations=None)
        request = understand(
            msgspec.structs.replace(pod, metadata=bare), None, Rules(rules.resources)
        )
    charges = _charges(request, devices, reserve_bytes) if isinstance(request, VramRequest) else []
    return Reservation(
        namespace=pod.metadata.namespace, name=pod.metadata.name, charges=charges, flags=[ADOPTED]
    )


def _charges(request: VramRequest, devices: Sequence[Device], reserve_bytes: int) -> list[Charge]:
    charges: list[Charge] = []
    for ask in request.asks:
        candidates: dict[str, int] = {}
        for device in devices:
            if device.resource == ask.resource:
                left = device.memory_bytes - device.reserved_bytes - reserve_bytes
                allocatable = np.array([max(0, left)], np.int64)
                replicas = np.array([device.replicas.total], np.int64)
                shared = device.sharing != "none"
                worst = int(largest(ask, allocatable, replicas, shared)[0])
                candidates[device.uuid] = min(worst, MAX_DEVICE_BYTES)
        charges.append(Charge(resource=ask.resource, count=ask.count, candidates=candidates))
    return charges
