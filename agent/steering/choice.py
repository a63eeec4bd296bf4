"""Decides which resources are steered, and which replicas a container gets. Pure.

The kubelet asks for some of the available replicas and does not name the pod. The ledger has the
pods with a reservation on this node, and the checkpoint the pods that have devices. So the request
is of an unconfirmed pod (with a reservation, without its devices) or of a pod without a
reservation. The extender reserves the same device for all unconfirmed pods of a resource at a
time, so usually there is nothing to guess.

1. If that device has enough free memory for the largest unconfirmed pod, it is chosen. It may lack
   memory because of overuse or of a pod without a reservation. It may also lack free replicas.
2. Otherwise the fullest device with enough memory for the largest unconfirmed pod is chosen. Until
   the unconfirmed pods arrive, the extender reserves nothing on other devices of the node. So
   memory that is free on another device stays free.
3. If no device has enough, the request is rejected: the pod fails, and nothing is overcommitted.

Reservations made while the resource was not steered name no device. The extender assumed the
plugin's order for them, so of the devices with enough memory the plugin's next choice is chosen.

If no pod that Headroom scheduled is unconfirmed, the request is of another pod. It gets the device
with the most free memory, and is never rejected.
"""

from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass

import msgspec

from agent.attribution import memories
from agent.gate_decision import Limits, asked, certain, missing, reserved_for, rows_in, taken_bytes
from agent.probes.cgroup import is_static
from agent.probes.checkpoint import Entry
from agent.steering.messages import ContainerRequest
from contract.gpunode import (
    ADOPTED,
    Charge,
    Device,
    GPUNodeSpec,
    GPUNodeStatus,
    PodUse,
    Reservation,
)

NOT_PERMITTED = (
    "not permitted: the agent has the kubelet's device plugin directory read-only"
    " (chart value agent.steering.permitted, or component deploy/components/steering)"
)
NOTHING_SHARED = "no GPU of the node is shared, so the device plugin has no choice to make"
SHARING_UNKNOWN = "how the device plugin shares the GPUs cannot be read"

#: Allocation policy -> factor of the allocated replicas: the plugin takes the lowest product.
_ORDER = {"distributed": 1, "packed": -1, "unknown": 0}


@dataclass(frozen=True, slots=True)
class Choice:
    #: Empty: the plugin chooses.
    replicas: tuple[str, ...]
    device: str = ""
    #: The device reserved for the unconfirmed pods; empty if their reservations differ.
    reserved: str = ""
    #: Number of unconfirmed pods that Headroom scheduled.
    unconfirmed: int = 0


@dataclass(frozen=True, slots=True)
class NoRoom:
    """No device has the memory that the largest unconfirmed pod reserved."""

    asked_bytes: int


def choose(
    request: ContainerRequest,
    resource: str,
    spec: GPUNodeSpec,
    sample: GPUNodeStatus,
    entries: Sequence[Entry],
    limits: Limits,
    steered: bool = True,
    arrived_before: Set[str] = frozenset(),
) -> Choice | NoRoom:
    """Choose the replicas for one container.

    ``steered``: whether the resource is steered according to the GPUNode's status. If not, the
    extender's reservations assume the plugin's own choice. ``arrived_before`` are uids of pods that
    have had devices since the kubelet started.

    ``spec`` (a consistent read) and ``entries`` (of the checkpoint) must have been read after the
    kubelet's request. ``sample`` is the agent's newest sample and must be fresh.
    """
    seen = _holders(sample, spec)
    sample = arrived(sample, entries, request)
    # A pod that held devices and holds none any more has ended. It is not unconfirmed, although its
    # reservation may still exist.
    ended = (seen | arrived_before) - _holders(sample, spec)
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
    rooms = list(_rooms(request, resource, spec, sample, limits))
    order = _ORDER[sample.plugin.allocation_policy] if reserved == {""} else 0

    def best_for(these: Sequence[_Waiting]) -> _Room | None:
        """Return the best device that has room for each of these pods; None if there is none.

        The reserved device is first, then the plugin's order if no device is reserved, then the
        fullest device.
        """
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
            return Choice(())  # one container wants several replicas, reserved without steering
        return NoRoom(max(max(c.candidates.values(), default=0) for _, _, c in ours))
    if best is None and rooms:
        best = max(rooms, key=lambda room: (room.healthy, room.left_bytes, room.device))
    if best is None:
        return Choice(())
    return Choice(best.replicas, best.device, wanted, len(ours))


def arrived(
    sample: GPUNodeStatus, entries: Sequence[Entry], request: ContainerRequest
) -> GPUNodeStatus:
    """Return the sample with the assignments of the checkpoint: without rows of replicas that are
    free again, and with rows of containers admitted since."""
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
    return {reserved_for(row, spec) for row in sample.pods if row.replica}


def device_of(replica: str) -> str:
    """Return the device UUID in a replica id."""
    return replica.partition("::")[0]


_Waiting = tuple[str, Reservation, Charge]


@dataclass(frozen=True, slots=True)
class _Room:
    replicas: tuple[str, ...]
    device: str
    memory: Sequence[Device]
    present_uids: Set[str]
    healthy: bool
    left_bytes: int
    #: Number of replicas that are allocated or unhealthy.
    taken: int

    def takes(self, these: Sequence[_Waiting]) -> bool:
        """Return whether the device has enough free memory for any one of these pods.

        A pod that already holds a replica here needs no more: all of its reservation is counted.
        """
        needed = (
            asked(reservation, self.memory, uses=False)
            for uid, reservation, _ in these
            if uid not in self.present_uids
        )
        return self.healthy and self.left_bytes >= max(needed, default=0)


def _rooms(
    request: ContainerRequest,
    resource: str,
    spec: GPUNodeSpec,
    sample: GPUNodeStatus,
    limits: Limits,
) -> Iterator[_Room]:
    """Yield the devices that can provide all replicas of the request but ``must_include``."""
    free: dict[str, list[str]] = {}
    for replica in sorted(request.available):
        free.setdefault(device_of(replica), []).append(replica)
    needed = request.size - len(request.must_include)
    for memory in memories(sample.devices):
        for device in memory:
            there = free.get(device.uuid, [])
            rest = [replica for replica in there if replica not in request.must_include]
            if device.resource != resource or not 0 < needed <= len(rest):
                continue
            rows = rows_in(memory, sample)
            allocatable_bytes = device.memory_bytes - device.reserved_bytes - limits.reserve_bytes
            # A pod without a reservation counts with the memory of one replica.
            per_replica_bytes = max(0, allocatable_bytes) // max(1, device.replicas.total)
            taken = taken_bytes(memory, spec, rows, limits.tolerance_bytes, per_replica_bytes)
            yield _Room(
                replicas=(*request.must_include, *rest[:needed]),
                device=device.uuid,
                memory=memory,
                present_uids={reserved_for(row, spec) for row in rows} | certain(spec, memory),
                healthy=all(mate.healthy for mate in memory),
                left_bytes=allocatable_bytes - taken,
                taken=device.replicas.total - len(there),
            )


@dataclass(frozen=True, slots=True)
class Eligibility:
    resources: frozenset[str] = frozenset()
    #: Resources that must not be steered. While data is missing, a resource is in neither set and
    #: its steering stays as it is.
    excluded: frozenset[str] = frozenset()
    #: One sentence for each reason why a resource is not steered.
    obstacles: tuple[str, ...] = ()


def eligibility(sample: GPUNodeStatus, permitted: bool) -> Eligibility:
    """Return which resources can be steered.

    ``permitted``: whether the agent may write to the kubelet's device plugin directory.
    """
    if not permitted:
        return Eligibility(obstacles=(NOT_PERMITTED,))
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
    # With a topology policy the kubelet may offer GPUs of one NUMA node only, or ignore the
    # preferred GPU.
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
