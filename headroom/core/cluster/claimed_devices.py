"""The devices that NVIDIA's DRA driver offers, the claims that hold them, and their measured use.

DRA counts the memory that claims consume, and an agent measures the memory that processes use. A
device has *excess* if its processes use memory that no claim accounts for: use by processes outside
of known pods, by pods without a claim on the device, and by pods beyond their claims. Unused memory
of other claims does not reduce the excess, because their pods can use it at any time.

The devices of a slice and of a report are matched by UUID. A slice counts only for reports of the
node that it names.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from headroom.bounded_dict import Bounded
from headroom.contract.dra import DRIVER, ResourceClaim, uuid_of
from headroom.contract.errors import BadQuantity
from headroom.contract.gpunode import UNATTRIBUTED_TOLERANCE_BYTES, Device, GPUNodeStatus
from headroom.contract.kube import ResourceSlice
from headroom.contract.quantity import parse_bytes
from headroom.contract.watched import (
    ClaimGone,
    ClaimSeen,
    Relisted,
    SliceGone,
    SliceSeen,
    WatchEvent,
)

#: Seconds for which a claim still accounts for use after it was deallocated, because the report
#: that shows the end of its processes can arrive later.
LINGERS_S = 15.0
#: Maximum number of devices, and of holdings per device, that are kept for this time.
MAX_LINGERING, MAX_OF_DEVICE = 1_000, 16


@dataclass(frozen=True, slots=True)
class DraDevice:
    """A device, identified as in the allocation of a claim."""

    pool: str
    name: str


@dataclass(frozen=True, slots=True)
class Holding:
    """The part of a claim on one device."""

    namespace: str
    claim: str
    #: Uid and name of the pods that may use the claim.
    pods: frozenset[tuple[str, str]]
    #: The memory that the claim holds, or None for the whole device.
    memory_bytes: int | None


@dataclass(frozen=True, slots=True)
class ClaimedUse:
    """Measured use of one device by one pod, with the claims of the pod.

    ``uid`` is empty for the use by processes outside of known pods.
    """

    node: str
    uuid: str
    device: DraDevice
    uid: str
    namespace: str
    name: str
    #: Names of the claims of the pod on the device.
    claims: tuple[str, ...]
    claimed_bytes: int
    #: The measured use of the pod. None if it was not measured.
    used_bytes: int | None
    #: The use that no claim accounts for.
    excess_bytes: int


class ClaimedDevices:
    """Follows slices and claims. One thread writes and reads."""

    def __init__(self) -> None:
        #: The node, the pool and the devices by UUID of each slice, by name.
        self._slices: dict[str, tuple[str, str, dict[str, DraDevice]]] = {}
        self._slices_of: dict[str, set[str]] = {}
        #: The nodes whose slices name a pool, with the number of these slices, by pool.
        self._pools: dict[str, dict[str, int]] = {}
        #: The devices and memory that each claim holds, by namespace and name.
        self._claims: dict[tuple[str, str], list[tuple[DraDevice, Holding]]] = {}
        self._holdings: dict[DraDevice, dict[tuple[str, str], list[Holding]]] = {}
        #: The holdings of each device that have ended, with the time of their end on the monotonic
        #: clock.
        self._lingering: Bounded[DraDevice, list[tuple[float, Holding]]] = Bounded(MAX_LINGERING)

    def apply(self, events: Iterable[WatchEvent], now_s: float) -> set[str]:
        """Apply watch events, and return the nodes whose devices or claims changed."""
        changed: set[str] = set()
        for event in events:
            match event:
                case SliceSeen(piece=piece):
                    changed |= self._put_slice(piece)
                case SliceGone(name=name):
                    changed |= self._remove_slice(name)
                case ClaimSeen(claim=claim):
                    changed |= self._put_claim(claim, now_s)
                case ClaimGone(namespace=namespace, name=name):
                    changed |= self._remove_claim((namespace, name), now_s)
                case Relisted(objects=objects) if event.kind is ResourceSlice:
                    pieces = [each for each in objects if isinstance(each, ResourceSlice)]
                    for name in self._slices.keys() - {each.metadata.name for each in pieces}:
                        changed |= self._remove_slice(name)
                    for piece in pieces:
                        changed |= self._put_slice(piece)
                case Relisted(objects=objects) if event.kind is ResourceClaim:
                    claims = [each for each in objects if isinstance(each, ResourceClaim)]
                    for key in self._claims.keys() - {_key(each) for each in claims}:
                        changed |= self._remove_claim(key, now_s)
                    for claim in claims:
                        changed |= self._put_claim(claim, now_s)
        return changed

    def nodes(self) -> list[str]:
        """Return the nodes with devices of the driver, by name."""
        return sorted(self._slices_of)

    def devices(self, node: str) -> dict[str, DraDevice]:
        """Return the node's devices by UUID.

        If slices of another node name the same pool, the devices of the pool are omitted, because a
        taint on the pool would affect both nodes.
        """
        return {
            uuid: device
            for name in self._slices_of.get(node, ())
            for uuid, device in self._slices[name][2].items()
            if self._pools.get(device.pool, {}).keys() == {node}
        }

    def uses(self, node: str, status: GPUNodeStatus, now_s: float) -> Iterator[ClaimedUse]:
        """Yield the use of each claimed or used device of a node, by device and pod."""
        devices = self.devices(node)
        for reported in status.devices:
            if (device := devices.get(reported.uuid)) is not None:
                holdings = list(self._held(device, now_s))
                yield from _uses(node, device, reported, status, holdings)

    def _held(self, device: DraDevice, now_s: float) -> Iterator[Holding]:
        for parts in self._holdings.get(device, {}).values():
            yield from parts
        for at_s, holding in self._lingering.get(device, ()):
            if now_s - at_s <= LINGERS_S:
                yield holding

    def _put_slice(self, piece: ResourceSlice) -> set[str]:
        changed = self._remove_slice(piece.metadata.name)
        spec = piece.spec
        if spec.driver != DRIVER or not spec.node_name or not spec.devices:
            return changed
        devices = {
            uuid: DraDevice(spec.pool.name, each.name)
            for each in spec.devices
            if (uuid := uuid_of(each))
        }
        node = spec.node_name
        self._slices[piece.metadata.name] = node, spec.pool.name, devices
        self._slices_of.setdefault(node, set()).add(piece.metadata.name)
        nodes = self._pools.setdefault(spec.pool.name, {})
        nodes[node] = nodes.get(node, 0) + 1
        return changed | nodes.keys()

    def _remove_slice(self, name: str) -> set[str]:
        if name not in self._slices:
            return set()
        node, pool, _ = self._slices.pop(name)
        self._slices_of[node].discard(name)
        if not self._slices_of[node]:
            del self._slices_of[node]
        nodes = self._pools[pool]
        changed = {*nodes}
        nodes[node] -= 1
        if not nodes[node]:
            del nodes[node]
        if not nodes:
            del self._pools[pool]
        return changed

    def _put_claim(self, claim: ResourceClaim, now_s: float) -> set[str]:
        key = _key(claim)
        held = list(_holdings_of(claim))
        changed = self._remove_claim(key, now_s, kept=held)
        if held:
            self._claims[key] = held
        for device, holding in held:
            self._holdings.setdefault(device, {}).setdefault(key, []).append(holding)
        return changed | self._nodes_of(held)

    def _remove_claim(
        self,
        key: tuple[str, str],
        now_s: float,
        kept: Collection[tuple[DraDevice, Holding]] = (),
    ) -> set[str]:
        held = self._claims.pop(key, [])
        for device, holding in held:
            parts = self._holdings.get(device, {})
            parts.pop(key, None)
            if not parts:
                self._holdings.pop(device, None)
            if (device, holding) not in kept and holding.pods:
                ended = self._lingering.get(device, [])
                young = [each for each in ended if now_s - each[0] <= LINGERS_S]
                self._lingering[device] = [*young, (now_s, holding)][-MAX_OF_DEVICE:]
        return self._nodes_of(held)

    def _nodes_of(self, held: Iterable[tuple[DraDevice, Holding]]) -> set[str]:
        return {node for device, _ in held for node in self._pools.get(device.pool, {})}

    def sizes(self) -> dict[str, int]:
        """Return the number of entries of each collection."""
        return {
            "slices": len(self._slices),
            "claims": len(self._claims),
            "lingering": sum(map(len, self._lingering.values())),
        }


def _key(claim: ResourceClaim) -> tuple[str, str]:
    return claim.metadata.namespace, claim.metadata.name


def _holdings_of(claim: ResourceClaim) -> Iterator[tuple[DraDevice, Holding]]:
    status = claim.status
    if status is None or status.allocation is None:
        return
    pods = frozenset(
        (each.uid, each.name) for each in status.reserved_for or () if each.resource == "pods"
    )
    for each in status.allocation.devices.results or ():
        if each.driver != DRIVER or each.admin_access:
            continue
        try:
            memory_bytes = None if each.memory is None else parse_bytes(each.memory)
        except BadQuantity:
            memory_bytes = None
        namespace, name = _key(claim)
        yield DraDevice(each.pool, each.device), Holding(namespace, name, pods, memory_bytes)


def _uses(
    node: str,
    device: DraDevice,
    reported: Device,
    status: GPUNodeStatus,
    holdings: Sequence[Holding],
) -> Iterator[ClaimedUse]:
    """Yield the use of one device."""
    used: dict[str, int | None] = {}
    names: dict[str, tuple[str, str]] = {}
    for row in status.pods:
        if row.device == reported.uuid:
            before = used.get(row.uid, 0)
            known = before is not None and row.used_bytes is not None
            used[row.uid] = (before or 0) + (row.used_bytes or 0) if known else None
            names[row.uid] = row.namespace, row.name
    claims_of: dict[str, list[Holding]] = {}
    for holding in holdings:
        for uid, name in holding.pods:
            claims_of.setdefault(uid, []).append(holding)
            names[uid] = holding.namespace, name
    excess = _excess(used, claims_of, reported)
    for uid in sorted(used.keys() | claims_of.keys()):
        own = claims_of.get(uid, [])
        namespace, name = names[uid]
        yield ClaimedUse(
            node=node,
            uuid=reported.uuid,
            device=device,
            uid=uid,
            namespace=namespace,
            name=name,
            claims=tuple(sorted({each.claim for each in own})),
            claimed_bytes=_bytes(own, reported),
            used_bytes=used.get(uid, 0),
            excess_bytes=excess.get(uid, 0),
        )
    unattributed_bytes = reported.unattributed_bytes or 0
    if unattributed_bytes > UNATTRIBUTED_TOLERANCE_BYTES:
        yield ClaimedUse(
            node=node,
            uuid=reported.uuid,
            device=device,
            uid="",
            namespace="",
            name="",
            claims=(),
            claimed_bytes=0,
            used_bytes=unattributed_bytes,
            excess_bytes=unattributed_bytes,
        )


def _excess(
    used: Mapping[str, int | None], claims_of: Mapping[str, list[Holding]], reported: Device
) -> dict[str, int]:
    """Return the use of each pod beyond its claims. Pods that share a claim use up its bytes in the
    order of their uids, so any excess is assigned to the last of them."""
    excess: dict[str, int] = {}
    left_bytes: dict[Holding, int] = {}
    for uid in sorted(used):
        rest_bytes = used[uid] or 0
        for holding in claims_of.get(uid, ()):
            held_bytes = left_bytes.get(holding, _bytes([holding], reported))
            taken_bytes = min(rest_bytes, held_bytes)
            left_bytes[holding] = held_bytes - taken_bytes
            rest_bytes -= taken_bytes
        excess[uid] = rest_bytes
    return excess


def _bytes(holdings: Iterable[Holding], reported: Device) -> int:
    whole_bytes = max(0, reported.memory_bytes)
    return sum(whole_bytes if each.memory_bytes is None else each.memory_bytes for each in holdings)
