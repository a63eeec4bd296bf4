"""Finds nodes with so much free memory that a pod fits beside assumed binds in any case.

Filter asks this for every pod of a burst. To compute what the device plugin could do with the
assumed binds takes it a millisecond, and is needed only on nodes that are nearly full.
"""

from collections.abc import Sequence

from contract.annotations import Bytes
from extender.placement.request import VramRequest
from extender.placement.snapshot import NodeTerms
from extender.placement.visible_devices import Visible


def certainly_fits(request: VramRequest, node: NodeTerms, assumed: Sequence[VramRequest]) -> bool:
    """Return whether the pod fits on the node, whichever devices it and ``assumed`` get.

    ``request`` fits on ``node`` without the pods ``assumed``. False if that is not certain.
    """
    if request.max_sm_ppm is not None:
        return False
    need_bytes = 0
    for each in (request, *assumed):
        most_bytes = _most_bytes(each)
        if most_bytes is None:
            return False
        need_bytes += most_bytes
    return all(
        terms.certain_free_bytes >= need_bytes
        # Any of these could reject the pod on a device that is no candidate without ``assumed``.
        and terms.health_issue is None
        and terms.policy != "steered"
        and terms.device.sharing != "mps"
        for terms in node.devices
    ) and _has_replicas(request, node, assumed)


def _has_replicas(request: VramRequest, node: NodeTerms, assumed: Sequence[VramRequest]) -> bool:
    for ask in request.asks:
        devices = [terms for terms in node.devices if terms.device.resource == ask.resource]
        free = sum([terms.device.replicas.free for terms in devices])
        unconfirmed = max([terms.unconfirmed_replicas for terms in devices], default=0)
        others = [other for each in assumed for other in each.asks]
        taken = sum([other.count for other in others if other.resource == ask.resource])
        if free - unconfirmed - taken < ask.count:
            return False
    return True


def _most_bytes(request: VramRequest) -> int | None:
    """Return the most bytes that the pod can take of any memory; None if devices decide that."""
    if request.visible is not Visible.BY_PLUGIN or any(ask.widest > 1 for ask in request.asks):
        return None
    most_bytes = 0
    for ask in request.asks:
        phases: list[int] = []
        for phase in ask.phases:
            sizes = [
                portion.amount.count_bytes * portion.count
                for portion in phase
                if isinstance(portion.amount, Bytes)
            ]
            if len(sizes) < len(phase):
                return None
            phases.append(sum(sizes))
        most_bytes += max(phases)
    return most_bytes
