"""What a pod is charged that sits on a node without our promise: bound by somebody else, or static.

It is charged as if it had asked us, on every device that it could have been given; the truth is
charged even when that overcommits.
"""

from collections.abc import Sequence

import msgspec
import numpy as np

from contract.gpunode import MAX_DEVICE_BYTES, Charge, Device, GPUNodeStatus, Reservation
from contract.kube import Pod
from extender.placement.amounts import needed, places_of
from extender.placement.equation import DeviceTerms, weigh
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
    terms = weigh(GPUNodeStatus(devices=list(devices)), {}, reserve_bytes, 0)
    charges = _charges(request, terms) if isinstance(request, VramRequest) else []
    return Reservation(
        namespace=pod.metadata.namespace, name=pod.metadata.name, charges=charges, flags=[ADOPTED]
    )


def _charges(request: VramRequest, terms: Sequence[DeviceTerms]) -> list[Charge]:
    charges: list[Charge] = []
    places = places_of(terms)
    for ask in request.asks:
        worst = np.minimum(needed(ask, request.asks, places), MAX_DEVICE_BYTES).tolist()
        candidates = {
            term.device.uuid: worst_bytes
            for term, worst_bytes in zip(terms, worst, strict=True)
            if term.device.resource == ask.resource
        }
        charges.append(Charge(resource=ask.resource, count=ask.count, candidates=candidates))
    return charges
