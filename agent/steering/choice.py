"""Decides which resources are steered, and which replicas a container gets. Pure.

The kubelet asks which of the available replicas to allocate, but does not name the pod. The ledger
lists the pods with a reservation on this node, and the checkpoint lists the pods with devices. So
the request is either for an unconfirmed pod, which has a reservation but no devices yet, or for a
pod without a reservation. Usually all unconfirmed pods of a resource are reserved on the same set
of devices.

A container that requests n replicas gets n different devices.

1. Devices of the reserved set are chosen if they have a free replica, and enough free memory for
   the largest unconfirmed pod. Overuse, or a pod without a reservation, may have taken this memory.
2. Otherwise the fullest devices with enough memory for the largest unconfirmed pod are chosen.
   Until the unconfirmed pods arrive, the extender reserves nothing on other devices of the node. So
   memory that is free on another device stays free.
3. If too few devices have enough memory, the request is rejected, so the pod fails but no device is
   overcommitted.

Reservations made while the resource was not steered name no device, because the extender assumed
the plugin's order. So among the devices with enough memory, the plugin's next choice is chosen.

If Headroom has reserved no device for an unconfirmed pod, the request is not rejected for lack of
memory, but gets the devices with the most free memory. If adopted pods, or pods that choose their
device themselves, are unconfirmed and fit on enough devices, the request gets the fullest of
these devices. If fewer devices than requested have a free replica, the plugin chooses.

A cordoned device is chosen only for pods that Headroom placed on it before the cordon. While a
device is cordoned, the agent chooses among the other devices even if the plugin would otherwise
choose. If these have too few free replicas, the request is rejected.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from itertools import zip_longest

import msgspec

from agent.attribution import memories
from agent.gate_decision import (
    Limits,
    asked,
    certain,
    held_by_pods,
    missing,
    reserved_for,
    rows_in,
    taken_bytes,
)
from agent.probes.cgroup import is_static
from agent.probes.checkpoint import Entry
from agent.probes.replica_ids import ONLY_DEVICE
from agent.steering.messages import ContainerRequest
from headroom.contract.cordon import is_cordoned, may_start_on
from headroom.contract.device_choice import (
    KUBELET_UNKNOWN,
    STEERING_NOT_PERMITTED,
    minor_version,
    why_kubelet_not_steered,
)
from headroom.contract.gpunode import (
    ADOPTED,
    Charge,
    Device,
    GPUNodeSpec,
    GPUNodeStatus,
    PodUse,
    Reservation,
)

NOTHING_SHARED = "no GPU of the node is shared, so the device plugin has no choice to make"
SHARING_UNKNOWN = "cannot read how the device plugin shares the GPUs"

#: For each allocation policy, the factor by which the number of a device's used replicas is
#: multiplied. The plugin chooses the device with the lowest product.
_ORDER = {"distributed": 1, "packed": -1, "unknown": 0}


@dataclass(frozen=True, slots=True)
class Choice:
    """The replicas that one container should get."""

    #: The chosen replicas. Empty if the plugin chooses.
    replicas: tuple[str, ...]
    #: The devices of the replicas that the container does not hold yet.
    devices: tuple[str, ...] = ()
    #: The devices reserved for the unconfirmed pods. Empty if their reservations differ.
    reserved: frozenset[str] = frozenset()
    #: Number of unconfirmed pods that Headroom scheduled.
    unconfirmed: int = 0


@dataclass(frozen=True, slots=True)
class NoRoom:
    """Too few devices have as much memory as the largest unconfirmed pod reserved."""

    asked_bytes: int


@dataclass(frozen=True, slots=True)
class OnlyCordoned:
    """The devices that are not cordoned have too few free replicas."""


def choose(
    request: ContainerRequest,
    resource: str,
    spec: GPUNodeSpec,
    sample: GPUNodeStatus,
    entries: Sequence[Entry],
    limits: Limits,
    steered: bool = True,
    arrived_before: Set[str] = frozenset(),
) -> Choice | NoRoom | OnlyCordoned:
    """Choose the replicas for one container.

    ``steered`` states whether the resource is steered according to the GPUNode's status. If it is
    not, the extender's reservations assume the plugin's own choice. ``arrived_before`` contains the
    uids of pods that have had devices since the kubelet started.

    ``spec`` (from a consistent read) and ``entries`` (from the checkpoint) must have been read
    after the kubelet's request. ``sample`` is the agent's newest sample and must be fresh.
    """
    uuids = [device.uuid for device in sample.devices if device.resource == resource]
    if len(uuids) == 1 and all(device_of(each) in ONLY_DEVICE for each in request.available):
        renamed = _renamed(request, sample, entries, uuids[0])
        found = choose(renamed[0], resource, spec, *renamed[1:], limits, steered, arrived_before)
        return Choice(()) if isinstance(found, Choice) else found
    held_before = _holders(sample, spec)
    sample = arrived(sample, entries, request)
    # A pod that held devices and no longer holds any has ended. So it is not unconfirmed, although
    # its reservation may still exist.
    ended = (held_before | arrived_before) - _holders(sample, spec)
    held_by = held_by_pods(sample)
    unconfirmed = [
        (uid, reservation, charge)
        for uid, reservation in spec.reservations.items()
        for charge in reservation.charges
        if charge.resource == resource
        and uid not in ended
        and missing(sample, uid, charge, held_by)
    ]
    if not steered and not any(charge.choices for _, _, charge in unconfirmed):
        return Choice(())
    scheduled = [
        each for each in unconfirmed if ADOPTED not in each[1].flags and not each[2].by_environment
    ]
    reserved = {frozenset(charge.choices) for _, _, charge in scheduled}
    reserved_devices = next(iter(reserved)) if len(reserved) == 1 else frozenset[str]()
    placed = {uuid for _, reservation, _ in scheduled for uuid in _placed(reservation, resource)}
    closed = {d.uuid for d in sample.devices if is_cordoned(d, spec)} - placed
    candidates = [
        each
        for each in _candidates(request, resource, spec, sample, limits)
        if each.device not in closed
    ]
    order = _ORDER[sample.plugin.allocation_policy] if reserved == {frozenset()} else 0
    #: Number of devices that the container gets beyond those that it already holds.
    needed = request.size - len(request.must_include)
    enough = 0 < needed <= len(candidates)

    def best_for(pods: Sequence[_Unconfirmed]) -> list[_Candidate]:
        """Return the best devices with enough memory for any one of ``pods``, or an empty list if
        there are too few.

        Reserved devices are preferred, then the plugin's order if no device is reserved, then the
        fullest devices.
        """
        fitting = [each for each in candidates if each.fits_any_of(pods)]
        if not enough or len(fitting) < needed:
            return []
        fitting.sort(
            key=lambda each: (
                each.device not in reserved_devices,
                order * each.occupied,
                each.free_bytes,
                each.device,
            )
        )
        return fitting[:needed]

    best = best_for(unconfirmed) if unconfirmed else []
    if not best and scheduled:
        best = best_for(scheduled)
    if not best and scheduled:
        if not enough and any(not charge.choices for _, _, charge in scheduled):
            # A container requests more devices than have a free replica, and its pod was reserved
            # without steering.
            return _plugins_choice(request, closed)
        return NoRoom(max(max(c.candidates.values(), default=0) for _, _, c in scheduled))
    if not best and enough:
        candidates.sort(key=lambda each: (each.healthy, each.free_bytes, each.device))
        best = candidates[-needed:]
    if not best:
        return _plugins_choice(request, closed)
    return Choice(
        (*request.must_include, *(each.replica for each in best)),
        tuple(each.device for each in best),
        reserved_devices,
        len(scheduled),
    )


def _renamed(
    request: ContainerRequest, sample: GPUNodeStatus, entries: Sequence[Entry], uuid: str
) -> tuple[ContainerRequest, GPUNodeStatus, list[Entry]]:
    """Replace the name of the only device by its UUID in the arguments of ``choose``."""

    def named(replicas: Sequence[str]) -> tuple[str, ...]:
        return tuple(
            uuid + each[len(device_of(each)) :] if device_of(each) in ONLY_DEVICE else each
            for each in replicas
        )

    rows = [msgspec.structs.replace(row, replica=named([row.replica])[0]) for row in sample.pods]
    return (
        ContainerRequest(named(request.available), named(request.must_include), request.size),
        msgspec.structs.replace(sample, pods=rows),
        [replace(entry, replicas=named(entry.replicas)) for entry in entries],
    )


def _placed(reservation: Reservation, resource: str) -> set[str]:
    """Return the UUIDs of the cordoned devices on which the pod may still start."""
    return {
        uuid
        for charge in reservation.charges
        if charge.resource == resource
        for uuid in charge.choices or charge.candidates
        if may_start_on(reservation, uuid)
    }


def _plugins_choice(request: ContainerRequest, closed: Set[str]) -> Choice | OnlyCordoned:
    """Let the plugin choose. If it could choose a device in ``closed`` (UUIDs), choose another
    device instead."""
    if not any(device_of(replica) in closed for replica in request.available):
        return Choice(())
    rest: dict[str, list[str]] = {}
    for replica in sorted(set(request.available) - set(request.must_include)):
        if (device := device_of(replica)) not in closed:
            rest.setdefault(device, []).append(replica)
    needed = max(0, request.size - len(request.must_include))
    # Take one replica of each device in turn, as the plugin distributes them.
    turns = [replica for turn in zip_longest(*rest.values()) for replica in turn if replica]
    if needed > len(turns):
        return OnlyCordoned()
    return Choice((*request.must_include, *turns[:needed]))


def arrived(
    sample: GPUNodeStatus, entries: Sequence[Entry], request: ContainerRequest
) -> GPUNodeStatus:
    """Return the sample, updated with the assignments of the checkpoint.

    Rows of replicas that are free again are removed. Rows of containers that the kubelet has
    admitted since the sample are added with a use of 0.
    """
    offered = set(request.available) - set(request.must_include)
    holders = {
        replica: entry for entry in entries for replica in entry.replicas if replica not in offered
    }
    rows = [
        row
        for row in sample.pods
        if row.replica not in offered
        # A static pod has different uids in the checkpoint and in the API.
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
    """Return the uids of the pods that hold a replica, as ``reserved_for`` returns them."""
    return {reserved_for(row, spec) for row in sample.pods if row.replica}


def device_of(replica: str) -> str:
    """Return the device UUID in a replica id."""
    return replica.partition("::")[0]


#: Uid, reservation and charge of an unconfirmed pod.
_Unconfirmed = tuple[str, Reservation, Charge]


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A device with a free replica of which the container holds none."""

    #: The replica that the container would get.
    replica: str
    device: str
    #: All devices that share the memory of this device.
    memory: Sequence[Device]
    #: Uids of the pods whose reservations are already counted on this memory.
    counted_uids: Set[str]
    healthy: bool
    free_bytes: int
    #: Number of replicas that are allocated or unhealthy.
    occupied: int

    def fits_any_of(self, pods: Sequence[_Unconfirmed]) -> bool:
        """Return whether the request fits if it is for any of ``pods``.

        The device must be healthy and have enough free memory for the largest pod. A pod whose
        reservation is already counted here needs no additional memory.
        """
        needed_bytes = (
            asked(reservation, self.memory, uses=False)
            for uid, reservation, _ in pods
            if uid not in self.counted_uids
        )
        return self.healthy and self.free_bytes >= max(needed_bytes, default=0)


def _candidates(
    request: ContainerRequest,
    resource: str,
    spec: GPUNodeSpec,
    sample: GPUNodeStatus,
    limits: Limits,
) -> Iterator[_Candidate]:
    """Yield each device with a free replica, except devices of ``must_include``."""
    free: dict[str, list[str]] = {}
    for replica in sorted(request.available):
        free.setdefault(device_of(replica), []).append(replica)
    held = {device_of(replica) for replica in request.must_include}
    for memory in memories(sample.devices):
        for device in memory:
            available = free.get(device.uuid, [])
            if device.resource != resource or not available or device.uuid in held:
                continue
            rows = rows_in(memory, sample)
            allocatable_bytes = device.memory_bytes - device.reserved_bytes - limits.reserve_bytes
            # A pod without a reservation counts at least with the memory of one replica.
            per_replica_bytes = max(0, allocatable_bytes) // max(1, device.replicas.total)
            committed_bytes = taken_bytes(
                memory, spec, sample, limits.tolerance_bytes, per_replica_bytes
            )
            yield _Candidate(
                replica=available[0],
                device=device.uuid,
                memory=memory,
                counted_uids={reserved_for(row, spec) for row in rows} | certain(spec, memory),
                healthy=all(mate.healthy and not mate.is_closed_by_mode for mate in memory),
                free_bytes=allocatable_bytes - committed_bytes,
                occupied=device.replicas.total - len(available),
            )


@dataclass(frozen=True, slots=True)
class Eligibility:
    """Which resources of the node can be steered."""

    resources: frozenset[str] = frozenset()
    #: Resources that must not be steered. Resources in neither set stay as they are, because their
    #: data are missing.
    excluded: frozenset[str] = frozenset()
    #: One sentence for each reason why a resource is not steered.
    obstacles: tuple[str, ...] = ()


def eligibility(sample: GPUNodeStatus, permitted: bool, kubelet_version: str) -> Eligibility:
    """Return which resources can be steered.

    ``permitted`` states whether the agent may write to the kubelet's device plugin directory.
    ``kubelet_version`` is the version in the Node's status, and empty if it is unknown.
    """
    if not permitted:
        return Eligibility(obstacles=(STEERING_NOT_PERMITTED,))
    if minor_version(kubelet_version) is None:
        return Eligibility(obstacles=(KUBELET_UNKNOWN,))
    if why := why_kubelet_not_steered(kubelet_version):
        return Eligibility(
            excluded=frozenset(device.resource for device in sample.devices), obstacles=(why,)
        )
    numa_nodes: dict[str, set[int | None]] = {}
    for device in sample.devices:
        if device.sharing != "none" and device.resource:
            numa_nodes.setdefault(device.resource, set()).add(device.numa_node)
    shared = frozenset(numa_nodes)
    plugin = sample.plugin
    if not shared:
        unread = bool(sample.devices) and plugin.allocation_policy == "unknown"
        return Eligibility(obstacles=(SHARING_UNKNOWN if unread else NOTHING_SHARED,))
    if plugin.topology_manager_policy == "none":
        return Eligibility(shared)
    # With a topology policy, the kubelet may offer only one NUMA node's GPUs, or ignore the choice.
    divided = frozenset(resource for resource, nodes in numa_nodes.items() if len(nodes) > 1)
    policy = plugin.topology_manager_policy
    stated = f"has policy {policy}" if policy else "has a policy that cannot be read"
    return Eligibility(
        shared - divided,
        divided if policy else frozenset(),
        tuple(
            f"{resource}: the kubelet's topology manager {stated}, and the GPUs are on several"
            " NUMA nodes, so it can overrule the choice"
            for resource in sorted(divided)
        ),
    )
