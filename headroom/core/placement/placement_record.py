"""Builds the record of a placement, which consists of the ledger's charges and the pod's
annotations."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from headroom.contract.annotations import (
    BYTES,
    DEVICES,
    FRACTION,
    LIMIT_BYTES,
    LIMIT_FRACTION,
    PLACEMENT,
)
from headroom.contract.gpunode import STARTING, Charge, ContainerCharge, Device, Reservation
from headroom.contract.quantity import MAX_DEVICE_BYTES
from headroom.core.placement.amounts import DeviceArrays, bytes_of, device_arrays, needed
from headroom.core.placement.chosen_device import by_environment
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.fit import AskVerdict, Verdicts
from headroom.core.placement.request import ContainerAsk, VramRequest
from headroom.core.placement.snapshot import NodeTerms, Snapshot

#: Maximum length of the pod's VRAM annotation in the placement, because the API server limits the
#: total size of annotations.
_LONGEST_QUOTED = 1024
#: Limits are written only for pods with at most this many GPU containers, because the policy for
#: extenders rejects a Binding with more than 256 annotations.
_MOST_LIMITED = 40


@dataclass(frozen=True, slots=True)
class Placement:
    """A reservation to be made, with charges for the ledger and annotations for the Binding."""

    charges: tuple[Charge, ...]
    annotations: Mapping[str, str]
    #: Number of seconds after which the pod's start times out if it starts alone. Otherwise 0.
    start_timeout_s: int = 0

    def reservation(self, namespace: str, name: str) -> Reservation:
        """Return the reservation for the pod with this name, which is valid until the pod is
        bound."""
        return Reservation(
            namespace=namespace,
            name=name,
            charges=list(self.charges),
            phase=STARTING if self.start_timeout_s else "",
            start_timeout_s=self.start_timeout_s,
        )


def place(request: VramRequest, snap: Snapshot, verdicts: Verdicts, i: int) -> Placement:
    """Return the placement on the i-th node of ``verdicts``, on which the request fits.

    The placement is empty if kube-scheduler allocates the GPUs by DRA.
    """
    if verdicts.by_dra[i]:
        return Placement((), {})
    node = snap.nodes[int(verdicts.rows[i])]
    devices = {
        resource: [node.devices[slot] for slot in slots]
        for resource, slots in _candidates(verdicts, i).items()
    }
    by_variable = by_environment(request, node)
    steered = {verdict.ask.resource for verdict in verdicts.asks if _is_steered(verdict, i)}
    possible = {
        resource: candidates if by_variable or resource in steered else _possible(resource, node)
        for resource, candidates in devices.items()
    }
    annotations = _annotations(request, node.name, devices, possible, steered)
    return Placement(charges(request, snap, verdicts, i), annotations, request.start_timeout_s)


def charges(request: VramRequest, snap: Snapshot, verdicts: Verdicts, i: int) -> tuple[Charge, ...]:
    """Return the charges on the i-th node of ``verdicts``, on which the request fits.

    There are no charges if kube-scheduler allocates the GPUs by DRA.
    """
    if verdicts.by_dra[i]:
        return ()
    node, candidates = snap.nodes[int(verdicts.rows[i])], _candidates(verdicts, i)
    by_variable = by_environment(request, node)
    return tuple(
        _charge(request, verdict, node, i, candidates[verdict.ask.resource], by_variable)
        for verdict in verdicts.asks
    )


def _candidates(verdicts: Verdicts, i: int) -> dict[str, list[int]]:
    """Return the slots of the candidate devices on the i-th node, by resource."""
    return {
        verdict.ask.resource: np.flatnonzero(verdict.candidates[i]).tolist()
        for verdict in verdicts.asks
    }


def _charge(
    request: VramRequest,
    verdict: AskVerdict,
    node: NodeTerms,
    i: int,
    candidates: Sequence[int],
    by_variable: bool,
) -> Charge:
    """Return the charge for one ask.

    ``by_variable`` states whether the pod's own NVIDIA_VISIBLE_DEVICES decides its devices. If it
    does, other pods cannot displace the pod.
    """
    listed = candidates if by_variable else _listed_slots(verdict, node, i)
    steered = _is_steered(verdict, i)
    return Charge(
        resource=verdict.ask.resource,
        count=verdict.ask.count,
        candidates={
            node.devices[slot].device.uuid: int(verdict.need_bytes[i, slot]) for slot in listed
        },
        beyond=[node.devices[slot].device.uuid for slot in listed if slot not in candidates],
        by_environment=by_variable,
        choices=[node.devices[slot].device.uuid for slot in candidates] if steered else [],
        containers=[]
        if by_variable
        else container_charges(
            request,
            verdict.ask.resource,
            [node.devices[slot].device for slot in listed],
            node.devices[listed[0]].reserve_bytes,
            apart=steered,
        ),
    )


def possible_charges(
    request: VramRequest,
    devices: Sequence[Device],
    reserve_bytes: int,
    arrays: DeviceArrays,
    by_environment: bool,
) -> list[Charge]:
    """Return one charge for each resource that the pod requests, on all devices of a node.

    ``arrays`` describes ``devices``, which have ``reserve_bytes`` each. With ``by_environment``,
    the pod may use every device of the node, independently of the replicas that it holds. Otherwise
    the device plugin chooses, and all devices of the resource are candidates.
    """
    charges: list[Charge] = []
    if by_environment:
        # All containers of the pod may use the device, and the devices that share its memory.
        arrays = replace(arrays, common=np.ones_like(arrays.common))
    for ask in request.asks:
        need = needed(ask, request.asks, arrays)
        if by_environment:
            need = need * np.maximum(arrays.sharers, 1)
        needs = np.minimum(need, MAX_DEVICE_BYTES).tolist()
        candidates = {
            device.uuid: needed_bytes
            for device, needed_bytes in zip(devices, needs, strict=True)
            if by_environment or device.resource == ask.resource
        }
        charges.append(
            Charge(
                resource=ask.resource,
                count=ask.count,
                candidates=candidates,
                by_environment=by_environment,
                containers=[]
                if by_environment
                else container_charges(
                    request,
                    ask.resource,
                    [each for each in devices if each.resource == ask.resource],
                    reserve_bytes,
                ),
            )
        )
    return charges


def limit_charges(
    request: VramRequest, devices: Sequence[Device], reserve_bytes: int, by_environment: bool
) -> list[Charge]:
    """Return the limits of the pod as ``possible_charges`` would charge requests of these amounts.

    The list is empty if the pod has no limit.
    """
    if not request.limit_asks:
        return []
    limits = replace(
        request,
        asks=request.limit_asks,
        containers=tuple(
            replace(ask, amount=ask.limit) for ask in request.containers if ask.limit is not None
        ),
    )
    arrays = device_arrays(devices, reserve_bytes)
    return possible_charges(limits, devices, reserve_bytes, arrays, by_environment)


def container_charges(
    request: VramRequest,
    resource: str,
    devices: Sequence[Device],
    reserve_bytes: int,
    apart: bool = False,
) -> list[ContainerCharge]:
    """Return the containers of a charge if several of them request the resource, and otherwise an
    empty list.

    ``devices`` contains all devices of the resource that the charge lists. ``reserve_bytes`` is the
    node's reserve on each of them. ``apart`` states whether the replicas of one container are on
    different devices.
    """
    asks = [ask for ask in request.containers if ask.resource == resource]
    if len(asks) < 2:
        return []
    arrays = device_arrays(devices, reserve_bytes)
    return [
        ContainerCharge(
            name=ask.name,
            count=ask.count,
            device_bytes=min(
                int(bytes_of(ask.amount, 1 if apart else ask.count, arrays).max(initial=0)),
                MAX_DEVICE_BYTES,
            ),
        )
        for ask in asks
    ]


def _listed_slots(verdict: AskVerdict, node: NodeTerms, i: int) -> list[int]:
    """Return the slots whose bytes the charge must list.

    These are the candidates. If the pod needs different amounts on different devices, all devices
    of the resource are listed, because later pods can displace the pod to a device that is not a
    candidate yet.
    """
    slots = [
        slot
        for slot, terms in enumerate(node.devices)
        if terms.device.resource == verdict.ask.resource
    ]
    if len({int(verdict.need_bytes[i, slot]) for slot in slots}) > 1:
        return slots
    return np.flatnonzero(verdict.candidates[i]).tolist()


def _is_steered(verdict: AskVerdict, i: int) -> bool:
    """Return whether the agent makes the kubelet choose the candidates on the i-th node, on which
    the request fits."""
    return bool(verdict.all_ours[int(verdict.rows[i])])


def _possible(resource: str, node: NodeTerms) -> Sequence[DeviceTerms]:
    """Return the devices on which the pod can start if the plugin chooses.

    Pods that are bound later can displace the pod to any other device of the resource.
    """
    return [t for t in node.devices if t.device.resource == resource and t.believed]


def _annotations(
    request: VramRequest,
    node: str,
    candidates: Mapping[str, Sequence[DeviceTerms]],
    possible: Mapping[str, Sequence[DeviceTerms]],
    steered: Set[str],
) -> dict[str, str]:
    """Return the placement as JSON, and values per container for the downward API.

    ``steered`` contains the resources whose devices Headroom chooses. The devices are written only
    if they are certain. Bytes and fraction are the smallest values among all possible devices, so
    they do not exceed the reservation on whichever device the pod starts.
    """
    if not request.asks:
        return {}
    containers: dict[str, object] = {}
    written: dict[str, str] = {}
    for ask in request.containers:
        devices = candidates[ask.resource]
        apart = ask.resource in steered
        sizes = {term.device.uuid: _bytes_on(ask, term, apart) for term in devices}
        # If the plugin chooses, several replicas of shared devices can be on one device.
        each_on_own_device = ask.count == 1 or apart or not any(term.shared for term in devices)
        # A single candidate is only a prediction, because a pod that ends can change the plugin's
        # next choice.
        gets_all = len(possible[ask.resource]) == ask.count and each_on_own_device
        # If the plugin chooses, each of several containers can get any of the devices.
        certain = gets_all and (apart or len(request.containers) == 1)
        containers[ask.name] = {
            "resource": ask.resource,
            "count": ask.count,
            "bytes": sizes,
            "devices" if certain else "candidates": list(sizes),
        }
        if ask.index is None:
            continue
        if certain:
            written[f"{DEVICES}{ask.index}"] = ",".join(sizes)
        shares = [(_bytes_on(ask, t, apart), t.device.memory_bytes) for t in possible[ask.resource]]
        written[f"{BYTES}{ask.index}"] = str(min(part for part, _ in shares))
        written[f"{FRACTION}{ask.index}"] = min(_fraction(*share) for share in shares)
        if ask.limit is not None and len(request.containers) <= _MOST_LIMITED:
            at_most = replace(ask, amount=ask.limit)
            # A share can be less than a request in bytes, and the larger of them counts.
            limits = [
                (min(max(_bytes_on(at_most, t, apart), reserved_bytes), whole_bytes), whole_bytes)
                for t, (reserved_bytes, whole_bytes) in zip(
                    possible[ask.resource], shares, strict=True
                )
            ]
            written[f"{LIMIT_BYTES}{ask.index}"] = str(min(part for part, _ in limits))
            written[f"{LIMIT_FRACTION}{ask.index}"] = min(_fraction(*each) for each in limits)
    body: dict[str, object] = {
        "node": node,
        "decision": request.decision_id,
        "containers": containers,
    }
    if request.annotated is None or len(request.annotated) <= _LONGEST_QUOTED:
        body["asked"] = request.annotated
    return {PLACEMENT: msgspec.json.encode(body).decode(), **written}


def _bytes_on(ask: ContainerAsk, term: DeviceTerms, apart: bool) -> int:
    """Return the bytes of a container on one device. ``apart`` states whether its replicas are on
    different devices."""
    count = 1 if apart else ask.count
    return int(bytes_of(ask.amount, count, device_arrays([term.device], term.reserve_bytes))[0])


def _fraction(part_bytes: int, whole_bytes: int) -> str:
    """Return the part as a decimal fraction, rounded down to four decimals.

    Because it is rounded down, a program that allocates this fraction never exceeds its
    reservation.
    """
    return f"0.{part_bytes * 10_000 // whole_bytes:04d}" if part_bytes < whole_bytes else "1.0000"
