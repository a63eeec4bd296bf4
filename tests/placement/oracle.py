"""A second, simple implementation of the equation and the rules of placement.

It loops over Python integers, is written from the specification, and imports nothing of
``core.placement``. It returns every reason that applies, and none if the pod fits.
"""

from collections.abc import Mapping, Set

from headroom.contract.annotations import (
    MAX_SM,
    PROCESSES,
    VRAM,
    Bytes,
    Share,
    parse_max_sm,
    parse_vram,
)
from headroom.contract.gpunode import Charge, Device, GPUNodeStatus, PodUse, Reservation
from headroom.contract.kube import Container, Pod
from headroom.contract.reasons import Reason

MAX_DEVICE_BYTES = 1 << 44


def reasons(
    pod: Pod,
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    reserve_bytes: int,
    tolerance_bytes: int,
    cordoned: Set[str] = frozenset(),
) -> set[Reason]:
    """Return all reasons why a valid pod does not fit on the node."""
    found: set[Reason] = set()
    for resource in resources_of(pod):
        devices = [d for d in status.devices if d.resource == resource]
        if not devices:
            found.add(Reason.NO_SUCH_RESOURCE)
            continue
        could = [d for d in devices if may_have_a_free_replica(d)]
        count = most_replicas(pod, resource)
        free = sum(max(d.replicas.free, 0) for d in could)
        free += sum(1 for d in could if d.replicas.free < 1)
        if free - unobserved(resource, status, reservations) < most_replicas(pod, resource):
            found.add(Reason.NO_REPLICA)
        enough: list[bool] = []
        for d in could:
            if contradictory(d, status):
                found.add(
                    Reason.MEMORY_UNKNOWN
                    if all(untold(m, status) for m in mates(d, status) if nonsense(m, status))
                    else Reason.CONTRADICTORY_REPORT
                )
            elif sick(d, status):
                found.add(Reason.UNHEALTHY_DEVICE)
            elif d.uuid in cordoned or d.parent in cordoned:
                found.add(Reason.CORDONED_DEVICE)
            if d.sharing == "mps":
                found |= mps_reasons(pod, resource, d, status, reserve_bytes)
            if (limit := pod.annotation(MAX_SM)) is not None:
                activity = d.sm_activity
                named = activity is not None and activity.source in ("dcgm", "gpm", "nvml-process")
                known = named and 0 <= activity.ratio <= 1
                if not known or activity.ratio * 1_000_000 >= parse_max_sm(limit):  # type: ignore[union-attr]
                    found.add(Reason.SM_ABOVE_LIMIT)
            need = needed(pod, d, status, reserve_bytes, resource)
            left = room(d, status, reservations, reserve_bytes, tolerance_bytes, count)
            enough.append(need <= left)
        if not any(enough):
            found.add(Reason.MEMORY_ON_ANY)
        if not all(enough):
            found.add(Reason.MEMORY_ON_SOME)
    return found


# The requests of the pod.


def counts(container: Container) -> dict[str, int]:
    asked = container.resources.limits if container.resources else None
    return {resource: int(count) for resource, count in (asked or {}).items() if int(count)}


def resources_of(pod: Pod) -> list[str]:
    every = [*(pod.spec.init_containers or []), *(pod.spec.containers or [])]
    return sorted({resource for container in every for resource in counts(container)})


def moments(pod: Pod) -> list[list[Container]]:
    """Return groups of containers that run at the same time: per init container, and one last."""
    found: list[list[Container]] = []
    sidecars: list[Container] = []
    for container in pod.spec.init_containers or []:
        if container.restart_policy == "Always":
            sidecars.append(container)
        else:
            found.append([*sidecars, container])
    found.append([*sidecars, *(pod.spec.containers or [])])
    return found


def most_replicas(pod: Pod, resource: str) -> int:
    return max(sum(counts(c).get(resource, 0) for c in moment) for moment in moments(pod))


def amount(pod: Pod, container: Container, count: int, on: Device, allocatable: int) -> int:
    """Return the bytes of a container on one device, with up to ``count`` replicas of it."""
    text = pod.annotation(VRAM)
    asked = None if text is None else parse_vram(text).of(container.name)
    if isinstance(asked, Bytes):
        return asked.count_bytes
    if isinstance(asked, Share):
        return max(1, allocatable * asked.ppm // 1_000_000)
    total = max(1, on.replicas.total)
    # MPS allows each process the share of one replica.
    processes = int(pod.annotation(PROCESSES) or "1") if on.sharing == "mps" else 1
    return max(1, allocatable // total * min(count * processes, total))


def needed(pod: Pod, on: Device, status: GPUNodeStatus, reserve: int, resource: str) -> int:
    """Return the maximum number of bytes that the pod could put into the memory of device ``on``.

    Its requests for other resources count only if several devices share the memory.
    """
    if len(mates(on, status)) == 1:
        return needed_of(pod, resource, on, status, reserve)
    return sum(needed_of(pod, other, on, status, reserve) for other in resources_of(pod))


def needed_of(pod: Pod, resource: str, on: Device, status: GPUNodeStatus, reserve: int) -> int:
    together = on.sharing != "none" or len(mates(on, status)) > 1
    most = 0
    for moment in moments(pod):
        loads = []
        for container in moment:
            if count := counts(container).get(resource, 0):
                one = amount(pod, container, count, on, allocatable(on, status, reserve))
                loads.append(one * min(count, len(mates(on, status))))
        most = max(most, sum(loads) if together else max(loads, default=0))
    return most


def mps_reasons(
    pod: Pod, resource: str, on: Device, status: GPUNodeStatus, reserve: int
) -> set[Reason]:
    found: set[Reason] = set()
    mib = 1 << 20
    memory = 0 if contradictory(on, status) else on.memory_bytes
    total = 1 if contradictory(on, status) else max(1, on.replicas.total)
    cap = memory // total // mib * mib * int(pod.annotation(PROCESSES) or "1")
    for container in [*(pod.spec.init_containers or []), *(pod.spec.containers or [])]:
        count = counts(container).get(resource, 0)
        if count > 1:
            found.add(Reason.TOO_MANY_SHARED)
        text = pod.annotation(VRAM)
        named = text is not None and parse_vram(text).of(container.name) is not None
        # The share of a replica is the limit that the plugin sets.
        if (
            named
            and count
            and amount(pod, container, 1, on, allocatable(on, status, reserve)) > cap
        ):
            found.add(Reason.ABOVE_MPS_LIMIT)
    return found


# The devices and pods of the node.


def mates(d: Device, status: GPUNodeStatus) -> list[Device]:
    """Return the devices that share memory with this device, including the device itself."""
    if d.kind != "mig" or not d.parent or d.gpu_instance is None:
        return [d]
    return [
        other
        for other in status.devices
        if other.kind == "mig" and other.parent == d.parent and other.gpu_instance == d.gpu_instance
    ]


def nonsense(d: Device, status: GPUNodeStatus) -> bool:
    replicas = d.replicas
    return (
        not d.uuid
        or [other.uuid for other in status.devices].count(d.uuid) > 1
        or not 0 < d.memory_bytes <= MAX_DEVICE_BYTES
        or not 0 <= d.reserved_bytes <= d.memory_bytes
        or not 0 <= d.used_bytes <= d.memory_bytes
        or (d.unattributed_bytes is not None and not 0 <= d.unattributed_bytes <= d.used_bytes)
        or min(replicas.free, replicas.allocated, replicas.unhealthy) < 0
        or replicas.total > (1024 if d.sharing != "none" else 1)
    )


def untold(d: Device, status: GPUNodeStatus) -> bool:
    """Return whether the driver does not report the memory, and the agent marks the device
    unhealthy.
    """
    unique = [other.uuid for other in status.devices].count(d.uuid) == 1
    return unique and d.memory_bytes <= 0 and not d.healthy


def contradictory(d: Device, status: GPUNodeStatus) -> bool:
    return any(nonsense(mate, status) for mate in mates(d, status))


def sick(d: Device, status: GPUNodeStatus) -> bool:
    parents = [other for other in status.devices if other.uuid == d.parent]
    return not d.healthy or any(not parent.healthy for parent in parents)


def may_have_a_free_replica(d: Device) -> bool:
    """Return whether a replica may be free. An impossible replica count does not prove the
    opposite."""
    replicas = d.replicas
    return replicas.free > 0 or min(replicas.free, replicas.allocated, replicas.unhealthy) < 0


def allocatable(d: Device, status: GPUNodeStatus, reserve_bytes: int) -> int:
    if contradictory(d, status):
        return 0
    return max(0, d.memory_bytes - d.reserved_bytes - reserve_bytes)


def observed_on(uid: str, d: Device, status: GPUNodeStatus) -> set[str]:
    """Return the replicas of the device that the report shows for the pod."""
    return {row.replica for row in status.pods if row.uid == uid and row.device == d.uuid}


def missing(uid: str, resource: str, count: int, status: GPUNodeStatus) -> int:
    """Return the reserved replicas that the report does not show yet."""
    seen = 0
    for uuid in {d.uuid for d in status.devices if d.resource == resource}:
        rows = {row.replica for row in status.pods if row.uid == uid and row.device == uuid}
        seen += len(rows)
    return max(0, count - seen)


def unobserved(
    resource: str, status: GPUNodeStatus, reservations: Mapping[str, Reservation]
) -> int:
    return sum(
        missing(uid, resource, charge.count, status)
        for uid, reservation in reservations.items()
        for charge in reservation.charges
        if charge.resource == resource
    )


def measured(rows: list[PodUse]) -> int:
    return sum(row.used_bytes for row in rows if row.used_bytes is not None and row.used_bytes > 0)


def all_known(rows: list[PodUse]) -> bool:
    return all(row.used_bytes is not None and row.used_bytes >= 0 for row in rows)


def room(
    d: Device,
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    reserve_bytes: int,
    tolerance_bytes: int,
    count: int = 1,
) -> int:
    """Return the bytes that a new pod with a replica of ``d`` can use.

    The largest unconfirmed pods that can be on the device together with it are subtracted.
    """
    memory = mates(d, status)
    uuids = {mate.uuid for mate in memory}
    rows = [row for row in status.pods if row.device in uuids]
    taken = explained = 0
    waiting: list[int] = []
    for uid, reservation in reservations.items():
        own = [row for row in rows if row.uid == uid]
        asked = 0
        seen = may_come = False
        for mate in memory:
            if observed_on(uid, mate, status):
                seen = True
                meant = [
                    charge
                    for charge in reservation.charges
                    if charge.resource == mate.resource or mate.uuid in charge.candidates
                ]
                due = meant or reservation.charges
            else:
                due = [
                    charge
                    for charge in reservation.charges
                    if missing(uid, charge.resource, charge.count, status)
                    and (mate.uuid in charge.candidates or charge.resource == mate.resource)
                ]
                may_come = may_come or bool(due)
            for charge in due:
                most = max(charge.candidates.values(), default=0)
                asked = max(asked, charge.candidates.get(mate.uuid, most))
        use = measured(own) if all_known(own) else 0
        if seen:
            taken += max(asked, use)
            explained += max(asked, use)
        elif may_come:
            waiting.append(asked)
    before, after = (places_for(d, status, reservations, newcomer) for newcomer in (0, count))
    if any(may_have_a_free_replica(mate) for mate in memory):
        # The new pod needs one place. The largest pod without a place may take it instead.
        others = sorted(waiting, reverse=True)
        counted, left_out = others[: after - 1], others[after - 1 : after]
        taken += sum(counted)
        left_out_bytes = max(left_out, default=0)
    else:
        taken += sum(sorted(waiting, reverse=True)[:before])
        left_out_bytes = 0
    unreserved_rows: dict[str, list[PodUse]] = {}
    for row in rows:
        if row.uid not in reservations:
            unreserved_rows.setdefault(row.uid, []).append(row)
    unreserved_pods = sum(measured(own) for own in unreserved_rows.values() if all_known(own))
    used = max(mate.used_bytes for mate in memory)
    if any(mate.unattributed_bytes is None for mate in memory) or not all_known(rows):
        unattributed = max(0, used - explained - unreserved_pods)
    else:
        unattributed = sum(mate.unattributed_bytes or 0 for mate in memory)
    if contradictory(d, status):
        unattributed = 0
    unattributed = max(0, unattributed - tolerance_bytes)
    left = allocatable(d, status, reserve_bytes) - taken - unreserved_pods - unattributed
    return left - left_out_bytes if left_out_bytes > left else left


def places_for(
    d: Device, status: GPUNodeStatus, reservations: Mapping[str, Reservation], count: int
) -> int:
    """Return how many unconfirmed replicas a memory can get, for any choice of the plugin.

    Replicas of a new pod with ``count`` replicas are included. Limits are the free replicas, and
    allocated replicas without a known pod, which an unconfirmed pod may hold. Reservations under a
    former UUID of a device are added.
    """
    places = 0
    for mate in mates(d, status):
        unconfirmed = unobserved(mate.resource, status, reservations) + (
            count if count < 2 else 10**6
        )
        free = max(mate.replicas.free, 0)
        if impossible_count(mate):
            free = 10**6 if may_have_a_free_replica(mate) else 0
        held = {(row.uid, row.replica) for row in status.pods if row.device == mate.uuid}
        unexplained = max(0, mate.replicas.allocated - len(held))
        places += min(unconfirmed, free) + unexplained
        places += sum(
            1
            for uid, reservation in reservations.items()
            for charge in reservation.charges
            if mate.uuid in charge.candidates
            and renamed(charge, mate, status)
            and missing(uid, charge.resource, charge.count, status)
        )
    return places


def renamed(charge: Charge, d: Device, status: GPUNodeStatus) -> bool:
    """Return whether the device had another UUID when it was reserved."""
    return next(o for o in reversed(status.devices) if o.uuid == d.uuid).resource != charge.resource


def impossible_count(d: Device) -> bool:
    replicas = d.replicas
    return min(replicas.free, replicas.allocated, replicas.unhealthy) < 0 or replicas.total > 1024
