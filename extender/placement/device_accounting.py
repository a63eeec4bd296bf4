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
from collections.abc import Collection, Sequence

import msgspec

from contract.gpunode import Device, GPUNodeStatus, Plugin
from contract.reasons import Reason
from extender.placement.device_health import UNBELIEVED, health_issues
from extender.placement.device_plugin_model import Policy
from extender.placement.occupancy import Holder, Occupancy, Tenancy
from extender.placement.sm_reading import Activity, reported


class DeviceTerms(msgspec.Struct, frozen=True, gc=False):
    """Every term of the equation for one device; of a large fleet there are tens of thousands,
    through which no garbage collection has to go."""

    device: Device
    reserve_bytes: int
    #: Zero where the figures make no sense or the reserves take it all.
    allocatable_bytes: int
    reservation_bytes: int
    unconfirmed_bytes: int
    unobserved_pods_bytes: int
    unattributed_bytes: int
    #: Whether the agent told whose the memory is. If not, unowned is what is used beyond the
    #: requests of the pods seen here, and those of idle pods can hide strangers.
    attributed: bool
    #: Left for a pod that asks for one replica of this device's resource, and for one that asks
    #: for more, if this device is given to it; negative where nobody may come.
    free_bytes: int
    several_free_bytes: int
    #: What all pods on their way ask for together, as if the plugin could give each of them this.
    crowd_bytes: int
    #: Replicas of this device's resource promised to pods that were not observed yet.
    unconfirmed_replicas: int
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
    health_issue: Reason | None
    health_detail: str
    #: How busy its SMs are; None where nobody who measures that tells.
    activity: Activity | None

    @property
    def believed(self) -> bool:
        """Whether its figures are to be reckoned with."""
        return self.health_issue not in UNBELIEVED

    @property
    def shared(self) -> bool:
        return self.device.sharing != "none"

    @property
    def common(self) -> bool:
        """Whether several pods can be in its memory at once."""
        return self.shared or self.sharers > 1

    @property
    def committed_bytes(self) -> int:
        return (
            self.reservation_bytes
            + self.unconfirmed_bytes
            + self.unobserved_pods_bytes
            + self.unattributed_bytes
        )

    @property
    def certain_free_bytes(self) -> int:
        """Left for a pod that comes here whatever the plugin gives it and everybody else."""
        taken_bytes = self.reservation_bytes + self.unobserved_pods_bytes + self.unattributed_bytes
        return self.allocatable_bytes - taken_bytes - self.crowd_bytes

    @property
    def headroom_bytes(self) -> int:
        """Negative when more is committed than there is: the truth is shown, never hidden."""
        return self.allocatable_bytes - self.committed_bytes


def weigh(
    occupancy: Occupancy,
    status: GPUNodeStatus,
    reserve_bytes: int,
    unattributed_tolerance_bytes: int,
) -> tuple[DeviceTerms, ...]:
    """Weigh every device that the node reports, in the report's order. ``occupancy`` says who is
    where on it by this report, or by an earlier one for which it was found to be the same."""
    devices, plugin = status.devices, status.plugin
    unhealthy = health_issues(devices, occupancy.memories, occupancy.doubled)
    used_bytes = [known(row.used_bytes) for row in status.pods]
    weighed: dict[tuple[int, ...], _Commitments] = {}
    terms: list[DeviceTerms] = []
    for device, slot, memory, of, (health_issue, health_detail) in zip(
        devices, occupancy.slots, occupancy.memories, occupancy.tenancies, unhealthy, strict=True
    ):
        held = weighed.get(memory)
        if held is None:
            held = weighed[memory] = _Commitments(of, used_bytes)
        believed = health_issue not in UNBELIEVED
        mates = [devices[mate] for mate in memory]
        told_bytes = _attributed(mates) if held.all_measured else None
        unattributed_bytes = 0
        if believed:
            explained_bytes = held.sitting_bytes + held.unobserved_pods_bytes
            if told_bytes is not None:
                unattributed_bytes = told_bytes
            else:
                # All use beyond what is charged for the pods seen here.
                unattributed_bytes = max([mate.used_bytes for mate in mates]) - explained_bytes
            unattributed_bytes = max(0, unattributed_bytes - unattributed_tolerance_bytes)
        allocatable_bytes = allocatable(device, reserve_bytes) if believed else 0
        left_bytes = allocatable_bytes - held.unobserved_pods_bytes - unattributed_bytes
        terms.append(
            DeviceTerms(
                device=device,
                reserve_bytes=reserve_bytes,
                allocatable_bytes=allocatable_bytes,
                reservation_bytes=held.sitting_bytes,
                unconfirmed_bytes=held.unconfirmed_bytes,
                unobserved_pods_bytes=held.unobserved_pods_bytes,
                unattributed_bytes=unattributed_bytes,
                attributed=told_bytes is not None,
                free_bytes=held.free_bytes(left_bytes, of.with_newcomer),
                several_free_bytes=held.free_bytes(left_bytes, of.with_several),
                crowd_bytes=of.crowd_bytes,
                unconfirmed_replicas=slot.unconfirmed_replicas,
                policy=slot.policy,
                first=slot.first,
                leaving=slot.leaving,
                single=_rejects_several(device, plugin),
                slot_safe=believed
                and held.largest_bytes * sum([mate.replicas.total for mate in mates]) <= left_bytes,
                holders=held.holders,
                sharers=len(memory),
                health_issue=health_issue,
                health_detail=health_detail,
                activity=reported(device, status.observed_at),
            )
        )
    return tuple(terms)


def allocatable(device: Device, reserve_bytes: int) -> int:
    """Bytes that can be promised of a device whose figures are believed."""
    return max(0, device.memory_bytes - device.reserved_bytes - reserve_bytes)


def _rejects_several(device: Device, plugin: Plugin) -> bool:
    """Whether it refuses a container with several shared replicas, after the pod was bound."""
    if device.sharing == "none":
        return False
    rejects = plugin.fail_requests_greater_than_one
    return device.sharing == "mps" if rejects is None else rejects


def known(used_bytes: int | None) -> int | None:
    """None where it is absent or cannot be true."""
    return used_bytes if used_bytes is not None and used_bytes >= 0 else None


def _attributed(mates: Sequence[Device]) -> int | None:
    """Bytes of one memory that strangers use; None where the agent cannot attribute processes."""
    found = 0
    for device in mates:
        unattributed_bytes = known(device.unattributed_bytes)
        if unattributed_bytes is None:
            return None
        found += unattributed_bytes
    return found


class _Commitments:
    """What is taken of one memory, and the worst that can become of it."""

    __slots__ = (
        "_ending_bytes",
        "all_measured",
        "holders",
        "largest_bytes",
        "sitting_bytes",
        "tenancy",
        "unconfirmed_bytes",
        "unobserved_pods_bytes",
    )

    def __init__(self, tenancy: Tenancy, used_bytes: Sequence[int | None]) -> None:
        """``used_bytes``: of each row of the report's pods; None where it is not known."""
        self.tenancy = tenancy
        sitting: list[Holder] = []
        charged: list[int] = []
        for sitter in tenancy.sitters:
            measured = sum_known(sitter.rows, used_bytes)
            observed = bool(measured) if sitter.elsewhere else True
            asked = sitter.requested_bytes
            sitting.append(
                Holder(sitter.uid, sitter.namespace, sitter.name, asked, measured, observed)
            )
            charged.append(asked if measured is None or measured < asked else measured)
        coming = tenancy.coming
        self.sitting_bytes = sum(charged)
        self.largest_bytes = max([*charged, *tenancy.most_bytes[:2]])
        self.holders = (*sitting, *coming) if any(tenancy.arrivals) else tuple(sitting)
        self.unobserved_pods_bytes = sum(
            [sum_known(rows, used_bytes) or 0 for rows in tenancy.unobserved_pods]
        )
        #: Whether the driver tells what each pod there uses.
        self.all_measured = None not in [used_bytes[row] for row in tenancy.rows]
        #: Bytes of each pod that is ending, the smallest first.
        self._ending_bytes = sorted([charged[place] for place in tenancy.ending])
        #: What those that come add to those that sit, in the worst case.
        self.unconfirmed_bytes = max(
            [
                self._top(count) - self._freed_bytes(gone)
                for gone, count in enumerate(tenancy.arrivals)
            ]
        )

    def free_bytes(self, left_bytes: int, others_with: Sequence[int | None]) -> int:
        """What is left of ``left_bytes`` for a newcomer beside whom so many others may come."""
        most_bytes = self.tenancy.most_bytes
        least: int | None = None
        for gone, others in enumerate(others_with):
            if others is None:
                continue
            taken_bytes = self.sitting_bytes - self._freed_bytes(gone) + self._top(others)
            free_bytes = left_bytes - taken_bytes
            if others + 1 < len(most_bytes):
                next_bytes = most_bytes[others + 1] - most_bytes[others]
                if next_bytes > free_bytes:
                    # The newcomer can push that one here, if it is given another device itself.
                    free_bytes -= next_bytes
            least = free_bytes if least is None else min(least, free_bytes)
        if least is None:
            return left_bytes - self.sitting_bytes - self.unconfirmed_bytes
        return least

    def _freed_bytes(self, gone: int) -> int:
        """What is free at least when so many of the replicas that are leaving have been let go."""
        if not gone:
            return 0
        staying = self.tenancy.leaving - gone
        return sum(self._ending_bytes[: max(0, len(self._ending_bytes) - staying)])

    def _top(self, count: int) -> int:
        most_bytes = self.tenancy.most_bytes
        return most_bytes[count] if count < len(most_bytes) else most_bytes[-1]


def sum_known(rows: Sequence[int], used_bytes: Sequence[int | None]) -> int | None:
    """The sum; None where there is nothing to add up, or a figure is not known."""
    found: int | None = None
    for row in rows:
        used = used_bytes[row]
        if used is None:
            return None
        found = used if found is None else found + used
    return found


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
