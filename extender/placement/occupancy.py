"""Who is in each memory of a node, who may come there, and what the plugin can do with its devices:
all of the equation that does not hang on how many bytes anybody uses.

Memory that a pod takes or frees is most of what agents tell, and changes none of this. So it is
found once, and kept until something else is told.
"""

from collections import Counter
from collections.abc import Collection, Container, Iterable, Mapping, Sequence, Set
from functools import lru_cache
from itertools import accumulate
from operator import attrgetter, eq
from types import MappingProxyType
from typing import Any, TypeVar

import msgspec

from contract.annotations import DeviceChoice
from contract.gpunode import Charge, Device, GPUNodeStatus, PodUse, Reservation
from extender.placement.device_health import doubles
from extender.placement.device_plugin_model import Policy
from extender.placement.device_terms import ALL_PICKS, Chance, chances

T = TypeVar("T")


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


#: Rows of the report's pods, by their place in it.
Rows = tuple[int, ...]
#: Slots whose devices share one memory, in order; most memories have one.
Memory = tuple[int, ...]


class Sitter(msgspec.Struct, frozen=True, gc=False):
    """A pod with a reservation that was seen in a memory, or is there for certain."""

    uid: str
    namespace: str
    name: str
    requested_bytes: int
    #: What was measured of it in this memory; none where it was not seen there.
    rows: Rows
    #: Whether its own variable decides where it is: then it is seen by what it uses.
    elsewhere: bool


class Tenancy(msgspec.Struct, frozen=True, gc=False):
    """One memory. What pods on their way can take of it is told for each number of the replicas
    that are leaving, from none up, that may have been let go."""

    sitters: tuple[Sitter, ...]
    #: Those of the sitters that are ending, by their place.
    ending: tuple[int, ...]
    #: Of all who were measured there, and of each pod to which nothing is promised.
    rows: Rows
    unobserved_pods: tuple[Rows, ...]
    #: Whom the plugin could send there, the largest first.
    coming: tuple[Holder, ...]
    #: Number of pods -> the most bytes that so many of those that come can ask for.
    most_bytes: tuple[int, ...]
    #: Replicas that are leaving.
    leaving: int
    #: How many come at most; with one newcomer, or one that takes any number of replicas, among
    #: them. None where the newcomer cannot.
    arrivals: tuple[int, ...]
    with_newcomer: tuple[int | None, ...]
    with_several: tuple[int | None, ...]

    @property
    def crowd_bytes(self) -> int:
        return self.most_bytes[-1]


class Slot(msgspec.Struct, frozen=True, gc=False):
    """One device, as far as the plugin goes; see ``DeviceTerms``."""

    policy: Policy
    first: int | None
    leaving: int
    unconfirmed_replicas: int


class Occupancy(msgspec.Struct, frozen=True, gc=False):
    """One node; all by its devices, in the report's order."""

    slots: tuple[Slot, ...]
    memories: tuple[Memory, ...]
    tenancies: tuple[Tenancy, ...]
    #: UUIDs that several devices are reported by.
    doubled: Mapping[str, int]
    #: Of each row of the report's pods what is charged for it at least: what its pod asked for.
    #: None where there is more to the charge than this row.
    asked_bytes: tuple[int | None, ...]


class Found(msgspec.Struct, frozen=True, gc=False):
    """An occupancy, and what it was found of last."""

    status: GPUNodeStatus
    reservations: Mapping[str, Reservation]
    leaving: Set[str]
    device_choice: DeviceChoice
    occupancy: Occupancy


def find(
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    leaving: Set[str],
    device_choice: DeviceChoice,
    before: Found | None,
) -> Found:
    """What ``occupy`` says; the very same object as ``before`` where it would be equal."""
    if before is not None and (
        before.device_choice is device_choice
        and before.leaving == leaving
        and _alike(before.reservations, reservations)
        and _shows_the_same(before.status, status)
    ):
        occupancy = before.occupancy
    else:
        occupancy = occupy(status, reservations, leaving, device_choice)
    return Found(status, reservations, leaving or _NOBODY, device_choice, occupancy)


_NOBODY: Set[str] = frozenset()


def _alike(was: Mapping[str, Reservation], now: Mapping[str, Reservation]) -> bool:
    """Whether the same is promised to the same, in the same order."""
    if was is now:
        return True
    return list(was) == list(now) and all(
        held is reservation
        or (held.charges == reservation.charges and _named(held) == _named(reservation))
        for held, reservation in zip(was.values(), now.values(), strict=True)
    )


def _shows_the_same(was: GPUNodeStatus, now: GPUNodeStatus) -> bool:
    return (
        was.plugin == now.plugin
        and len(was.devices) == len(now.devices)
        and len(was.pods) == len(now.pods)
        and all(map(eq, map(_occupied, was.devices), map(_occupied, now.devices)))
        and all(map(eq, map(_row, was.pods), map(_row, now.pods)))
    )


_named = attrgetter("namespace", "name")
_occupied = attrgetter(
    "uuid", "resource", "sharing", "replicas", "kind", "parent", "gpu_instance", "numa_node"
)


def _row(use: PodUse) -> tuple[object, ...]:
    # Some are only there if they use something: any bytes, none, or nobody can tell.
    used = use.used_bytes
    uses = None if used is None else (used > 0) - (used < 0)
    return use.uid, use.device, use.replica, uses


def occupy(
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    leaving: Set[str] = frozenset(),
    device_choice: DeviceChoice = DeviceChoice.PREDICTED,
) -> Occupancy:
    """``reservations`` maps pod uid to what was promised, bystanders included; ``leaving`` are the
    uids of pods that are ending or have ended."""
    devices = status.devices
    memories = memories_of(devices)
    elsewhere = _Elsewhere(reservations)
    uses = _Uses(status, elsewhere.uids)
    queue = _Queue(devices, reservations, uses)
    ways = _ways(status, uses, queue, leaving, device_choice)
    tenancies: dict[Memory, Tenancy] = {}
    for memory in memories:
        if memory not in tenancies:
            sitters = _sitting(memory, devices, reservations, uses, elsewhere)
            tenancies[memory] = _tenancy(
                sitters,
                # Of those that the plugin did not put there the replica tells nothing.
                tuple(
                    place
                    for place, sitter in enumerate(sitters)
                    if sitter.uid in leaving and sitter.uid not in elsewhere.uids
                ),
                uses.rows(memory),
                uses.unobserved_pods(memory, reservations),
                queue.for_memory(memory, {sitter.uid for sitter in sitters}),
                [ways[mate] for mate in memory],
                queue.renamed(memory),
            )
    return Occupancy(
        slots=_once(tuple([_once(Slot(w.policy, w.first, w.leaving, w.picks)) for w in ways])),
        memories=_once(tuple(memories)),
        tenancies=tuple([tenancies[memory] for memory in memories]),
        doubled=doubles(devices) or _NONE_DOUBLED,
        asked_bytes=_once(_asked_bytes(len(status.pods), tenancies.values())),
    )


def _asked_bytes(rows: int, tenancies: Iterable[Tenancy]) -> tuple[int | None, ...]:
    asked_bytes: list[int | None] = [None] * rows
    for tenancy in tenancies:
        for sitter in tenancy.sitters:
            if len(sitter.rows) == 1:
                asked_bytes[sitter.rows[0]] = sitter.requested_bytes
    return tuple(asked_bytes)


_NONE_DOUBLED: Mapping[str, int] = MappingProxyType({})


@lru_cache(maxsize=4096)
def _first(of: Any) -> Any:
    return of


def _once(of: T) -> T:
    """Return the first of all equal objects: what most nodes have in common is kept once."""
    first: T = _first(of)
    return first


def possibilities(
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    leaving: Set[str],
    device_choice: DeviceChoice,
) -> list[Chance]:
    """What the plugin could do with each device, in the report's order."""
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
        queue.reserved,
        [uses.replicas_of(slot, leaving) for slot in slots],
        [uses.replicas_of(slot) for slot in slots],
    )


def _tenancy(
    sitters: list[Sitter],
    ending: tuple[int, ...],
    rows: Rows,
    unobserved_pods: tuple[Rows, ...],
    coming: list[Holder],
    ways: list[Chance],
    renamed: int,
) -> Tenancy:
    #: How many may be there that the plugin's choice says nothing about.
    besides = renamed + sum(way.unexplained for way in ways)
    # Where devices share the memory it is not looked into which pod leaves which.
    leaving = ways[0].leaving if len(ways) == 1 else 0

    def most(newcomers: int, gone: int) -> int:
        """The most pods on their way that the plugin can send there, of several devices at most
        the sum."""
        if len(ways) == 1:
            return ways[0].most(newcomers, gone)
        return sum(way.most(newcomers, way.leaving) for way in ways)

    def others(newcomers: int) -> tuple[int | None, ...]:
        found = [most(newcomers, gone) for gone in range(leaving + 1)]
        return tuple([count + besides - 1 if count else None for count in found])

    tenancy = Tenancy(
        sitters=tuple(sitters),
        ending=ending,
        rows=rows,
        unobserved_pods=unobserved_pods,
        coming=tuple(coming),
        most_bytes=_once((0, *accumulate([holder.requested_bytes for holder in coming]))),
        leaving=leaving,
        arrivals=_once(tuple([most(0, gone) + besides for gone in range(leaving + 1)])),
        with_newcomer=_once(others(1)),
        with_several=_once(others(ALL_PICKS)),
    )
    return tenancy if rows or sitters or coming else _once(tenancy)


def memories_of(devices: Sequence[Device]) -> list[Memory]:
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
        self._pods = status.pods
        slot_of = {device.uuid: slot for slot, device in enumerate(status.devices)}
        self._resources = [device.resource for device in status.devices]
        #: uid -> slot -> replicas.
        self._replicas: dict[str, dict[int, set[str]]] = {}
        #: slot -> uid -> rows.
        self._rows: list[dict[str, list[int]]] = [{} for _ in status.devices]
        for place, row in enumerate(status.pods):
            slot = slot_of.get(row.device)
            if slot is None:
                continue
            replicas = self._replicas.setdefault(row.uid, {}).setdefault(slot, set())
            if row.replica or row.uid not in elsewhere:
                replicas.add(row.replica)
            self._rows[slot].setdefault(row.uid, []).append(place)

    def uids(self, slot: int) -> Set[str]:
        """The pods that were observed there."""
        return self._rows[slot].keys()

    def replicas_of(self, slot: int, uids: Set[str] | None = None) -> int:
        """How many replicas these pods were observed to hold there; None: all pods."""
        held = self._rows[slot]
        return sum([len(self._replicas[uid][slot]) for uid in held if uids is None or uid in uids])

    def missing(self, uid: str, charge: Charge) -> int:
        """Replicas of a charge that the pod was not observed to hold."""
        held = 0
        for slot, replicas in self._replicas.get(uid, {}).items():
            if self._resources[slot] == charge.resource:
                held += len(replicas)
        return max(0, charge.count - held)

    def of(self, uid: str, memory: Memory) -> Rows:
        """The rows of one pod in a memory."""
        return _once(tuple([row for slot in memory for row in self._rows[slot].get(uid, ())]))

    def uses_nothing(self, rows: Rows) -> bool:
        """Whether that was measured of these."""
        return all(self._pods[row].used_bytes == 0 for row in rows)

    def rows(self, memory: Memory) -> Rows:
        rows = [row for slot in memory for of in self._rows[slot].values() for row in of]
        return _once(tuple(rows))

    def unobserved_pods(
        self, memory: Memory, reservations: Mapping[str, Reservation]
    ) -> tuple[Rows, ...]:
        uids = dict.fromkeys(uid for slot in memory for uid in self._rows[slot])
        return tuple([self.of(uid, memory) for uid in uids if uid not in reservations])


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
                    reserved = self.uids.setdefault(uid, {})
                    for uuid, size in charge.candidates.items():
                        reserved[uuid] = reserved.get(uuid, 0) + size
                        self._on.setdefault(uuid, []).append(uid)

    def sitters(
        self,
        memory: Memory,
        devices: Sequence[Device],
        reservations: Mapping[str, Reservation],
        uses: _Uses,
    ) -> list[Sitter]:
        """Those that are promised to a memory, or are seen to use it."""
        uuids = [devices[slot].uuid for slot in memory]
        seen = [uid for slot in memory for uid in uses.uids(slot) if uid in self.uids]
        reserved = [uid for uuid in uuids for uid in self._on.get(uuid, ())]
        found: list[Sitter] = []
        for uid in dict.fromkeys([*seen, *reserved]):
            rows = uses.of(uid, memory)
            sizes = [self.uids[uid][uuid] for uuid in uuids if uuid in self.uids[uid]]
            if not sizes:
                if uses.uses_nothing(rows):
                    continue  # a replica of the device is its, and the device is not
                # It uses the device, or nobody can tell that it does not.
                sizes = list(self.uids[uid].values())
            names = reservations[uid].namespace, reservations[uid].name
            found.append(Sitter(uid, *names, max(sizes, default=0), rows, elsewhere=True))
        return found


def _sitting(
    memory: Memory,
    devices: Sequence[Device],
    reservations: Mapping[str, Reservation],
    uses: _Uses,
    elsewhere: _Elsewhere,
) -> list[Sitter]:
    """The pods with a reservation that were seen in this memory, or are there for certain."""
    sitters = elsewhere.sitters(memory, devices, reservations, uses) if elsewhere.uids else []
    for uid in dict.fromkeys([uid for slot in memory for uid in uses.uids(slot)]):
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
            for charge in due:
                asked = max(asked, _bytes_on(charge, device))
        names = reservation.namespace, reservation.name
        sitters.append(Sitter(uid, *names, asked, uses.of(uid, memory), elsewhere=False))
    return sitters


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
        self.reserved: dict[str, set[str]] = {}
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
                self.reserved.setdefault(resource, set()).add(charge.choice)
                if charge.by_environment:
                    continue  # it takes a replica away, and no memory of its device
                most_bytes = max(charge.candidates.values(), default=0)
                waiter = (uid, charge, most_bytes)
                self._waiting.setdefault(resource, []).append(waiter)
                for uuid in charge.candidates:
                    if resource_of.get(uuid, resource) != resource:
                        self._renamed.setdefault(uuid, []).append(waiter)

    def for_memory(self, memory: Memory, besides: Set[str]) -> list[Holder]:
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
            reservation = self._reservations[uid]
            holder = Holder(
                uid, reservation.namespace, reservation.name, size, None, observed=False
            )
            self._holders[uid] = holder
        return holder

    def renamed(self, memory: Memory) -> int:
        """How many may come there whatever the plugin thinks of the device's present name."""
        if not self._renamed:
            return 0
        return sum([len(self._renamed.get(self._devices[slot].uuid, ())) for slot in memory])


_requested_bytes = attrgetter("requested_bytes")


def _due(reservation: Reservation, device: Device) -> Collection[Charge]:
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
    size = charge.candidates.get(device.uuid)
    return max(charge.candidates.values(), default=0) if size is None else size
