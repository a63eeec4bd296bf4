"""Converts amounts to bytes on given devices.

Shares are integers, rounded down to at least 1 byte, so that the shares of one device never add up
to more than its memory.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from contract.annotations import PPM, Amount, Bytes, ReplicaShare, Share
from contract.gpunode import MAX_DEVICE_BYTES, Device
from extender.placement.device_accounting import allocatable
from extender.placement.device_reading import UNBELIEVED, duplicate_uuids, health_issues
from extender.placement.report_index import memories_of
from extender.placement.request import Ask, Portion
from extender.placement.snapshot import MOST_BYTES

BytesArray = NDArray[np.int64]

#: Sums are capped at this value. It is far above any memory, and sums of capped values fit int64.
TOO_MUCH_BYTES = 1 << 52
MIB_BITS = 20


@dataclass(frozen=True, slots=True)
class DeviceArrays:
    """The properties of devices that determine how much a pod can take; arrays of equal shape.

    Absent slots have values below zero and yield arbitrary results; mask them.
    """

    allocatable_bytes: BytesArray
    replicas: BytesArray
    #: Whether several containers can use its memory at once.
    common: NDArray[np.bool_]
    #: Devices that share its memory, itself included.
    sharers: BytesArray
    #: Whether MPS limits each process, not each container.
    mps: NDArray[np.bool_]


def device_arrays(devices: Sequence[Device], reserve_bytes: int) -> DeviceArrays:
    """Return one-dimensional arrays of a node's reported devices.

    ``reserve_bytes`` stay free on each device. If the report of a device contradicts itself, its
    memory is unknown. Then ``MAX_DEVICE_BYTES`` is the safe assumption for shares of it.
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
    """Return the bytes of one container on each device, if it gets up to ``count`` replicas."""
    allocatable = arrays.allocatable_bytes
    match amount:
        case Bytes(count_bytes):
            return np.broadcast_to(np.int64(count_bytes), allocatable.shape)
        case Share(ppm):
            # In two parts, because bytes times a million would overflow int64.
            share: BytesArray = allocatable // PPM * ppm + allocatable % PPM * ppm // PPM
            return np.maximum(share, 1)
        case ReplicaShare(processes):
            replicas = np.maximum(arrays.replicas, 1)
            taken = count if processes == 1 else count * np.where(arrays.mps, processes, 1)
            worth: BytesArray = allocatable // replicas * np.minimum(taken, replicas)
            return np.maximum(worth, 1)
        case _:
            assert_never(amount)


def needed(ask: Ask, asks: Sequence[Ask], arrays: DeviceArrays) -> BytesArray:
    """Return the most bytes that a pod with these ``asks`` can take of each device's memory.

    Each device is assumed to be allocated for ``ask``.
    """
    joint = arrays.sharers > 1
    any_joint = bool(joint.any())
    need = _largest(ask, arrays, any_joint)
    if len(asks) > 1 and any_joint:
        # Devices of another resource can share the memory. The worst case is that they do.
        for other in asks:
            if other is not ask:
                more = np.where(joint, _largest(other, arrays, any_joint), 0)
                need = np.minimum(need + more, MOST_BYTES)
    return need


def _largest(ask: Ask, arrays: DeviceArrays, any_joint: bool) -> BytesArray:
    """Return the most bytes of any phase.

    All containers of a phase can use a shared memory at once, each with all devices that share it.
    Any other memory serves one container. Sums are capped, so that huge requests cannot overflow.
    """
    # Phase by phase: one array for all phases and devices would take gigabytes.
    largest = _of_phase(ask.phases[0], arrays, any_joint)
    for phase in ask.phases[1:]:
        largest = np.maximum(largest, _of_phase(phase, arrays, any_joint))
    return largest


def _of_phase(phase: Sequence[Portion], arrays: DeviceArrays, any_joint: bool) -> BytesArray:
    sizes = [bytes_of(portion.amount, portion.count, arrays) for portion in phase]
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

    The plugin limits each MPS process to total memory / replicas, in whole MiB. A larger request
    can never fit. A container that requests a replica's share accepts the limit, and has that much
    reserved for each of its processes.
    """
    cap = (memory_bytes // np.maximum(arrays.replicas, 1) >> MIB_BITS << MIB_BITS) * processes
    above = np.zeros(cap.shape, bool)
    for portion in {portion for phase in ask.phases for portion in phase}:
        if not isinstance(portion.amount, ReplicaShare):
            above |= bytes_of(portion.amount, portion.count, arrays) > cap
    return above
