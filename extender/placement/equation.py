"""The equation: how much of each device of one node is taken, term by term.

    allocatable(d) = memory - driver reserved - node reserve
    committed(d)   = promised(d) + awaited(d) + strays(d) + unowned(d)
    headroom(d)    = allocatable(d) - committed(d)
    room(d)        = what is left for one more pod, if the plugin gives it d

*promised*: for each pod that sits on d, the larger of its request and what it was measured to use.
*awaited*: what pods bound but not yet observed add in the worst case. ``placement.plugin`` says
how many of them can reach d; those are taken to be the largest. Pods that are ending count as
there or as gone, whichever is worse: when one has let go of its replica, its memory is free too,
because the kubelet takes a replica back after the containers have ended. *strays*: measured use of
pods without a reservation. *unowned*: use that belongs to no pod we know, beyond the tolerance.

A pod whose own NVIDIA_VISIBLE_DEVICES decides its devices is promised to those for certain, and to
no other: the replica that the plugin gives it counts for the plugin's choice and for nothing else.
Where it is seen to use another device all the same, it is charged there as well.

A newcomer changes what the others can do: of two equal devices only one is reached by the next pod,
but both by the next two. So *room* is reckoned with one more pick: where it takes d, all but one of
those that could reach d are there with it; and where the largest of those that could come in its
stead has no room, nobody is let in.

The terms are those of a *memory*, not of a device: MIG compute instances of one GPU instance share
one, and each of them shows all that is taken of it.

All figures are bytes in Python integers, which do not overflow.
"""

from collections import Counter
from collections.abc import Collection, Container, Mapping, Sequence, Set
from itertools import accumulate
from operator import attrgetter

import msgspec

from contract.annotations import DeviceChoice
from contract.gpunode import (
    MAX_DEVICE_BYTES,
    MAX_REPLICAS,
    Charge,
    Device,
    GPUNodeStatus,
    Plugin,
    Reservation,
)
from contract.reasons import Reason
from extender.placement.activity import Activity, reported
from extender.placement.chances import ALL_PICKS, Chance, chances
from extender.placement.plugin import Policy

#: Of a device fenced for one of these the figures are not to be reckoned with.
UNBELIEVED = frozenset({Reason.CONTRADICTORY_REPORT, Reason.MEMORY_UNKNOWN})
#: Clients that an MPS server takes; the plugin's control daemon sets no caps for more of them.
MAX_MPS_REPLICAS = 48
#: The same where the compute capability is below 7.5, as the daemon reckons it.
MAX_OLD_MPS_REPLICAS = 16
_OLD_ARCHITECTURES = frozenset({"kepler", "maxwell", "pascal", "volta"})


class Holder(msgspec.Struct, frozen=True, gc=False):
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


class DeviceTerms(msgspec.Struct, frozen=True, gc=False):
    """Every term of the equation for one device; of a large fleet there are tens of thousands,
    through which no garbage collection has to go."""

    device: Device
    reserve_bytes: int
    #: Zero where the figures make no sense or the reserves take it all.
    allocatable_bytes: int
    promised_bytes: int
    awaited_bytes: int
    strays_bytes: int
    unowned_bytes: int
    #: Whether the agent told whose the memory is. If not, unowned is what is used beyond the
    #: requests of the pods seen here, and those of idle pods can hide strangers.
    attributed: bool
    #: Left for a pod that asks for one replica of this device's resource, and for one that asks
    #: for more, if this device is given to it; negative where nobody may come.
    room_bytes: int
    several_room_bytes: int
    #: What all pods on their way ask for together, as if the plugin could give each of them this.
    crowd_bytes: int
    #: Replicas of this device's resource promised to pods that were not observed yet.
    awaited_replicas: int
    #: How the plugin is taken to choose.
    policy: Policy
    #: How many replicas of its resource must be given out before one of this device can be; None:
    #: none of it ever can.
    first: int | None
    #: Replicas of it that are held by pods that are ending.
    leaving: int
    #: Whether the plugin refuses a container that asks for more than one replica of it.
    single: bool
    #: Whether nobody in its memory, or on the way to it, asks for more than an equal part of what
    #: strangers leave of it for each replica: then all replicas can be given to any of them.
    slot_safe: bool
    #: Those of the whole memory, where several devices share it.
    holders: tuple[Holder, ...]
    #: How many devices share this one's memory, itself included.
    sharers: int
    #: Why nothing may be placed here, and the particulars.
    fence: Reason | None
    fence_detail: str
    #: How busy its SMs are; None where nobody who measures that tells.
    activity: Activity | None

    @property
    def believed(self) -> bool:
        """Whether its figures are to be reckoned with."""
        return self.fence not in UNBELIEVED

    @property
    def shared(self) -> bool:
        return self.device.sharing != "none"

    @property
    def common(self) -> bool:
        """Whether several pods can be in its memory at once."""
        return self.shared or self.sharers > 1

    @property
    def committed_bytes(self) -> int:
        return self.promised_bytes + self.awaited_bytes + self.strays_bytes + self.unowned_bytes

    @property
    def certain_room_bytes(self) -> int:
        """Left for a pod that comes here whatever the plugin gives it and everybody else."""
        taken_bytes = self.promised_bytes + self.strays_bytes + self.unowned_bytes
        return self.allocatable_bytes - taken_bytes - self.crowd_bytes

    @property
    def headroom_bytes(self) -> int:
        """Negative when more is committed than there is: the truth is shown, never hidden."""
        return self.allocatable_bytes - self.committed_bytes


def weigh(
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    reserve_bytes: int,
    unowned_tolerance_bytes: int,
    leaving: Set[str] = frozenset(),
    device_choice: DeviceChoice = DeviceChoice.PREDICTED,
) -> tuple[DeviceTerms, ...]:
    """Weigh every device that the node reports, in the report's order.

    ``reservations`` maps pod uid to what was promised, bystanders included; ``leaving`` are the
    uids of pods that are ending or have ended.
    """
    devices = status.devices
    memories = _memories(devices)
    elsewhere = _Elsewhere(reservations)
    uses = _Uses(status, elsewhere.uids)
    fences = _fences(devices, memories)
    queue = _Queue(devices, reservations, uses)
    ways = _ways(status, uses, queue, leaving, device_choice)
    weighed: dict[_Memory, _Commitments] = {}
    terms: list[DeviceTerms] = []
    for slot, device in enumerate(devices):
        mates = memories[slot]
        if mates not in weighed:
            sitting = _sitting(mates, devices, reservations, uses, elsewhere)
            weighed[mates] = _Commitments(
                sitting=sitting,
                coming=queue.for_memory(mates, {holder.uid for holder in sitting}),
                # Of those that the plugin did not put there the replica tells nothing.
                ending=sorted(
                    h.charged_bytes
                    for h in sitting
                    if h.uid in leaving and h.uid not in elsewhere.uids
                ),
                ways=[ways[mate] for mate in mates],
                extra=queue.renamed(mates),
            )
        held = weighed[mates]
        strays_bytes = uses.strays(mates, reservations)
        fence, fence_detail = fences.get(slot, (None, ""))
        believed = fence not in UNBELIEVED
        told_bytes = _attributed([devices[i] for i in mates], uses.known(mates))
        unowned_bytes = 0
        if believed:
            explained_bytes = held.sitting_bytes + strays_bytes
            if told_bytes is not None:
                unowned_bytes = told_bytes
            else:
                # All use beyond what is charged for the pods seen here.
                unowned_bytes = max(devices[i].used_bytes for i in mates) - explained_bytes
            unowned_bytes = max(0, unowned_bytes - unowned_tolerance_bytes)
        allocatable_bytes = device.memory_bytes - device.reserved_bytes - reserve_bytes
        allocatable_bytes = max(0, allocatable_bytes) if believed else 0
        left_bytes = allocatable_bytes - strays_bytes - unowned_bytes
        terms.append(
            DeviceTerms(
                device=device,
                reserve_bytes=reserve_bytes,
                allocatable_bytes=allocatable_bytes,
                promised_bytes=held.sitting_bytes,
                awaited_bytes=held.awaited_bytes,
                strays_bytes=strays_bytes,
                unowned_bytes=unowned_bytes,
                attributed=told_bytes is not None,
                room_bytes=held.room_bytes(left_bytes, 1),
                several_room_bytes=held.room_bytes(left_bytes, ALL_PICKS),
                crowd_bytes=held.crowd_bytes,
                awaited_replicas=ways[slot].picks,
                policy=ways[slot].policy,
                first=ways[slot].first,
                leaving=ways[slot].leaving,
                single=_refuses_several(device, status.plugin),
                slot_safe=believed
                and held.largest_bytes * sum(devices[mate].replicas.total for mate in mates)
                <= left_bytes,
                holders=held.holders,
                sharers=len(mates),
                fence=fence,
                fence_detail=fence_detail,
                activity=reported(device, status.observed_at),
            )
        )
    return tuple(terms)


def possibilities(
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    leaving: Set[str],
    device_choice: DeviceChoice,
) -> list[Chance]:
    """What the plugin could do with each device, in the report's order; as ``weigh`` has it."""
    uses = _Uses(status, _Elsewhere(reservations).uids)
    queue = _Queue(status.devices, reservations, uses)
    return _ways(status, uses, queue, leaving, device_choice)


def _ways(
    status: GPUNodeStatus,
    uses: "_Uses",
    queue: "_Queue",
    leaving: Set[str],
    device_choice: DeviceChoice,
) -> list[Chance]:
    slots = range(len(status.devices))
    return chances(
        status.devices,
        status.plugin,
        device_choice,
        queue.picks,
        queue.promised,
        [uses.replicas_of(slot, leaving) for slot in slots],
        [uses.replicas_of(slot) for slot in slots],
    )


def _refuses_several(device: Device, plugin: Plugin) -> bool:
    """Whether it refuses a container with several shared replicas, after the pod was bound."""
    if device.sharing == "none":
        return False
    refuses = plugin.fail_requests_greater_than_one
    return device.sharing == "mps" if refuses is None else refuses


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
    before it held, and the kubelet names both. Pods ``elsewhere`` may use a device without holding
    a replica of it.
    """

    def __init__(self, status: GPUNodeStatus, elsewhere: Container[str]) -> None:
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
            replicas = self._replicas.setdefault(row.uid, {}).setdefault(slot, set())
            if row.replica or row.uid not in elsewhere:
                replicas.add(row.replica)
            used = self._bytes.setdefault(slot, {})
            used[row.uid] = _sum_known(used.get(row.uid, 0), row.used_bytes)

    def uids(self, slot: int) -> Collection[str]:
        """The pods that were observed there."""
        return self._bytes.get(slot, {}).keys()

    def replicas_of(self, slot: int, uids: Set[str] | None = None) -> int:
        """How many replicas these pods were observed to hold there; None: all pods."""
        held = self._bytes.get(slot, {}).keys()
        return sum(
            len(self._replicas[uid][slot]) for uid in (held if uids is None else held & uids)
        )

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


class _Elsewhere:
    """Pods whose own variable decides their devices, wherever their replicas are."""

    def __init__(self, reservations: Mapping[str, Reservation]) -> None:
        #: uid -> device -> bytes.
        self.uids: dict[str, dict[str, int]] = {}
        #: Device -> those that are promised to it.
        self._on: dict[str, list[str]] = {}
        for uid, reservation in reservations.items():
            for charge in reservation.charges:
                if charge.by_environment:
                    promised = self.uids.setdefault(uid, {})
                    for uuid, size in charge.candidates.items():
                        promised[uuid] = promised.get(uuid, 0) + size
                        self._on.setdefault(uuid, []).append(uid)

    def holders(
        self,
        memory: _Memory,
        devices: Sequence[Device],
        reservations: Mapping[str, Reservation],
        uses: _Uses,
    ) -> list[Holder]:
        """Those that are promised to a memory, or are seen to use it."""
        uuids = [devices[slot].uuid for slot in memory]
        seen = [uid for slot in memory for uid in uses.uids(slot) if uid in self.uids]
        promised = [uid for uuid in uuids for uid in self._on.get(uuid, ())]
        found: list[Holder] = []
        for uid in dict.fromkeys([*seen, *promised]):
            measured = uses.measured(uid, memory) if uid in seen else None
            sizes = [self.uids[uid][uuid] for uuid in uuids if uuid in self.uids[uid]]
            if not sizes:
                if measured == 0:
                    continue  # a replica of the device is its, and the device is not
                # It uses the device, or nobody can tell that it does not.
                sizes = list(self.uids[uid].values())
            names = reservations[uid].namespace, reservations[uid].name
            most = max(sizes, default=0)
            found.append(Holder(uid, *names, most, measured, observed=bool(measured)))
        return found


def _sitting(
    memory: _Memory,
    devices: Sequence[Device],
    reservations: Mapping[str, Reservation],
    uses: _Uses,
    elsewhere: _Elsewhere,
) -> list[Holder]:
    """The pods with a reservation that were seen in this memory, or are there for certain."""
    holders = elsewhere.holders(memory, devices, reservations, uses) if elsewhere.uids else []
    for uid in dict.fromkeys(uid for slot in memory for uid in uses.uids(slot)):
        reservation = reservations.get(uid)
        if reservation is None or uid in elsewhere.uids:
            continue
        asked = 0
        for slot in memory:
            device = devices[slot]
            due = (
                _due(reservation, device)
                if uid in uses.uids(slot)
                # Elsewhere in the same memory it may still be given what it waits for.
                else [c for c in reservation.charges if _means(c, device) and uses.missing(uid, c)]
            )
            asked = max(asked, *(_bytes_on(charge, device) for charge in due), 0)
        measured = uses.measured(uid, memory)
        names = reservation.namespace, reservation.name
        holders.append(Holder(uid, *names, asked, measured, observed=True))
    return holders


class _Queue:
    """Pods that wait for replicas: bound, and not observed, or not with all that they asked for."""

    def __init__(
        self, devices: Sequence[Device], reservations: Mapping[str, Reservation], uses: _Uses
    ) -> None:
        self._devices = devices
        self._reservations = reservations
        self._holders: dict[str, Holder] = {}
        #: Resource -> replicas waited for.
        self.picks = Counter[str]()
        #: Resource -> the devices that were chosen for those that wait; "" where none was.
        self.promised: dict[str, set[str]] = {}
        #: Resource -> pod, its charge, the most that it asks for on any device.
        self._waiting: dict[str, list[tuple[str, Charge, int]]] = {}
        #: Uuid -> those that were promised the device under a name that it had before.
        self._renamed: dict[str, list[tuple[str, Charge, int]]] = {}
        resource_of = {device.uuid: device.resource for device in devices}
        for uid, reservation in reservations.items():
            for charge in reservation.charges:
                resource = charge.resource
                if not (missing := uses.missing(uid, charge)):
                    continue
                self.picks[resource] += missing
                self.promised.setdefault(resource, set()).add(charge.choice)
                if charge.by_environment:
                    continue  # it takes a replica away, and no memory of its device
                most_bytes = max(charge.candidates.values(), default=0)
                waiter = (uid, charge, most_bytes)
                self._waiting.setdefault(resource, []).append(waiter)
                for uuid in charge.candidates:
                    if resource_of.get(uuid, resource) != resource:
                        self._renamed.setdefault(uuid, []).append(waiter)

    def for_memory(self, memory: _Memory, besides: Set[str]) -> list[Holder]:
        """Whom the plugin could send there as far as the name of the resource decides, the
        largest first; ``besides`` are there already."""
        asked: dict[str, int] = {}
        for slot in memory:
            device = self._devices[slot]
            uuid = device.uuid
            for waiters in (self._waiting.get(device.resource, ()), self._renamed.get(uuid, ())):
                for uid, charge, most_bytes in waiters:
                    size = charge.candidates.get(uuid, most_bytes)
                    if asked.get(uid, -1) < size:
                        asked[uid] = size
        coming = [self._holder(*pair) for pair in asked.items() if pair[0] not in besides]
        coming.sort(key=_requested_bytes, reverse=True)
        return coming

    def _holder(self, uid: str, size: int) -> Holder:
        """Mostly the same for each device."""
        holder = self._holders.get(uid)
        if holder is None or holder.requested_bytes != size:
            promise = self._reservations[uid]
            holder = Holder(uid, promise.namespace, promise.name, size, None, observed=False)
            self._holders[uid] = holder
        return holder

    def renamed(self, memory: _Memory) -> int:
        """How many may come there whatever the plugin thinks of the device's present name."""
        return sum(len(self._renamed.get(self._devices[slot].uuid, ())) for slot in memory)


_requested_bytes = attrgetter("requested_bytes")


class _Commitments:
    """Who is in one memory, who may come, and the worst that can become of it."""

    def __init__(
        self,
        sitting: list[Holder],
        coming: list[Holder],
        ending: list[int],
        ways: list[Chance],
        extra: int,
    ) -> None:
        charged = [holder.charged_bytes for holder in sitting]
        self.sitting_bytes = sum(charged)
        self._sizes = [holder.requested_bytes for holder in coming]
        self.largest_bytes = max((*self._sizes[:1], *charged, 0))
        #: Number of pods -> the most bytes that so many of those that come can ask for.
        self._most_bytes = [0, *accumulate(self._sizes)]
        self.crowd_bytes = self._most_bytes[-1]
        #: Bytes of each pod that is ending, the smallest first.
        self._ending = ending
        self._ways = ways
        #: How many may be there that the plugin's choice says nothing about.
        self._besides = extra + sum(way.unexplained for way in ways)
        #: How many of the replicas that are leaving may have been let go; where devices share the
        #: memory it is not looked into which pod leaves which.
        self._gone = range(ways[0].leaving + 1 if len(ways) == 1 else 1)
        arrivals = [self._most(0, gone) + self._besides for gone in self._gone]
        self.holders = (*sitting, *coming) if any(arrivals) else tuple(sitting)
        #: What those that come add to those that sit, in the worst case.
        self.awaited_bytes = max(
            self._top(count) - self._freed_bytes(gone)
            for gone, count in zip(self._gone, arrivals, strict=True)
        )

    def room_bytes(self, left_bytes: int, picks: int) -> int:
        """What is left of ``left_bytes`` for a newcomer that asks for so many replicas."""
        least: int | None = None
        for gone in self._gone:
            most = self._most(picks, gone)
            if not most:
                continue
            others = most + self._besides - 1
            taken_bytes = self.sitting_bytes - self._freed_bytes(gone) + self._top(others)
            room_bytes = left_bytes - taken_bytes
            if others < len(self._sizes) and self._sizes[others] > room_bytes:
                # The newcomer can push that one here, if it is given another device itself.
                room_bytes -= self._sizes[others]
            least = room_bytes if least is None else min(least, room_bytes)
        if least is None:
            return left_bytes - self.sitting_bytes - self.awaited_bytes
        return least

    def _most(self, newcomers: int, gone: int) -> int:
        """The most pods on their way that the plugin can send here, of several devices at most the
        sum."""
        if len(self._ways) == 1:
            return self._ways[0].most(newcomers, gone)
        return sum(way.most(newcomers, way.leaving) for way in self._ways)

    def _freed_bytes(self, gone: int) -> int:
        """What is free at least when so many of the replicas that are leaving have been let go."""
        if not gone:
            return 0
        staying = self._ways[0].leaving - gone
        return sum(self._ending[: max(0, len(self._ending) - staying)])

    def _top(self, count: int) -> int:
        return self._most_bytes[min(count, len(self._sizes))]


def _due(reservation: Reservation, device: Device) -> list[Charge]:
    """The charges for which the pod can sit on a device where it was seen.

    A plugin that was restarted with another configuration can rename the resource under it; then
    any of them can be meant.
    """
    charges = reservation.charges
    return [charge for charge in charges if _means(charge, device)] or charges


def _means(charge: Charge, device: Device) -> bool:
    return charge.resource == device.resource or device.uuid in charge.candidates


def _bytes_on(charge: Charge, device: Device) -> int:
    """What was promised for the device; the most for any, where it was not thought of."""
    most = max(charge.candidates.values(), default=0)
    return charge.candidates.get(device.uuid, most)


def _attributed(devices: Sequence[Device], known: bool) -> int | None:
    """Bytes of one memory that strangers use; None where the agent cannot attribute processes, or
    the driver does not tell what one of them uses."""
    return _sum_known(*(device.unowned_bytes for device in devices)) if known else None


def _fences(
    devices: Sequence[Device], memories: Sequence[_Memory]
) -> dict[int, tuple[Reason, str]]:
    """Slot -> why nothing may be placed on it."""
    times = Counter(device.uuid for device in devices)
    wrong: dict[int, str] = {}
    silent: dict[int, str] = {}
    sick: dict[str, str] = {}
    for slot, device in enumerate(devices):
        if times[device.uuid] > 1:
            wrong[slot] = f"uuid {device.uuid!r} is reported {times[device.uuid]} times"
        elif device.memory_bytes <= 0 and not device.healthy:
            # Jetson, DGX Spark: absent is absent, and never what the host has.
            silent[slot] = device.health_reason or "unhealthy"
        elif why := _contradiction(device):
            wrong[slot] = why
        if not device.healthy:
            sick[device.uuid] = device.health_reason or "unhealthy"
    fences: dict[int, tuple[Reason, str]] = {}
    for slot, device in enumerate(devices):
        mates = (slot, *memories[slot])
        if mistaken := next((wrong[mate] for mate in mates if mate in wrong), ""):
            fences[slot] = (Reason.CONTRADICTORY_REPORT, mistaken)
        elif untold := next((silent[mate] for mate in mates if mate in silent), ""):
            fences[slot] = (Reason.MEMORY_UNKNOWN, untold)
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
    return _impossible_mps(device) if device.sharing == "mps" else ""


def _impossible_mps(device: Device) -> str:
    """Why the plugin cannot share the device by MPS as it is said to; empty where it can."""
    if device.kind == "mig":
        return "a MIG device is said to be shared by MPS, which the plugin refuses"
    old = device.architecture in _OLD_ARCHITECTURES
    most = MAX_OLD_MPS_REPLICAS if old else MAX_MPS_REPLICAS
    if device.replicas.total > most:
        return f"{device.replicas.total} replicas by MPS, which takes {most} clients of this GPU"
    return ""
