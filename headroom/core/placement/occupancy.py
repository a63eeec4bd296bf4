"""Computes which pods are in each memory of a node, and which unconfirmed pods can get there.

The result is the *occupancy* of the node. It does not depend on the measured bytes, except on
whether a pod uses any memory.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Set
from enum import IntEnum
from itertools import accumulate
from operator import attrgetter
from types import MappingProxyType

import msgspec

from headroom.contract.gpunode import Charge, Device, GPUNodeStatus, Reservation
from headroom.core.placement.device_plugin_model import (
    ALL_PICKS,
    PluginChoice,
    Policy,
    plugin_choices,
)
from headroom.core.placement.device_reading import duplicate_uuids
from headroom.core.placement.occupants import EnvironmentPods, Occupant, occupants_of
from headroom.core.placement.report_index import Memory, ReportIndex, Rows, memories_of


class Holder(msgspec.Struct, frozen=True, gc=False):
    """A pod on a device, or an unconfirmed pod that could get the device."""

    uid: str
    namespace: str
    name: str
    requested_bytes: int
    #: None if the use is not measured.
    measured_bytes: int | None
    #: Whether the node's report shows the pod on the device. Otherwise the pod may get or use the
    #: device.
    observed: bool
    #: Whether it starts alone, and its start has not ended.
    starting: bool = False

    @property
    def charged_bytes(self) -> int:
        return max(self.requested_bytes, self.measured_bytes or 0)


class Starting(IntEnum):
    """Which new pods could share a memory with a pod that is starting alone."""

    NO_POD = 0
    #: Only pods whose own NVIDIA_VISIBLE_DEVICES decides their devices, because the plugin gives a
    #: new pod and the starting pod different devices.
    BY_ENVIRONMENT = 1
    #: Also pods that request several replicas.
    SEVERAL = 2
    #: Any pod.
    ANY_POD = 3


class Tenancy(msgspec.Struct, frozen=True, gc=False):
    """The pods in one memory, and the unconfirmed pods that can get there.

    ``arrivals``, ``with_newcomer`` and ``with_several`` depend on how many replicas terminating
    pods have released. Item n is the value for n replicas, from 0 to ``leaving``.
    """

    occupants: tuple[Occupant, ...]
    #: Indices of the terminating pods in ``occupants``.
    ending: tuple[int, ...]
    #: Rows of all pods in the report.
    rows: Rows
    #: Rows of each pod without a reservation.
    unreserved_pods: tuple[Rows, ...]
    #: Unconfirmed pods to which the plugin could give the memory, largest first.
    unconfirmed: tuple[Holder, ...]
    #: Item n is the maximum number of bytes that n of the unconfirmed pods request together.
    most_bytes: tuple[int, ...]
    #: Number of replicas that terminating pods hold.
    leaving: int
    #: Maximum number of unconfirmed pods that can get there if there is no new pod.
    arrivals: tuple[int, ...]
    #: Maximum number of unconfirmed pods that can get there beside a new pod that requests one
    #: replica, and beside a new pod that requests several. None if the new pod cannot get there.
    with_newcomer: tuple[int | None, ...]
    with_several: tuple[int | None, ...]
    #: Which new pods could get there although another pod is starting alone.
    starting: Starting = Starting.NO_POD

    @property
    def crowd_bytes(self) -> int:
        """Sum of the requests of all unconfirmed pods that can get there."""
        return self.most_bytes[-1]


class Slot(msgspec.Struct, frozen=True, gc=False):
    """The plugin's choice of one device. ``DeviceTerms`` describes the fields."""

    policy: Policy
    first: int | None
    leaving: int
    unconfirmed_replicas: int
    set_size: int = 0


class Occupancy(msgspec.Struct, frozen=True, gc=False):
    """The occupancy of one node. Tuples are in the order of its reported devices."""

    slots: tuple[Slot, ...]
    memories: tuple[Memory, ...]
    tenancies: tuple[Tenancy, ...]
    #: Number of devices with the same UUID, for each UUID that several devices report.
    doubled: Mapping[str, int]


def occupy(
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    leaving: Set[str] = frozenset(),
) -> Occupancy:
    """Compute the occupancy of a node from its report and its reservations.

    ``reservations`` maps pod uids to reservations, including the reservations of adopted pods.
    ``leaving`` contains the uids of pods that are terminating or have ended.
    """
    devices = status.devices
    memories = memories_of(devices)
    by_environment = EnvironmentPods(reservations)
    report = ReportIndex(status, by_environment.uids)
    unconfirmed_pods = _UnconfirmedPods(devices, reservations, report)
    choices = _choices(status, report, unconfirmed_pods, leaving)
    tenancies: dict[Memory, Tenancy] = {}
    for memory in memories:
        if memory not in tenancies:
            occupants = occupants_of(memory, devices, reservations, report, by_environment)
            tenancies[memory] = _tenancy(
                occupants,
                # A pod that chooses its own devices may hold a replica of a device that it does not
                # use, so the release of this replica frees nothing here.
                tuple(
                    index
                    for index, occupant in enumerate(occupants)
                    if occupant.uid in leaving and occupant.uid not in by_environment.uids
                ),
                report.rows(memory),
                report.unreserved_pods(memory, reservations),
                unconfirmed_pods.for_memory(memory, {occupant.uid for occupant in occupants}),
                [choices[mate] for mate in memory],
                unconfirmed_pods.renamed(memory),
            )
    return Occupancy(
        slots=tuple([Slot(c.policy, c.first, c.leaving, c.picks, c.set_size) for c in choices]),
        memories=tuple(memories),
        tenancies=tuple([tenancies[memory] for memory in memories]),
        doubled=duplicate_uuids(devices) or _NONE_DOUBLED,
    )


_NONE_DOUBLED: Mapping[str, int] = MappingProxyType({})


def possibilities(
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    leaving: Set[str],
) -> list[PluginChoice]:
    """Return how the plugin can choose each device, in the order of the report.

    The arguments are the same as for ``occupy``.
    """
    report = ReportIndex(status, EnvironmentPods(reservations).uids)
    unconfirmed_pods = _UnconfirmedPods(status.devices, reservations, report)
    return _choices(status, report, unconfirmed_pods, leaving)


def _choices(
    status: GPUNodeStatus,
    report: ReportIndex,
    unconfirmed_pods: "_UnconfirmedPods",
    leaving: Set[str],
) -> list[PluginChoice]:
    slots = range(len(status.devices))
    return plugin_choices(
        status.devices,
        status.plugin,
        unconfirmed_pods.picks,
        unconfirmed_pods.reserved,
        [report.replicas_of(slot, leaving) for slot in slots],
        [report.replicas_of(slot) for slot in slots],
    )


def _tenancy(
    occupants: list[Occupant],
    ending: tuple[int, ...],
    rows: Rows,
    unreserved_pods: tuple[Rows, ...],
    unconfirmed: list[Holder],
    choices: list[PluginChoice],
    renamed: int,
) -> Tenancy:
    # These pods may be there whatever the plugin chooses next.
    unpredicted = renamed + sum(choice.unexplained for choice in choices)
    # If several devices share the memory, released replicas are not tracked for each device.
    leaving = choices[0].leaving if len(choices) == 1 else 0

    def most(newcomers: int, gone: int) -> int:
        """Return the maximum number of pods that can get there if ``gone`` replicas were released.

        If several devices share the memory, return the sum over the devices, as if all replicas of
        terminating pods were released.
        """
        if len(choices) == 1:
            return choices[0].most(newcomers, gone)
        return sum(choice.most(newcomers, choice.leaving) for choice in choices)

    def others(newcomers: int) -> tuple[int | None, ...]:
        """Return the maximum number of unconfirmed pods beside a new pod with ``newcomers``
        replicas."""
        found = [most(newcomers, gone) for gone in range(leaving + 1)]
        return tuple([count + unpredicted - 1 if count else None for count in found])

    beside_one, beside_several = others(1), others(ALL_PICKS)
    return Tenancy(
        occupants=tuple(occupants),
        ending=ending,
        rows=rows,
        unreserved_pods=unreserved_pods,
        unconfirmed=tuple(unconfirmed),
        most_bytes=(0, *accumulate([holder.requested_bytes for holder in unconfirmed])),
        leaving=leaving,
        arrivals=tuple([most(0, gone) + unpredicted for gone in range(leaving + 1)]),
        with_newcomer=beside_one,
        with_several=beside_several,
        starting=_starting(occupants, unconfirmed, beside_one, beside_several),
    )


def _starting(
    occupants: Iterable[Occupant],
    unconfirmed: Iterable[Holder],
    beside_one: Iterable[int | None],
    beside_several: Iterable[int | None],
) -> Starting:
    """Return which new pods could share the memory with a starting pod.

    A new pod can share it with an unconfirmed pod if the plugin can give the memory to both.
    """
    if any([occupant.starting for occupant in occupants]):
        return Starting.ANY_POD
    if not any([holder.starting for holder in unconfirmed]):
        return Starting.NO_POD
    if any(beside_one):
        return Starting.ANY_POD
    return Starting.SEVERAL if any(beside_several) else Starting.BY_ENVIRONMENT


class _UnconfirmedPods:
    """The unconfirmed pods. They are bound, but the report does not show all replicas that they
    requested."""

    def __init__(
        self,
        devices: Sequence[Device],
        reservations: Mapping[str, Reservation],
        report: ReportIndex,
    ) -> None:
        self._devices = devices
        self._reservations = reservations
        self._holders: dict[str, Holder] = {}
        #: Number of replicas that unconfirmed pods requested and do not hold yet, by resource.
        self.picks = Counter[str]()
        #: The sets of devices that Headroom chose for them, by resource. A set is empty if the
        #: plugin chooses.
        self.reserved: dict[str, set[frozenset[str]]] = {}
        #: The uid of each pod, its charge, and the maximum bytes that the charge reserves on a
        #: device, by resource.
        self._waiting: dict[str, list[tuple[str, Charge, int]]] = {}
        #: Unconfirmed pods with a reservation on a device under an earlier resource name, by
        #: device.
        self._renamed: dict[str, list[tuple[str, Charge, int]]] = {}
        resource_of = {device.uuid: device.resource for device in devices}
        for uid, reservation in reservations.items():
            for charge in reservation.charges:
                resource = charge.resource
                if not (missing := report.missing(uid, charge)):
                    continue
                self.picks[resource] += missing
                self.reserved.setdefault(resource, set()).add(frozenset(charge.choices))
                if charge.by_environment:
                    continue  # takes a replica, but no memory of the replica's device
                most_bytes = max(charge.candidates.values(), default=0)
                waiter = (uid, charge, most_bytes)
                self._waiting.setdefault(resource, []).append(waiter)
                for uuid in charge.candidates:
                    if resource_of.get(uuid, resource) != resource:
                        self._renamed.setdefault(uuid, []).append(waiter)

    def for_memory(self, memory: Memory, present: Set[str]) -> list[Holder]:
        """Return the unconfirmed pods that could get there, largest first.

        A pod can get any device of the resource that it requested, and any of its candidate devices
        that had this resource earlier. Pods in ``present`` are already there, so they are not
        returned.
        """
        asked: dict[str, int] = {}
        for slot in memory:
            device = self._devices[slot]
            uuid = device.uuid
            for waiters in (self._waiting.get(device.resource, ()), self._renamed.get(uuid, ())):
                for uid, charge, most_bytes in waiters:
                    size = charge.candidates.get(uuid, most_bytes)
                    if asked.get(uid, -1) < size:
                        asked[uid] = size
        unconfirmed = [self._holder(*pair) for pair in asked.items() if pair[0] not in present]
        unconfirmed.sort(key=_requested_bytes, reverse=True)
        return unconfirmed

    def _holder(self, uid: str, size: int) -> Holder:
        """Return the holder for an unconfirmed pod. Calls with equal arguments return the same
        object."""
        holder = self._holders.get(uid)
        if holder is None or holder.requested_bytes != size:
            reservation = self._reservations[uid]
            holder = Holder(
                uid,
                reservation.namespace,
                reservation.name,
                size,
                None,
                observed=False,
                starting=reservation.is_starting,
            )
            self._holders[uid] = holder
        return holder

    def renamed(self, memory: Memory) -> int:
        """Return how many pods may get there under an earlier resource name of the device."""
        if not self._renamed:
            return 0
        return sum([len(self._renamed.get(self._devices[slot].uuid, ())) for slot in memory])


_requested_bytes = attrgetter("requested_bytes")
