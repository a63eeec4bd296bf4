"""Decides which replicas a container should get, for a pod whose name nobody tells. Pure.

The kubelet asks for "one of these" and does not say for whom. The ledger knows whom it sent here
and the kubelet's checkpoint who has arrived, so it is for one of those still on their way, or for
a stranger. All that are on their way were promised the same device (the extender sees to it), so
for most of the time there is nothing to guess.

That device is a wish. It is not followed where it has no room for the largest of those on their
way: because a stranger sits there now, or somebody took more than was promised; nor where it has
no replica left, or the kubelet does not offer it. Then it is the fullest that has room for the
largest. While one is on its way nothing else is promised on this node but on that very device,
so what is found free elsewhere is free. Nowhere room is a refusal: the pod fails, and nothing is
overcommitted.

Who was promised no device by name, as when nobody steered, was promised what the plugin's own order
comes to, and so were others after it: of the devices with room it is the one the plugin would take.

A stranger comes where most is left: who was bound by somebody else is charged and never refused,
unless one of ours, which it could be, would have to be.
"""

from collections.abc import Sequence, Set
from dataclasses import dataclass

import msgspec

from agent.gate_decision import Limits, asked, certain, missing, reserved_for, rows_in, taken_bytes
from agent.probes.cgroup import is_static
from agent.probes.kubelet.checkpoint import Entry
from agent.status.attribution import memories
from agent.steering.messages import Wish
from contract.gpunode import (
    ADOPTED,
    Charge,
    Device,
    GPUNodeSpec,
    GPUNodeStatus,
    PodUse,
    Reservation,
)

#: Times the replicas taken of a device: the plugin takes the device with the least of it.
_ORDER = {"distributed": 1, "packed": -1, "unknown": 0}


@dataclass(frozen=True, slots=True)
class Choice:
    #: Empty: as the plugin likes.
    replicas: tuple[str, ...]
    device: str = ""
    #: The device that those on their way were promised; empty where they were promised several.
    reserved: str = ""
    #: How many pods of ours are on their way.
    awaited: int = 0


@dataclass(frozen=True, slots=True)
class NoRoom:
    """The largest that is on its way asks for this much, and no device has it."""

    asked_bytes: int


def choose(
    wish: Wish,
    resource: str,
    spec: GPUNodeSpec,
    sample: GPUNodeStatus,
    entries: Sequence[Entry],
    limits: Limits,
    steered: bool = True,
    arrived_before: Set[str] = frozenset(),
) -> Choice | NoRoom:
    """The replicas for one container.

    ``steered`` says whether the GPUNode tells the extender that we choose. Where it does not, what
    was promised since counts on the plugin's own choice. ``arrived_before`` are uids of pods that
    had devices of this kubelet at some time.

    ``spec`` must have been read consistently and after the kubelet asked; so must ``entries``, of
    the checkpoint. ``sample`` is our own, newest and fresh.
    """
    seen = _holders(sample, spec)
    sample = arrived(sample, entries, wish)
    # Who held something and let go of all of it has ended, and is not on its way, though the
    # promise may not have been taken back yet.
    ended = (seen | arrived_before) - _holders(sample, spec)
    free = _by_device(wish.available)
    waiting = [
        (uid, reservation, charge)
        for uid, reservation in spec.reservations.items()
        for charge in reservation.charges
        if charge.resource == resource and uid not in ended and missing(sample, uid, charge)
    ]
    if not steered and not any(charge.choice for _, _, charge in waiting):
        return Choice(())
    ours = [each for each in waiting if ADOPTED not in each[1].flags and not each[2].by_environment]
    reserved = {charge.choice for _, _, charge in ours}
    wanted = next(iter(reserved)) if len(reserved) == 1 else ""
    rooms: list[_Room] = []
    for memory in memories(sample.devices):
        for device in memory:
            given = _given(wish, free.get(device.uuid, ()))
            if given and device.resource == resource:
                left = len(free[device.uuid])
                rooms.append(_room(given, left, device, memory, spec, sample, limits))

    order = _ORDER[sample.plugin.allocation_policy] if reserved == {""} else 0

    def best_for(these: Sequence[_Waiting]) -> _Room | None:
        """What was promised, or the next in the plugin's order, or else the fullest, where any of
        these has room."""
        good = [room for room in rooms if room.takes(these)]
        return min(
            good,
            key=lambda room: (
                room.device != wanted,
                order * room.taken,
                room.left_bytes,
                room.device,
            ),
            default=None,
        )

    best = (best_for(waiting) if waiting else None) or (best_for(ours) if ours else None)
    if best is None and ours:
        if not rooms and any(not charge.choice for _, _, charge in ours):
            return Choice(())  # several of one container, promised when nobody steered
        return NoRoom(max(_most_bytes(charge) for _, _, charge in ours))
    if best is None and rooms:
        best = max(rooms, key=lambda room: (room.healthy, room.left_bytes, room.device))
    if best is None:
        return Choice(())
    return Choice(best.replicas, best.device, wanted, len(ours))


def arrived(sample: GPUNodeStatus, entries: Sequence[Entry], wish: Wish) -> GPUNodeStatus:
    """The sample as it would read now: who was admitted since is in it, and who let go is not."""
    offered = set(wish.available) - set(wish.must_include)
    holders = {
        replica: entry for entry in entries for replica in entry.replicas if replica not in offered
    }
    rows = [
        row
        for row in sample.pods
        if row.replica not in offered
        # A static pod has another uid in the checkpoint than in the API.
        and (
            (holder := holders.get(row.replica)) is None
            or holder.pod_uid == row.uid
            or is_static(holder.pod_uid)
        )
    ]
    shown = {row.replica for row in rows}
    rows += [
        PodUse(
            uid=entry.pod_uid,
            device=device_of(replica),
            container=entry.container,
            replica=replica,
            used_bytes=0,
        )
        for replica, entry in holders.items()
        if replica not in shown
    ]
    return msgspec.structs.replace(sample, pods=rows)


def _holders(sample: GPUNodeStatus, spec: GPUNodeSpec) -> set[str]:
    return {reserved_for(row, spec) for row in sample.pods if row.replica}


def device_of(replica: str) -> str:
    """The uuid in a replica's id."""
    return replica.partition("::")[0]


_Waiting = tuple[str, Reservation, Charge]


@dataclass(frozen=True, slots=True)
class _Room:
    replicas: tuple[str, ...]
    device: str
    memory: Sequence[Device]
    sitting: Set[str]
    healthy: bool
    left_bytes: int
    #: Replicas that the plugin cannot give: allocated, or unhealthy.
    taken: int

    def takes(self, these: Sequence[_Waiting]) -> bool:
        """Whether each of these has room here. Of a pod that sits here already all that it asks
        for on the device is counted."""
        coming = (
            asked(reservation, self.memory, uses=False)
            for uid, reservation, _ in these
            if uid not in self.sitting
        )
        return self.healthy and self.left_bytes >= max(coming, default=0)


def _room(
    replicas: tuple[str, ...],
    free: int,
    device: Device,
    memory: Sequence[Device],
    spec: GPUNodeSpec,
    sample: GPUNodeStatus,
    limits: Limits,
) -> _Room:
    rows = rows_in(memory, sample)
    allocatable_bytes = device.memory_bytes - device.reserved_bytes - limits.reserve_bytes
    # Who says nothing is charged what a replica is worth.
    unattributed_use_bytes = max(0, allocatable_bytes) // max(1, device.replicas.total)
    taken = taken_bytes(memory, spec, rows, limits.tolerance_bytes, unattributed_use_bytes)
    return _Room(
        replicas=replicas,
        device=device.uuid,
        memory=memory,
        sitting={reserved_for(row, spec) for row in rows} | certain(spec, memory),
        healthy=all(mate.healthy for mate in memory),
        left_bytes=allocatable_bytes - taken,
        taken=device.replicas.total - free,
    )


def _by_device(replicas: Sequence[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for replica in sorted(replicas):
        found.setdefault(device_of(replica), []).append(replica)
    return found


def _given(wish: Wish, free: Sequence[str]) -> tuple[str, ...]:
    """What the container gets if all the rest comes from one device; empty where it cannot."""
    rest = [replica for replica in free if replica not in wish.must_include]
    needed = wish.size - len(wish.must_include)
    return (*wish.must_include, *rest[:needed]) if 0 < needed <= len(rest) else ()


def _most_bytes(charge: Charge) -> int:
    return max(charge.candidates.values(), default=0)
