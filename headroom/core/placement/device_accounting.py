"""Computes the committed memory of each device of a node, term by term.

    allocatable(d) = memory - driver reserved - node reserve
    committed(d)   = reserved(d) + unconfirmed(d) + unreserved pods(d) + unattributed(d)
    headroom(d)    = allocatable(d) - committed(d)
    free(d)        = what one more pod can use, if the plugin gives it d

*reserved* sums, over the pods on d, the larger of the request and the measured use.

*unconfirmed* is the maximum that unconfirmed pods can add. ``placement.device_plugin_model``
computes how many of them can get d, and the largest of them are assumed to get it. Terminating pods
count as present or as gone, whichever is worse. If a terminating pod has released its replica, its
memory is free too, because the kubelet reclaims a replica only after the containers have ended.

*unreserved pods* is the measured use of pods without a reservation.

*unattributed* is the use above the tolerance that belongs to no known pod.

If a pod's own NVIDIA_VISIBLE_DEVICES decides its devices, its memory is reserved on exactly these
devices, and the replica that the plugin allocates counts only for the plugin's next choice. If the
pod also uses another device, its memory counts there too.

A new pod changes which devices the unconfirmed pods can get. For example, the next pod can get only
one of two equal devices, but the next two pods can get both. So *free* is computed with one more
pick: one of the picks that can reach d is the new pod, and the others are the largest unconfirmed
pods. If the new pod could displace the next largest pod to d, and this pod does not fit there, the
new pod must not be bound.

All terms describe a *memory* instead of a device, because MIG compute instances of one GPU instance
share their memory. Each of them shows everything that is committed of this memory.

All values are bytes in Python integers, which do not overflow.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence, Set
from enum import IntEnum

import msgspec

from headroom.contract.gpunode import Device, GPUNodeStatus, Plugin
from headroom.contract.reasons import Reason
from headroom.core.placement.device_plugin_model import Policy
from headroom.core.placement.device_reading import UNBELIEVED, Activity, health_issues, reported
from headroom.core.placement.occupancy import Holder, Occupancy, Starting, Tenancy
from headroom.core.placement.policy import LargestDevice
from headroom.core.placement.report_index import memories_of


class Several(IntEnum):
    """Whether a container that requests several replicas may be placed on a device."""

    ALLOWED = 0
    #: The plugin rejects it, or the agent cannot give it different devices.
    REJECTED = 1
    #: Not yet: the node is steered, but unconfirmed pods could get any device.
    UNSETTLED = 2


class DeviceTerms(msgspec.Struct, frozen=True, gc=False):
    """All terms of one device.

    A large cluster has tens of thousands of them, so the garbage collector does not track them.
    """

    device: Device
    reserve_bytes: int
    #: Zero if the reported values are implausible or the reserves take all memory.
    allocatable_bytes: int
    #: The term *reserved*.
    reservation_bytes: int
    unconfirmed_bytes: int
    #: The term *unreserved pods*, which is the measured use of pods without a reservation.
    unreserved_pods_bytes: int
    unattributed_bytes: int
    #: Whether the agent attributes the use to processes. If not, ``unattributed_bytes`` is the use
    #: beyond the charges of the pods in the report, so idle pods can hide unattributed use.
    attributed: bool
    #: Free memory for a new pod that gets this device. The first value is for a pod that requests
    #: one replica of the resource, and the second for a pod that requests several. Both can be
    #: negative.
    free_bytes: int
    several_free_bytes: int
    #: Sum of the requests of all unconfirmed pods, as if each of them could get this device.
    crowd_bytes: int
    #: Replicas of this device's resource that are reserved for unconfirmed pods.
    unconfirmed_replicas: int
    #: The policy by which the plugin is assumed to choose.
    policy: Policy
    #: Minimum number of replicas of the resource that the plugin allocates before a replica of this
    #: device, or None if the plugin never allocates a replica of this device.
    first: int | None
    #: Replicas of this device that terminating pods hold.
    leaving: int
    #: Whether a container that requests several replicas may be placed on this device.
    several: Several
    #: Whether each pod here, and each unconfirmed pod that can get here, is charged at most an
    #: equal share of the memory for each of its replicas, after unattributed use and unreserved
    #: pods are subtracted. If so, the memory suffices whichever replicas these pods get.
    slot_safe: bool
    #: Pods on the device, or in the whole memory if several devices share it.
    holders: tuple[Holder, ...]
    #: Number of devices that share its memory, including itself.
    sharers: int
    #: Why no pod may be placed on the device, and the details. They are None and empty if the
    #: device is healthy.
    health_issue: Reason | None
    health_detail: str
    #: SM activity, or None if no source reports it.
    activity: Activity | None
    #: Which new pods could get a device on which another pod is starting alone.
    starting: Starting = Starting.NO_POD
    #: Number of devices in the set that Headroom chose for the unconfirmed pods of the resource, or
    #: 0 if there is no such set. Another pod must get exactly this set.
    set_size: int = 0

    @property
    def believed(self) -> bool:
        """Whether the reported values of the device are plausible."""
        return self.health_issue not in UNBELIEVED

    @property
    def shared(self) -> bool:
        return self.device.sharing != "none"

    @property
    def common(self) -> bool:
        """Whether several pods can use the device's memory at the same time."""
        return self.shared or self.sharers > 1

    @property
    def committed_bytes(self) -> int:
        return (
            self.reservation_bytes
            + self.unconfirmed_bytes
            + self.unreserved_pods_bytes
            + self.unattributed_bytes
        )

    @property
    def cordoned(self) -> bool:
        """Whether the device takes no new pods only because it is cordoned."""
        return self.health_issue is Reason.CORDONED_DEVICE

    @property
    def unhealthy(self) -> Reason | None:
        """The reason why the device itself accepts no pods, or None if it is only cordoned."""
        return None if self.cordoned else self.health_issue

    @property
    def certain_free_bytes(self) -> int:
        """Free memory for a pod that uses this device whichever devices the plugin allocates.

        All unconfirmed pods that could get the device are assumed to be on it.
        """
        taken_bytes = self.reservation_bytes + self.unreserved_pods_bytes + self.unattributed_bytes
        return self.allocatable_bytes - taken_bytes - self.crowd_bytes

    @property
    def headroom_bytes(self) -> int:
        """Memory that is free for reservation. It is negative if the device is overcommitted."""
        return self.allocatable_bytes - self.committed_bytes


def weigh(
    occupancy: Occupancy,
    status: GPUNodeStatus,
    reserve_bytes: int,
    unattributed_tolerance_bytes: int,
    cordoned: Set[str] = frozenset(),
    largest: Sequence[LargestDevice] = (),
) -> tuple[DeviceTerms, ...]:
    """Compute the terms of every reported device, in the order of the report.

    ``occupancy`` belongs to this report, or to an earlier report with an equal occupancy.
    ``reserve_bytes`` is the node's reserve on each device. Unattributed use up to
    ``unattributed_tolerance_bytes`` does not count. ``cordoned`` contains UUIDs of devices or GPUs
    that take no new pods. Devices that exceed ``largest`` accept no pods either.
    """
    devices, plugin = status.devices, status.plugin
    issues = health_issues(devices, occupancy.memories, occupancy.doubled, cordoned, largest)
    used_bytes = [known(row.used_bytes) for row in status.pods]
    weighed: dict[tuple[int, ...], _Commitments] = {}
    terms: list[DeviceTerms] = []
    for device, slot, memory, tenancy, (health_issue, health_detail) in zip(
        devices, occupancy.slots, occupancy.memories, occupancy.tenancies, issues, strict=True
    ):
        commitments = weighed.get(memory)
        if commitments is None:
            commitments = weighed[memory] = _Commitments(tenancy, used_bytes)
        believed = health_issue not in UNBELIEVED
        mates = [devices[mate] for mate in memory]
        reported_bytes = _attributed(mates) if commitments.all_measured else None
        unattributed_bytes = 0
        if believed:
            explained_bytes = commitments.reservation_bytes + commitments.unreserved_pods_bytes
            if reported_bytes is not None:
                unattributed_bytes = reported_bytes
            else:
                # Count all use above the charges of the pods in the report.
                unattributed_bytes = max([mate.used_bytes for mate in mates]) - explained_bytes
            unattributed_bytes = max(0, unattributed_bytes - unattributed_tolerance_bytes)
        allocatable_bytes = allocatable(device, reserve_bytes) if believed else 0
        available_bytes = allocatable_bytes - commitments.unreserved_pods_bytes - unattributed_bytes
        terms.append(
            DeviceTerms(
                device=device,
                reserve_bytes=reserve_bytes,
                allocatable_bytes=allocatable_bytes,
                reservation_bytes=commitments.reservation_bytes,
                unconfirmed_bytes=commitments.unconfirmed_bytes,
                unreserved_pods_bytes=commitments.unreserved_pods_bytes,
                unattributed_bytes=unattributed_bytes,
                attributed=reported_bytes is not None,
                free_bytes=commitments.free_bytes(available_bytes, tenancy.with_newcomer),
                several_free_bytes=commitments.free_bytes(available_bytes, tenancy.with_several),
                crowd_bytes=tenancy.crowd_bytes,
                unconfirmed_replicas=slot.unconfirmed_replicas,
                policy=slot.policy,
                first=slot.first,
                leaving=slot.leaving,
                several=_several(device, plugin, slot.policy),
                slot_safe=believed
                and commitments.largest_bytes * sum([mate.replicas.total for mate in mates])
                <= available_bytes,
                holders=commitments.holders,
                sharers=len(memory),
                health_issue=health_issue,
                health_detail=health_detail,
                activity=reported(device, status.observed_at),
                starting=tenancy.starting,
                set_size=slot.set_size,
            )
        )
    return tuple(terms)


def first_of_each_memory(terms: Sequence[DeviceTerms]) -> Iterator[DeviceTerms]:
    """Yield one device for each memory, because devices that share a memory report equal values."""
    seen: set[tuple[str | None, int | None]] = set()
    for term in terms:
        if term.sharers > 1:
            memory = term.device.parent, term.device.gpu_instance
            if memory in seen:
                continue
            seen.add(memory)
        yield term


def allocatable(device: Device, reserve_bytes: int) -> int:
    """Return the bytes that can be reserved on a device with plausible values."""
    return max(0, device.memory_bytes - device.reserved_bytes - reserve_bytes)


def _several(device: Device, plugin: Plugin, policy: Policy) -> Several:
    """Return whether a container with several replicas may be placed on the device."""
    if device.sharing == "none":
        return Several.ALLOWED
    rejects = plugin.fail_requests_greater_than_one
    if rejects is None:
        rejects = device.sharing == "mps"  # the plugin's default
    if rejects:
        return Several.REJECTED
    if device.resource not in plugin.steered:
        return Several.ALLOWED
    if not plugin.steers_several:
        return Several.REJECTED
    # The agent gives different devices, but the device of each unconfirmed pod is not certain.
    return Several.ALLOWED if policy == "steered" else Several.UNSETTLED


def known(used_bytes: int | None) -> int | None:
    """Return the measured bytes, or None if they are absent or negative."""
    return used_bytes if used_bytes is not None and used_bytes >= 0 else None


def _attributed(mates: Sequence[Device]) -> int | None:
    """Return the sum of the unattributed bytes of devices that share a memory, or None if the value
    of a device is not reported."""
    found = 0
    for device in mates:
        unattributed_bytes = known(device.unattributed_bytes)
        if unattributed_bytes is None:
            return None
        found += unattributed_bytes
    return found


class _Commitments:
    """The bytes of one memory that are committed to the pods there, and to unconfirmed pods in the
    worst case."""

    def __init__(self, tenancy: Tenancy, used_bytes: Sequence[int | None]) -> None:
        """``used_bytes`` contains a value for each row of the report's pods, or None if it is
        unknown."""
        self.tenancy = tenancy
        occupants: list[Holder] = []
        charged_bytes: list[int] = []
        for occupant in tenancy.occupants:
            measured_bytes = sum_known(occupant.rows, used_bytes)
            observed = bool(measured_bytes) if occupant.by_environment else True
            requested_bytes = occupant.requested_bytes
            occupants.append(
                Holder(
                    occupant.uid,
                    occupant.namespace,
                    occupant.name,
                    requested_bytes,
                    measured_bytes,
                    observed,
                    occupant.starting,
                )
            )
            charged_bytes.append(
                requested_bytes
                if measured_bytes is None or measured_bytes < requested_bytes
                else measured_bytes
            )
        unconfirmed = tenancy.unconfirmed
        self.reservation_bytes = sum(charged_bytes)
        self.largest_bytes = max([*charged_bytes, *tenancy.most_bytes[:2]])
        self.holders = (*occupants, *unconfirmed) if any(tenancy.arrivals) else tuple(occupants)
        self.unreserved_pods_bytes = sum(
            [sum_known(rows, used_bytes) or 0 for rows in tenancy.unreserved_pods]
        )
        #: Whether the report contains the use of each pod.
        self.all_measured = None not in [used_bytes[row] for row in tenancy.rows]
        #: Charged bytes of each terminating pod, smallest first.
        self._ending_bytes = sorted([charged_bytes[index] for index in tenancy.ending])
        #: Maximum number of bytes that unconfirmed pods can add, less the memory that terminating
        #: pods have freed in this worst case.
        self.unconfirmed_bytes = max(
            [
                self._most_bytes(count) - self._freed_bytes(gone)
                for gone, count in enumerate(tenancy.arrivals)
            ]
        )

    def free_bytes(self, available_bytes: int, others_with: Sequence[int | None]) -> int:
        """Return how many of ``available_bytes`` are free for a new pod.

        ``others_with[n]`` is the number of unconfirmed pods that can get here beside the new pod if
        terminating pods have released n replicas, or None if the new pod cannot get here in this
        case.
        """
        most_bytes = self.tenancy.most_bytes
        least: int | None = None
        for gone, others in enumerate(others_with):
            if others is None:
                continue
            taken_bytes = (
                self.reservation_bytes - self._freed_bytes(gone) + self._most_bytes(others)
            )
            free_bytes = available_bytes - taken_bytes
            if others + 1 < len(most_bytes):
                next_bytes = most_bytes[others + 1] - most_bytes[others]
                if next_bytes > free_bytes:
                    # If the new pod gets another device, it can displace this pod to the device.
                    free_bytes -= next_bytes
            least = free_bytes if least is None else min(least, free_bytes)
        if least is None:
            return available_bytes - self.reservation_bytes - self.unconfirmed_bytes
        return least

    def _freed_bytes(self, gone: int) -> int:
        """Return the minimum bytes that terminating pods free if they release ``gone`` replicas."""
        if not gone:
            return 0
        staying = self.tenancy.leaving - gone
        return sum(self._ending_bytes[: max(0, len(self._ending_bytes) - staying)])

    def _most_bytes(self, count: int) -> int:
        """Return the maximum bytes that ``count`` unconfirmed pods request together."""
        most_bytes = self.tenancy.most_bytes
        return most_bytes[count] if count < len(most_bytes) else most_bytes[-1]


def sum_known(rows: Sequence[int], used_bytes: Sequence[int | None]) -> int | None:
    """Return the sum of the rows' measured bytes, or None if there are no rows or a value is
    unknown."""
    total: int | None = None
    for row in rows:
        used = used_bytes[row]
        if used is None:
            return None
        total = used if total is None else total + used
    return total


def without(status: GPUNodeStatus, uids: Collection[str]) -> GPUNodeStatus:
    """Return the report as if these pods were gone, so that their replicas and measured use are
    free.

    A row without a replica frees no replica, because the pod uses the device without holding a
    replica.
    """
    freed_bytes: Counter[str] = Counter()
    freed_replicas: Counter[str] = Counter()
    removed = [use for use in status.pods if use.uid in uids]
    for use in removed:
        freed_bytes[use.device] += max(0, use.used_bytes or 0)
    for _, device_uuid, _ in {(use.uid, use.device, use.replica) for use in removed if use.replica}:
        freed_replicas[device_uuid] += 1
    devices: list[Device] = []
    for device, memory in zip(status.devices, memories_of(status.devices), strict=True):
        replicas = device.replicas
        freed = min(freed_replicas[device.uuid], max(0, replicas.allocated))
        replicas = msgspec.structs.replace(
            replicas, free=replicas.free + freed, allocated=replicas.allocated - freed
        )
        # Each device of a memory reports the use of the whole memory.
        gone_bytes = sum([freed_bytes[status.devices[mate].uuid] for mate in memory])
        used_bytes = max(min(device.used_bytes, 0), device.used_bytes - gone_bytes)
        devices.append(msgspec.structs.replace(device, replicas=replicas, used_bytes=used_bytes))
    pods = [use for use in status.pods if use.uid not in uids]
    return msgspec.structs.replace(status, devices=devices, pods=pods)
