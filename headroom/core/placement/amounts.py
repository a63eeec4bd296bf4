"""Converts amounts to bytes on given devices.

Shares are integers, rounded down to at least 1 byte, so that the shares of one device never add up
to more than its memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from headroom.contract.annotations import PPM, Amount, Bytes, ReplicaShare, Share
from headroom.contract.gpunode import Device
from headroom.contract.quantity import MAX_DEVICE_BYTES
from headroom.core.placement.device_accounting import allocatable
from headroom.core.placement.device_reading import UNBELIEVED, duplicate_uuids, health_issues
from headroom.core.placement.report_index import memories_of
from headroom.core.placement.request import Ask, Portion
from headroom.core.placement.snapshot import MOST_BYTES

BytesArray = NDArray[np.int64]

#: Sums are capped at this value, which is far above any memory. Sums of capped values fit into
#: int64.
TOO_MUCH_BYTES = 1 << 52
MIB_BITS = 20


@dataclass(frozen=True, slots=True)
class DeviceArrays:
    """The properties of devices that determine how much a pod can take, as arrays of equal shape.

    Absent slots have negative values. Results for them are arbitrary, and callers must mask them.
    """

    allocatable_bytes: BytesArray
    replicas: BytesArray
    #: Whether several containers can use the device's memory at the same time.
    common: NDArray[np.bool_]
    #: Number of devices that share the device's memory, including itself.
    sharers: BytesArray
    #: Whether MPS limits the memory of each process instead of each container.
    mps: NDArray[np.bool_]


def device_arrays(devices: Sequence[Device], reserve_bytes: int) -> DeviceArrays:
    """Return one-dimensional arrays for the reported devices of a node, in their order.

    ``reserve_bytes`` is the node's reserve on each device. If the values of a device are
    implausible, its memory is assumed to be ``MAX_DEVICE_BYTES``, so that shares are not too small.
    """
    memories = memories_of(devices)
    issues = health_issues(devices, memories, duplicate_uuids(devices))
    reported = [
        (device, health_issue not in UNBELIEVED, len(memory))
        for device, (health_issue, _), memory in zip(devices, issues, memories, strict=True)
    ]
    return DeviceArrays(
        allocatable_bytes=np.array(
            [allocatable(d, reserve_bytes) if ok else MAX_DEVICE_BYTES for d, ok, _ in reported],
            np.int64,
        ),
        replicas=np.array([d.replicas.total if ok else 1 for d, ok, _ in reported], np.int64),
        common=np.array([d.sharing != "none" or sharers > 1 for d, _, sharers in reported], bool),
        sharers=np.array([sharers for _, _, sharers in reported], np.int64),
        mps=np.array([d.sharing == "mps" for d, _, _ in reported], bool),
    )


def bytes_of(amount: Amount, count: int, arrays: DeviceArrays) -> BytesArray:
    """Return the bytes that one container takes on each device if ``count`` replicas are on it.

    An amount in bytes and a share of a device apply per device, so they do not depend on ``count``.
    """
    allocatable = arrays.allocatable_bytes
    match amount:
        case Bytes(count_bytes):
            return np.full(allocatable.shape, count_bytes, np.int64)
        case Share(ppm):
            # Divide first, and handle the remainder separately, because bytes times a million would
            # overflow int64.
            share: BytesArray = allocatable // PPM * ppm + allocatable % PPM * ppm // PPM
            return np.maximum(share, 1)
        case ReplicaShare(processes):
            replicas = np.maximum(arrays.replicas, 1)
            taken = count if processes == 1 else count * np.where(arrays.mps, processes, 1)
            share_of_replicas: BytesArray = allocatable // replicas * np.minimum(taken, replicas)
            return np.maximum(share_of_replicas, 1)
        case _:
            assert_never(amount)


def needed(ask: Ask, asks: Sequence[Ask], arrays: DeviceArrays, apart: bool = False) -> BytesArray:
    """Return the maximum number of bytes that a pod with these ``asks`` can take of each device's
    memory.

    ``ask`` is the item of ``asks`` for the resource of the device. On devices of other resources
    the result is meaningless. ``apart`` states whether the replicas of one container are on
    different devices.
    """
    joint = arrays.sharers > 1
    any_joint = bool(joint.any())
    need = _largest(ask, arrays, any_joint, apart)
    if len(asks) > 1 and any_joint:
        # Devices of the other resources may share the memory, so assume the worst case, in which
        # they do.
        for other in asks:
            if other is not ask:
                more = np.where(joint, _largest(other, arrays, any_joint, apart), 0)
                need = np.minimum(need + more, MOST_BYTES)
    return need


def _largest(ask: Ask, arrays: DeviceArrays, any_joint: bool, apart: bool) -> BytesArray:
    """Return the bytes of the largest phase of an ask on each device.

    All containers of a phase can use a shared memory at the same time, and each of them can use all
    devices that share the memory. Any other memory serves only one container. ``any_joint`` states
    whether any devices share their memory.
    """
    # Compute one phase at a time, because an array for all phases and devices would take gigabytes.
    largest = _of_phase(ask.phases[0], arrays, any_joint, apart)
    for phase in ask.phases[1:]:
        largest = np.maximum(largest, _of_phase(phase, arrays, any_joint, apart))
    return largest


def _of_phase(
    phase: Sequence[Portion], arrays: DeviceArrays, any_joint: bool, apart: bool
) -> BytesArray:
    """Return the maximum bytes of one phase on each device, with sums capped to avoid an
    overflow."""
    sizes = [bytes_of(portion.amount, 1 if apart else portion.count, arrays) for portion in phase]
    if len(sizes) == 1 and not any_joint:
        return sizes[0]
    together = alone = np.zeros(arrays.sharers.shape, np.int64)
    for portion, one in zip(phase, sizes, strict=True):
        devices = np.clip(arrays.sharers, 1, portion.count)
        together = np.minimum(together + one * devices, TOO_MUCH_BYTES)
        alone = np.maximum(alone, one)
    return np.where(arrays.common, together, alone)


def above_cap(
    ask: Ask, processes: int, memory_bytes: BytesArray, arrays: DeviceArrays
) -> NDArray[np.bool_]:
    """Return the mask (n, slots) of devices where a container requests more than MPS allows.

    The plugin limits each MPS process to total memory / replicas, in whole MiB. A container can use
    that much in each of its ``processes``, so a larger request can never fit. A container that
    requests one replica's share fits the limit by definition. The mask is meaningful only for
    devices shared by MPS.
    """
    cap_bytes = (memory_bytes // np.maximum(arrays.replicas, 1) >> MIB_BITS << MIB_BITS) * processes
    above = np.zeros(cap_bytes.shape, bool)
    for portion in {portion for phase in ask.phases for portion in phase}:
        if not isinstance(portion.amount, ReplicaShare):
            above |= bytes_of(portion.amount, portion.count, arrays) > cap_bytes
    return above
