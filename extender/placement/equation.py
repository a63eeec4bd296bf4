"""The equation: how much of each device of one node is taken, term by term.

    allocatable(d) = memory - driver reserved - node reserve
    committed(d)   = promised(d) + awaited(d) + strays(d) + unowned(d)
    headroom(d)    = allocatable(d) - committed(d)

*promised*: for each pod that sits on d, or on a shared device may sit there, the larger of its
request and what it was measured to use. *awaited*: an unshared device holds one pod at a time, so
of all pods bound but not yet observed only the largest can end on it; counting each of them on
each device would fill the node with ghosts. *strays*: measured use of pods without a reservation.
*unowned*: use that belongs to no pod we know, beyond the tolerance.

The terms are those of a *memory*, not of a device: MIG compute instances of one GPU instance share
one, and each of them shows all that is taken of it. Such a memory can hold several pods at once,
as that of a shared device can, so there too everybody who may come is promised, none awaited.

All figures are bytes in Python integers, which do not overflow.
"""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from contract.gpunode import (
    MAX_DEVICE_BYTES,
    MAX_REPLICAS,
    Charge,
    Device,
    GPUNodeStatus,
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

    @property
    def charged_bytes(self) -> int:
        return max(self.requested_bytes, self.measured_bytes or 0)


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
    #: Those of the whole memory, where several devices share it.
    holders: tuple[Holder, ...]
    #: How many devices share this one's memory, itself included.
    sharers: int
    #: Why nothing may be placed here, and the particulars.
    fence: Reason | None
    fence_detail: str

    @property
    def shared(self) -> bool:
        return self.device.sharing != "none"

    @property
    def common(self) -> bool:
        """Whether several pods can be in its memory at once."""
        return self.shared or self.sharers > 1

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
    devices = status.devices
    memories = _memories(devices)
    uses = _Uses(status)
    holders = _holders(devices, memories, reservations, uses)
    fences = _fences(devices, memories)
    awaited_replicas = Counter[str]()
    for uid, reservation in reservations.items():
        for charge in reservation.charges:
            awaited_replicas[charge.resource] += uses.missing(uid, charge)

    weighed: list[DeviceTerms] = []
    for slot, device in enumerate(devices):
        mates = memories[slot]
        held = holders[mates]
        # Whether several pods can be in this memory at once.
        common = device.sharing != "none" or len(mates) > 1
        sitting = [h.charged_bytes for h in held if h.observed]
        coming = [h.charged_bytes for h in held if not h.observed]
        strays_bytes = uses.strays(mates, reservations)
        fence, fence_detail = fences.get(slot, (None, ""))
        unowned_bytes = 0
        if fence is not Reason.CONTRADICTORY_REPORT:
            explained_bytes = sum(sitting) + strays_bytes
            unowned_bytes = _unowned(
                [devices[i] for i in mates], uses.known(mates), explained_bytes
            )
        weighed.append(
            DeviceTerms(
                device=device,
                reserve_bytes=reserve_bytes,
                promised_bytes=sum(sitting) + (sum(coming) if common else 0),
                # One pod at a time: the next can only come when the one that sits has gone.
                awaited_bytes=0 if common else max(0, max(coming, default=0) - sum(sitting)),
                strays_bytes=strays_bytes,
                unowned_bytes=max(0, unowned_bytes - unowned_tolerance_bytes),
                awaited_replicas=awaited_replicas[device.resource],
                holders=held,
                sharers=len(mates),
                fence=fence,
                fence_detail=fence_detail,
            )
        )
    return tuple(weighed)


def without(status: GPUNodeStatus, uids: Collection[str]) -> GPUNodeStatus:
    """The report as it would read if these pods had gone, and what was measured of them freed."""
    freed_bytes: Counter[str] = Counter()
    freed_replicas: Counter[str] = Counter()
    going = [use for use in status.pods if use.uid in uids]
    for use in going:
        freed_bytes[use.device] += max(0, use.used_bytes or 0)
    for _, device_uuid, _ in {(use.uid, use.device, use.replica) for use in going}:
        freed_replicas[device_uuid] += 1
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


#: Slots whose devices share one memory, in order; most memories have one.
_Memory = tuple[int, ...]


def _memories(devices: Sequence[Device]) -> list[_Memory]:
    """The memory of each slot: compute instances of one GPU instance share theirs."""
    of: dict[tuple[str, int] | int, list[int]] = {}
    keys: list[tuple[str, int] | int] = []
    for slot, device in enumerate(devices):
        joint = device.kind == "mig" and device.parent and device.gpu_instance is not None
        keys.append((device.parent or "", device.gpu_instance or 0) if joint else slot)
        of.setdefault(keys[-1], []).append(slot)
    return [tuple(of[key]) for key in keys]


class _Uses:
    """The report's rows of pods.

    The rows of one replica are one use of it: an app container reuses what the init container
    before it held, and the kubelet names both.
    """

    def __init__(self, status: GPUNodeStatus) -> None:
        self._slot_of = {device.uuid: slot for slot, device in enumerate(status.devices)}
        self._resources = [device.resource for device in status.devices]
        #: uid -> slot -> replicas.
        self._replicas: dict[str, dict[int, set[str]]] = {}
        #: slot -> uid -> bytes; None where one of its figures is not known.
        self._bytes: dict[int, dict[str, int | None]] = {}
        for row in status.pods:
            slot = self._slot_of.get(row.device)
            if slot is None:
                continue
            self._replicas.setdefault(row.uid, {}).setdefault(slot, set()).add(row.replica)
            used = self._bytes.setdefault(slot, {})
            used[row.uid] = _sum_known(used.get(row.uid, 0), row.used_bytes)

    def slots(self, uid: str) -> Collection[int]:
        """Where the pod was observed."""
        return self._replicas.get(uid, {}).keys()

    def missing(self, uid: str, charge: Charge) -> int:
        """Replicas of a charge that the pod was not observed to hold."""
        held = sum(
            len(replicas)
            for slot, replicas in self._replicas.get(uid, {}).items()
            if self._resources[slot] == charge.resource
        )
        return max(0, charge.count - held)

    def measured(self, uid: str, memory: _Memory) -> int | None:
        """Bytes of the pod; None where nothing, or not everything, was measured."""
        figures = [self._bytes[slot][uid] for slot in memory if uid in self._bytes.get(slot, ())]
        return _sum_known(*figures) if figures else None

    def strays(self, memory: _Memory, reservations: Mapping[str, Reservation]) -> int:
        uids = {uid for slot in memory for uid in self._bytes.get(slot, ())}
        return sum(self.measured(uid, memory) or 0 for uid in uids - reservations.keys())

    def known(self, memory: _Memory) -> bool:
        """Whether the use of every pod was measured."""
        return all(None not in self._bytes.get(slot, {}).values() for slot in memory)


def _sum_known(*figures: int | None) -> int | None:
    """The sum; None where a figure is absent or cannot be true."""
    known = [figure for figure in figures if figure is not None and figure >= 0]
    return sum(known) if len(known) == len(figures) else None


def _holders(
    devices: Sequence[Device],
    memories: Sequence[_Memory],
    reservations: Mapping[str, Reservation],
    uses: _Uses,
) -> dict[_Memory, tuple[Holder, ...]]:
    """Of each memory, the pods with a reservation that sit there or may come."""
    holders: dict[_Memory, list[Holder]] = {memory: [] for memory in memories}
    for uid, reservation in reservations.items():
        seen = uses.slots(uid)
        waiting = [charge for charge in reservation.charges if uses.missing(uid, charge)]
        #: Memory -> most bytes asked there, and whether the pod was seen there.
        places: dict[_Memory, tuple[int, bool]] = {}
        for slot, device in enumerate(devices):
            sits = slot in seen
            due = (
                _due(reservation, device) if sits else [c for c in waiting if _may_come(c, device)]
            )
            if sits or due:
                asked, sat = places.get(memories[slot], (0, False))
                most = max((_bytes_on(charge, device) for charge in due), default=0)
                places[memories[slot]] = (max(asked, most), sat or sits)
        for memory, (asked, sits) in places.items():
            measured = uses.measured(uid, memory)
            names = reservation.namespace, reservation.name
            holders[memory].append(Holder(uid, *names, asked, measured, sits))
    return {memory: tuple(held) for memory, held in holders.items()}


def _due(reservation: Reservation, device: Device) -> list[Charge]:
    """The charges for which the pod can sit on a device where it was seen.

    A plugin that was restarted with another configuration can rename the resource under it; then
    any of them can be meant.
    """
    charges = reservation.charges
    meant = [c for c in charges if c.resource == device.resource or device.uuid in c.candidates]
    return meant or charges


def _bytes_on(charge: Charge, device: Device) -> int:
    """What was promised for the device; the most for any, where it was not thought of."""
    most = max(charge.candidates.values(), default=0)
    return charge.candidates.get(device.uuid, most)


def _may_come(charge: Charge, device: Device) -> bool:
    """Whether the plugin could give the device to a pod that still waits for its replicas.

    Those it could have been given when the promise was made, and those that it could be given
    now: a replica that became free since then is as good to the plugin as any.
    """
    return device.uuid in charge.candidates or (
        device.resource == charge.resource and may_have_free_replica(device)
    )


def may_have_free_replica(device: Device) -> bool:
    """The plugin goes by its own count: figures that cannot be true do not prove there is none."""
    replicas = device.replicas
    return replicas.free > 0 or min(replicas.free, replicas.allocated, replicas.unhealthy) < 0


def _unowned(devices: Sequence[Device], known: bool, explained_bytes: int) -> int:
    """Bytes of one memory that strangers use.

    Where the agent cannot attribute processes, or the driver does not tell what one of them uses,
    it is all use beyond what is charged for the pods seen here; idle requests can then hide
    strangers.
    """
    unowned = [device.unowned_bytes for device in devices]
    attributed = _sum_known(*unowned)
    if known and attributed is not None:
        return attributed
    return max(0, max(device.used_bytes for device in devices) - explained_bytes)


def _fences(
    devices: Sequence[Device], memories: Sequence[_Memory]
) -> dict[int, tuple[Reason, str]]:
    """Slot -> why nothing may be placed on it."""
    times = Counter(device.uuid for device in devices)
    wrong: dict[int, str] = {}
    sick: dict[str, str] = {}
    for slot, device in enumerate(devices):
        if times[device.uuid] > 1:
            wrong[slot] = f"uuid {device.uuid!r} is reported {times[device.uuid]} times"
        elif why := _contradiction(device):
            wrong[slot] = why
        if not device.healthy:
            sick[device.uuid] = device.health_reason or "unhealthy"
    fences: dict[int, tuple[Reason, str]] = {}
    for slot, device in enumerate(devices):
        mistaken = next((wrong[mate] for mate in (slot, *memories[slot]) if mate in wrong), "")
        if mistaken:
            fences[slot] = (Reason.CONTRADICTORY_REPORT, mistaken)
        elif device.uuid in sick:
            fences[slot] = (Reason.UNHEALTHY_DEVICE, sick[device.uuid])
        elif device.parent in sick:
            # What breaks a physical GPU breaks all its instances.
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
