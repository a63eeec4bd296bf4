"""What a pod is charged that sits on a node without our promise: bound by somebody else, or static.

It is charged as if it had asked us, on every device that it could have been given; the truth is
charged even when that overcommits. One that chooses its devices itself, on a node that may obey it,
is charged on every device of the node, and one that follows a placement on those that it names.
"""

from collections.abc import Sequence, Set
from dataclasses import replace

import msgspec
import numpy as np

from contract.annotations import DEVICES
from contract.gpunode import ADOPTED, MAX_DEVICE_BYTES, Charge, Device, Reservation
from contract.kube import Pod
from contract.pod_limits import MAX_CONTAINERS, container_count
from extender.placement.amounts import DeviceArrays, device_arrays, needed
from extender.placement.policy import Rules
from extender.placement.request import Unreadable, VramRequest, replicas_requested, understand
from extender.placement.visible_devices import Visible, followed
from extender.state.request_drift import asked


def adopt(
    pod: Pod,
    default_vram: str | None,
    devices: Sequence[Device],
    reserve_bytes: int,
    rules: Rules,
    obeys_environment: bool = False,
) -> Reservation:
    """The reservation of a pod that never asked for one, on a node with these devices.

    ``obeys_environment``: whether the pod's own variable may decide which of them it sees.
    What cannot be read in its annotations is charged as what its replicas are worth, and a pod with
    more than ``MAX_CONTAINERS`` the whole memory of every device that it could get.
    """
    if container_count(pod) > MAX_CONTAINERS:
        return _adopted(pod, _all_memory(pod, devices, rules))
    request = understand(pod, default_vram, rules, enforce_limits=False)
    if isinstance(request, Unreadable):
        bare = msgspec.structs.replace(pod.metadata, annotations=None)
        request = understand(
            msgspec.structs.replace(pod, metadata=bare),
            None,
            replace(rules, reject_unannotated=False),
            enforce_limits=False,
        )
    places = device_arrays(devices, reserve_bytes)
    charges: list[Charge] = []
    if isinstance(request, VramRequest):
        by_itself = obeys_environment and request.visible is not Visible.BY_PLUGIN
        charges = _charges(request, devices, places, _named(pod, devices) if by_itself else None)
    return _adopted(pod, charges)


def _adopted(pod: Pod, charges: list[Charge]) -> Reservation:
    return Reservation(
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        charges=charges,
        flags=[ADOPTED],
        asked=asked(pod),
    )


def _all_memory(pod: Pod, devices: Sequence[Device], rules: Rules) -> list[Charge]:
    charges: list[Charge] = []
    for resource, count in replicas_requested(pod, rules).items():
        could = [device for device in devices if device.resource == resource]
        whole = {device.uuid: min(device.memory_bytes, MAX_DEVICE_BYTES) for device in could}
        charges.append(Charge(resource=resource, count=count, candidates=whole))
    return charges


def _named(pod: Pod, devices: Sequence[Device]) -> set[str]:
    """The devices that the placement names which its containers follow; all where none is named."""
    containers = [*(pod.spec.init_containers or ()), *(pod.spec.containers or ())]
    texts = [pod.annotation(f"{DEVICES}{index}") or "" for index in followed(containers)]
    uuids = {device.uuid for device in devices}
    return {uuid for text in texts for uuid in text.split(",")} & uuids or uuids


def _charges(
    request: VramRequest, devices: Sequence[Device], places: DeviceArrays, certain: Set[str] | None
) -> list[Charge]:
    """``certain`` are the devices on which it is charged wherever its replicas are; None: those of
    the plugin's choice."""
    charges: list[Charge] = []
    if certain is not None:
        # All containers may be on each of them, and on all that share a memory.
        places = replace(places, common=np.ones_like(places.common))
    for ask in request.asks:
        need = needed(ask, request.asks, places)
        if certain is not None:
            need = need * np.maximum(places.sharers, 1)
        worst = np.minimum(need, MAX_DEVICE_BYTES).tolist()
        candidates = {
            device.uuid: worst_bytes
            for device, worst_bytes in zip(devices, worst, strict=True)
            if (device.resource == ask.resource if certain is None else device.uuid in certain)
        }
        charges.append(
            Charge(
                resource=ask.resource,
                count=ask.count,
                candidates=candidates,
                by_environment=certain is not None,
            )
        )
    return charges
