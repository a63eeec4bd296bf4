"""Builds the record of a placement: the ledger's charges and the pod's annotations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np

from contract.annotations import BYTES, DEVICES, FRACTION, PLACEMENT
from contract.gpunode import Charge
from extender.placement.amounts import bytes_of, device_arrays
from extender.placement.chosen_device import by_environment
from extender.placement.device_accounting import DeviceTerms
from extender.placement.fit import AskVerdict, Verdicts
from extender.placement.request import ContainerAsk, VramRequest
from extender.placement.snapshot import NodeTerms, Snapshot
from extender.placement.visible_devices import Visible

#: Characters up to which the placement quotes the pod's VRAM annotation. The API server limits the
#: size of annotations.
_LONGEST_QUOTED = 1024


@dataclass(frozen=True, slots=True)
class Placement:
    """A reservation to make: charges for the ledger, annotations for the Binding."""

    charges: tuple[Charge, ...]
    annotations: Mapping[str, str]


def place(request: VramRequest, snap: Snapshot, verdicts: Verdicts, i: int) -> Placement:
    """Return the placement on the i-th node of ``verdicts``, on which the request fits."""
    node = snap.nodes[int(verdicts.rows[i])]
    devices = {
        resource: [node.devices[slot] for slot in slots]
        for resource, slots in _possible(verdicts, i).items()
    }
    pinned = by_environment(request, node) and request.visible is Visible.BY_PLACEMENT
    annotations = _annotations(request, node.name, devices, pinned)
    return Placement(charges(request, snap, verdicts, i), annotations)


def charges(request: VramRequest, snap: Snapshot, verdicts: Verdicts, i: int) -> tuple[Charge, ...]:
    """Return the charges on the i-th node of ``verdicts``, on which the request fits."""
    node, possible = snap.nodes[int(verdicts.rows[i])], _possible(verdicts, i)
    by_itself = by_environment(request, node)
    return tuple(
        _charge(verdict, node, i, possible[verdict.ask.resource], by_itself)
        for verdict in verdicts.asks
    )


def _possible(verdicts: Verdicts, i: int) -> dict[str, list[int]]:
    return {
        verdict.ask.resource: np.flatnonzero(verdict.candidates[i]).tolist()
        for verdict in verdicts.asks
    }


def _charge(
    verdict: AskVerdict, node: NodeTerms, i: int, possible: Sequence[int], by_itself: bool
) -> Charge:
    """Return the charge for one ask.

    ``by_itself``: the pod's own variable decides its devices, so other pods cannot displace it.
    """
    named = possible if by_itself else _worth_naming(verdict, node, i)
    steered = len(possible) == 1 and node.devices[possible[0]].policy == "steered"
    return Charge(
        resource=verdict.ask.resource,
        count=verdict.ask.count,
        candidates={
            node.devices[slot].device.uuid: int(verdict.need_bytes[i, slot]) for slot in named
        },
        beyond=[node.devices[slot].device.uuid for slot in named if slot not in possible],
        by_environment=by_itself,
        choice=node.devices[possible[0]].device.uuid if steered and not by_itself else "",
    )


def _worth_naming(verdict: AskVerdict, node: NodeTerms, i: int) -> list[int]:
    """Return the slots whose bytes the charge must list.

    These are the candidates. If the pod needs different amounts on different devices, they are all
    devices of the resource, because later pods can displace it to one that is no candidate yet.
    """
    slots = [
        slot
        for slot, terms in enumerate(node.devices)
        if terms.device.resource == verdict.ask.resource
    ]
    if len({int(verdict.need_bytes[i, slot]) for slot in slots}) > 1:
        return slots
    return np.flatnonzero(verdict.candidates[i]).tolist()


def _annotations(
    request: VramRequest,
    node: str,
    possible: Mapping[str, Sequence[DeviceTerms]],
    pinned: bool,
) -> dict[str, str]:
    """Return the placement as JSON, and values per container for the downward API."""
    if not request.asks:
        return {}
    containers: dict[str, object] = {}
    written: dict[str, str] = {}
    for ask in request.containers:
        devices = possible[ask.resource]
        sizes = {term.device.uuid: _bytes_on(ask, term) for term in devices}
        # Two replicas of shared devices can be on one device, however many devices there are.
        unspread = ask.count == 1 or not any(term.shared for term in devices)
        alone = len(request.containers) == 1 and unspread
        certain = pinned or (len(devices) == ask.count and alone)
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
        if len(set(sizes.values())) == 1:
            written[f"{BYTES}{ask.index}"] = str(next(iter(sizes.values())))
        fractions = {_fraction(_bytes_on(ask, t), t.device.memory_bytes) for t in devices}
        if len(fractions) == 1:
            written[f"{FRACTION}{ask.index}"] = fractions.pop()
    body: dict[str, object] = {
        "node": node,
        "decision": request.decision_id,
        "containers": containers,
    }
    if request.annotated is None or len(request.annotated) <= _LONGEST_QUOTED:
        body["asked"] = request.annotated
    return {PLACEMENT: msgspec.json.encode(body).decode(), **written}


def _bytes_on(ask: ContainerAsk, term: DeviceTerms) -> int:
    return int(bytes_of(ask.amount, ask.count, device_arrays([term.device], term.reserve_bytes))[0])


def _fraction(part_bytes: int, whole_bytes: int) -> str:
    """Return the fraction, rounded down to four decimals, so that a program never takes more."""
    return f"0.{part_bytes * 10_000 // whole_bytes:04d}" if part_bytes < whole_bytes else "1.0000"
