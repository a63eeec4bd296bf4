"""Decides what must be computed again for a new report of a node.

Most reports change measured use only, and most pods use less than they requested, so the memory
that is free for others does not change. Then the occupancy of the node is still valid, and only the
measured values of the device terms are replaced.
"""

from collections.abc import Mapping, Sequence, Set
from operator import attrgetter, eq

import msgspec
from msgspec.structs import replace

from headroom.contract.gpunode import Device, GPUNodeStatus, PodUse, Reservation
from headroom.core.placement.device_accounting import DeviceTerms, known, sum_known
from headroom.core.placement.device_reading import reported
from headroom.core.placement.occupancy import Holder, Occupancy, Tenancy, occupy

#: Fields of a device that may change without ``weigh``; the first two only within limits.
_MEASURED = (
    "used_bytes",
    "unattributed_bytes",
    "sm_activity",
    "sm_occupancy_ratio",
    "utilization_ratio",
)
_unmeasured_fields = attrgetter(
    *(each for each in Device.__struct_fields__ if each not in _MEASURED)
)


class Found(msgspec.Struct, frozen=True, gc=False):
    """An occupancy, and the latest inputs of ``occupy`` for which it is valid."""

    status: GPUNodeStatus
    reservations: Mapping[str, Reservation]
    leaving: Set[str]
    occupancy: Occupancy


def find(
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    leaving: Set[str],
    before: Found | None,
) -> Found:
    """Return the occupancy for these inputs of ``occupy``.

    Reuse the occupancy in ``before`` if the inputs do not change it.
    """
    if before is not None and (
        before.leaving == leaving
        and _equal_charges(before.reservations, reservations)
        and _equal_occupancy(before.status, status)
    ):
        occupancy = before.occupancy
    else:
        occupancy = occupy(status, reservations, leaving)
    return Found(status, reservations, leaving or _NO_PODS, occupancy)


_NO_PODS: Set[str] = frozenset()


def _equal_charges(was: Mapping[str, Reservation], now: Mapping[str, Reservation]) -> bool:
    """Return whether charges, names and phases of the reservations are equal, in equal order."""
    if was is now:
        return True
    return list(was) == list(now) and all(
        held is reservation
        or (held.charges == reservation.charges and _of_pod(held) == _of_pod(reservation))
        for held, reservation in zip(was.values(), now.values(), strict=True)
    )


def _equal_occupancy(was: GPUNodeStatus, now: GPUNodeStatus) -> bool:
    """Return whether ``occupy`` returns equal results for two reports, all else equal."""
    return (
        was.plugin == now.plugin
        and len(was.devices) == len(now.devices)
        and len(was.pods) == len(now.pods)
        and all(map(eq, map(_occupancy_fields, was.devices), map(_occupancy_fields, now.devices)))
        and all(map(eq, map(_occupancy_row, was.pods), map(_occupancy_row, now.pods)))
    )


_of_pod = attrgetter("namespace", "name", "is_starting")
_occupancy_fields = attrgetter(
    "uuid", "resource", "sharing", "replicas", "kind", "parent", "gpu_instance", "numa_node"
)


def _occupancy_row(use: PodUse) -> tuple[object, ...]:
    # The occupancy depends only on whether the pod uses the device; None if that is unknown.
    used = use.used_bytes
    sign = None if used is None else (used > 0) - (used < 0)
    return use.uid, use.device, use.replica, use.container, sign


def with_new_measurements(
    terms: Sequence[DeviceTerms],
    occupancy: Occupancy,
    was: GPUNodeStatus,
    now: GPUNodeStatus,
    unattributed_tolerance_bytes: int,
) -> tuple[DeviceTerms, ...] | None:
    """Return ``terms`` with the measured values of the report ``now``, as ``weigh`` would.

    None if other values change too; then call ``weigh``. ``terms`` belong to the report ``was``.
    The occupancy, the node's reserve and the tolerance must be equal for both reports. The SM
    activity of ``terms`` may be from another source.
    """
    if (
        was.plugin != now.plugin
        or len(was.devices) != len(now.devices)
        or not _charged_alike(was.pods, now.pods, occupancy)
    ):
        return None
    used_bytes = [known(row.used_bytes) for row in now.pods]
    holders_of: dict[int, tuple[Holder, ...]] = {}
    updated: list[DeviceTerms] = []
    for each, before, device, tenancy in zip(
        terms, was.devices, now.devices, occupancy.tenancies, strict=True
    ):
        if (
            each.health_issue is not None
            or _unmeasured_fields(before) != _unmeasured_fields(device)
            or not _unattributed_alike(each, before, device, unattributed_tolerance_bytes)
        ):
            return None
        if (holders := holders_of.get(id(tenancy))) is None:
            holders = holders_of[id(tenancy)] = _holders(each.holders, tenancy, used_bytes)
        activity = reported(device, now.observed_at)
        updated.append(replace(each, device=device, holders=holders, activity=activity))
    return tuple(updated)


def _charged_alike(was: Sequence[PodUse], now: Sequence[PodUse], occupancy: Occupancy) -> bool:
    """Return whether pods hold the same replicas, and commit as many bytes, as before.

    Measured use may change as long as it does not exceed the pod's request.
    """
    if len(was) != len(now):
        return False
    for before, row, asked_bytes in zip(was, now, occupancy.asked_bytes, strict=True):
        if before.uid != row.uid or before.device != row.device or before.replica != row.replica:
            return False
        had, has = before.used_bytes, row.used_bytes
        if had == has:
            continue
        # Whether a pod uses any memory can decide on which device the pod counts.
        if had is None or has is None or asked_bytes is None or had <= 0 or has <= 0:
            return False
        if max(had, has) > asked_bytes:
            return False
    return True


def _unattributed_alike(
    terms: DeviceTerms, was: Device, now: Device, unattributed_tolerance_bytes: int
) -> bool:
    """Return whether the device's values are plausible and its unattributed term is unchanged."""
    if not 0 <= now.used_bytes <= now.memory_bytes:
        return False
    if was.unattributed_bytes is None or now.unattributed_bytes is None:
        if was.unattributed_bytes is not now.unattributed_bytes:
            return False
    elif not 0 <= now.unattributed_bytes <= now.used_bytes:
        return False
    if terms.attributed:
        if was.unattributed_bytes == now.unattributed_bytes:
            return True
        unexplained_bytes = now.unattributed_bytes if terms.sharers == 1 else None
    else:
        if was.used_bytes == now.used_bytes:
            return True
        unexplained_bytes = now.used_bytes - terms.reservation_bytes - terms.unreserved_pods_bytes
    return (
        terms.unattributed_bytes == 0
        and unexplained_bytes is not None
        and unexplained_bytes <= unattributed_tolerance_bytes
    )


def _holders(
    before: tuple[Holder, ...], tenancy: Tenancy, used_bytes: Sequence[int | None]
) -> tuple[Holder, ...]:
    """Return the holders with new measured bytes; unconfirmed pods, which come last, have none."""
    holders: list[Holder] = []
    for holder, occupant in zip(before, tenancy.occupants, strict=False):
        measured_bytes = sum_known(occupant.rows, used_bytes)
        if measured_bytes != holder.measured_bytes:
            holder = replace(holder, measured_bytes=measured_bytes)
        holders.append(holder)
    return (*holders, *before[len(holders) :])
