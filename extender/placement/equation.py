"""The equation: how much of each device of one node is taken, term by term.

    allocatable(d) = memory - driver reserved - node reserve
    committed(d)   = promised(d) + awaited(d) + strays(d) + unowned(d)
    headroom(d)    = allocatable(d) - committed(d)

*promised*: for each pod that sits on d, or on a shared device may sit there, the larger of its
request and what it was measured to use. *awaited*: an unshared device holds one pod at a time, so
of all pods bound but not yet observed only the largest can end on it; counting each of them on
each device would fill the node with ghosts. *strays*: measured use of pods without a reservation.
*unowned*: use that belongs to no pod we know, beyond the tolerance.

All figures are bytes in Python integers, which do not overflow.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from contract.gpunode import (
    MAX_DEVICE_BYTES,
    MAX_REPLICAS,
    Charge,
    Device,
    GPUNodeStatus,
    PodUse,
    Reservation,
)
from contract.reasons import Reason


@dataclass(frozen=True, slots=True)
class Holder:
    """A pod that sits on a device, or may."""

    uid: str
    namespace: str
    name: str
    requested_bytes: int
    #: None while nothing was measured.
    measured_bytes: int | None
    #: Whether the node's report shows it there; else the device is one of its candidates.
    observed: bool


@dataclass(frozen=True, slots=True)
class DeviceTerms:
    """Every term of the equation for one device."""

    device: Device
    reserve_bytes: int
    promised_bytes: int
    awaited_bytes: int
    strays_bytes: int
    unowned_bytes: int
    #: Replicas of this device's resource promised to pods that were not observed yet.
    awaited_replicas: int
    holders: tuple[Holder, ...]
    #: Why nothing may be placed here, and the particulars.
    fence: Reason | None
    fence_detail: str

    @property
    def shared(self) -> bool:
        return self.device.sharing != "none"

    @property
    def allocatable_bytes(self) -> int:
        """Zero where the figures make no sense or the reserves take it all."""
        if self.fence is Reason.CONTRADICTORY_REPORT:
            return 0
        left = self.device.memory_bytes - self.device.reserved_bytes - self.reserve_bytes
        return max(0, left)

    @property
    def committed_bytes(self) -> int:
        return self.promised_bytes + self.awaited_bytes + self.strays_bytes + self.unowned_bytes

    @property
    def headroom_bytes(self) -> int:
        """Negative when more is committed than there is: the truth is shown, never hidden."""
        return self.allocatable_bytes - self.committed_bytes


def weigh(
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    reserve_bytes: int,
    unowned_tolerance_bytes: int,
) -> tuple[DeviceTerms, ...]:
    """Weigh every device that the node reports, in the report's order.

    ``reservations`` maps pod uid to what was promised, bystanders included.
    """
    fences = _fences(status.devices)
    uses = _Uses(status.pods)
    promised: Counter[int] = Counter()
    awaited: Counter[int] = Counter()
    awaited_replicas: Counter[str] = Counter()
    holders: dict[int, list[Holder]] = {}
    slot_of = {device.uuid: slot for slot, device in enumerate(status.devices)}

    for uid, reservation in reservations.items():
        for charge in reservation.charges:
            seen = uses.devices_of(uid, charge.resource, status.devices, slot_of)
            missing = max(0, charge.count - sum(seen.values()))
            awaited_replicas[charge.resource] += missing
            for slot, requested_bytes in _possible(charge, seen, missing, slot_of).items():
                measured = uses.measured(uid, status.devices[slot].uuid)
                most = max(requested_bytes, measured or 0)
                if slot in seen or status.devices[slot].sharing != "none":
                    promised[slot] += most
                else:
                    awaited[slot] = max(awaited[slot], most)
                holders.setdefault(slot, []).append(
                    Holder(
                        uid,
                        reservation.namespace,
                        reservation.name,
                        requested_bytes,
                        measured,
                        slot in seen,
                    )
                )
    _share_among_instances(status.devices, promised, awaited)

    return tuple(
        DeviceTerms(
            device=device,
            reserve_bytes=reserve_bytes,
            promised_bytes=promised[slot],
            awaited_bytes=awaited[slot],
            strays_bytes=uses.strays(device.uuid, reservations),
            unowned_bytes=_unowned(device, uses, holders.get(slot, ()), unowned_tolerance_bytes)
            if slot not in fences
            else 0,
            awaited_replicas=awaited_replicas[device.resource],
            holders=tuple(holders.get(slot, ())),
            fence=fences.get(slot, (None, ""))[0],
            fence_detail=fences.get(slot, (None, ""))[1],
        )
        for slot, device in enumerate(status.devices)
    )


def without(status: GPUNodeStatus, uids: Collection[str]) -> GPUNodeStatus:
    """The report as it would read if these pods had gone, and what was measured of them freed."""
    freed_bytes: Counter[str] = Counter()
    freed_replicas: Counter[str] = Counter()
    for use in status.pods:
        if use.uid in uids:
            freed_bytes[use.device] += max(0, use.used_bytes or 0)
            freed_replicas[use.device] += 1
    devices: list[Device] = []
    for device in status.devices:
        replicas = device.replicas
        back = min(freed_replicas[device.uuid], max(0, replicas.allocated))
        replicas = msgspec.structs.replace(
            replicas, free=replicas.free + back, allocated=replicas.allocated - back
        )
        used_bytes = max(min(device.used_bytes, 0), device.used_bytes - freed_bytes[device.uuid])
        devices.append(msgspec.structs.replace(device, replicas=replicas, used_bytes=used_bytes))
    pods = [use for use in status.pods if use.uid not in uids]
    return msgspec.structs.replace(status, devices=devices, pods=pods)


class _Uses:
    """The report's rows of pods, by device and by pod."""

    def __init__(self, rows: Iterable[PodUse]) -> None:
        self._replicas: dict[str, Counter[str]] = {}
        self._bytes: dict[tuple[str, str], int | None] = {}
        self._uids: dict[str, list[str]] = {}
        for row in rows:
            self._replicas.setdefault(row.uid, Counter())[row.device] += 1
            key = (row.uid, row.device)
            if key not in self._bytes:
                self._uids.setdefault(row.device, []).append(row.uid)
                self._bytes[key] = row.used_bytes
            else:
                self._bytes[key] = _sum_known(self._bytes[key], row.used_bytes)

    def devices_of(
        self, uid: str, resource: str, devices: Sequence[Device], slot_of: Mapping[str, int]
    ) -> dict[int, int]:
        """Slot -> replicas on which the pod was observed."""
        return {
            slot_of[uuid]: count
            for uuid, count in self._replicas.get(uid, Counter()).items()
            if uuid in slot_of and devices[slot_of[uuid]].resource == resource
        }

    def measured(self, uid: str, device: str) -> int | None:
        used = self._bytes.get((uid, device))
        return None if used is None else max(0, used)

    def strays(self, device: str, reservations: Mapping[str, Reservation]) -> int:
        return sum(
            self.measured(uid, device) or 0
            for uid in self._uids.get(device, ())
            if uid not in reservations
        )

    def all_measured(self, device: str) -> bool:
        return all(self._bytes[uid, device] is not None for uid in self._uids.get(device, ()))


def _sum_known(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left + right


def _possible(
    charge: Charge, seen: Mapping[int, int], missing: int, slot_of: Mapping[str, int]
) -> dict[int, int]:
    """Slot -> bytes, wherever the pod sits or may still land."""
    most = max(charge.candidates.values(), default=0)
    possible = {
        slot: charge.candidates.get(uuid, most) for uuid, slot in slot_of.items() if slot in seen
    }
    if missing:
        for uuid, requested_bytes in charge.candidates.items():
            if uuid in slot_of:
                possible[slot_of[uuid]] = requested_bytes
    return possible


def _unowned(device: Device, uses: _Uses, holders: Iterable[Holder], tolerance_bytes: int) -> int:
    """Bytes used by strangers beyond the tolerance.

    Where the agent cannot attribute processes, or the driver does not tell what one of them uses,
    it is all use beyond what the pods seen here asked for; idle requests can then hide strangers.
    """
    unowned = device.unowned_bytes
    if unowned is None or not uses.all_measured(device.uuid):
        observed = sum(holder.requested_bytes for holder in holders if holder.observed)
        unowned = max(0, device.used_bytes - observed)
    return max(0, unowned - tolerance_bytes)


def _share_among_instances(
    devices: Sequence[Device], promised: Counter[int], awaited: Counter[int]
) -> None:
    """Compute instances of one GPU instance share its memory: each is charged with all of them."""
    groups: dict[tuple[str, int], list[int]] = {}
    for slot, device in enumerate(devices):
        if device.kind == "mig" and device.parent and device.gpu_instance is not None:
            groups.setdefault((device.parent, device.gpu_instance), []).append(slot)
    for slots in groups.values():
        if len(slots) > 1:
            for term in (promised, awaited):
                together = sum(term[slot] for slot in slots)
                for slot in slots:
                    term[slot] = together


def _fences(devices: Sequence[Device]) -> dict[int, tuple[Reason, str]]:
    """Slot -> why nothing may be placed on it."""
    times = Counter(device.uuid for device in devices)
    fences: dict[int, tuple[Reason, str]] = {}
    sick: dict[str, str] = {}
    for slot, device in enumerate(devices):
        wrong = _contradiction(device)
        if times[device.uuid] > 1:
            wrong = f"uuid {device.uuid!r} is reported {times[device.uuid]} times"
        if wrong:
            fences[slot] = (Reason.CONTRADICTORY_REPORT, wrong)
        elif not device.healthy:
            fences[slot] = (Reason.UNHEALTHY_DEVICE, device.health_reason or "unhealthy")
            sick[device.uuid] = device.health_reason or "unhealthy"
    for slot, device in enumerate(devices):
        # What breaks a physical GPU breaks all its instances.
        if slot not in fences and device.parent in sick:
            fences[slot] = (Reason.UNHEALTHY_DEVICE, f"its GPU: {sick[device.parent]}")
    return fences


def _contradiction(device: Device) -> str:
    """What cannot be true about the device's own figures; empty when they agree."""
    replicas = device.replicas
    if not device.uuid:
        return "no uuid"
    if not 0 < device.memory_bytes <= MAX_DEVICE_BYTES:
        return f"memory is {device.memory_bytes} bytes"
    if not 0 <= device.reserved_bytes <= device.memory_bytes:
        return f"reserved is {device.reserved_bytes} of {device.memory_bytes} bytes"
    if not 0 <= device.used_bytes <= device.memory_bytes:
        return f"used is {device.used_bytes} of {device.memory_bytes} bytes"
    if device.unowned_bytes is not None and not 0 <= device.unowned_bytes <= device.used_bytes:
        return f"unowned is {device.unowned_bytes} of {device.used_bytes} bytes used"
    if min(replicas.free, replicas.allocated, replicas.unhealthy) < 0:
        return "a number of replicas is negative"
    if replicas.total > (MAX_REPLICAS if device.sharing != "none" else 1):
        return f"{replicas.total} replicas of a device with sharing {device.sharing}"
    return ""
