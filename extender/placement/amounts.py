"""How many bytes an amount is on a given device. Integers only: shares are rounded down, so that
the shares of one device never add up to more than the device, but never to nothing."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from contract.annotations import PPM, Amount, Bytes, ReplicaShare, Share
from contract.gpunode import MAX_DEVICE_BYTES, Device
from extender.placement.device_accounting import allocatable
from extender.placement.device_health import UNBELIEVED, doubles, health_issues
from extender.placement.occupancy import memories_of
from extender.placement.request import Ask, Portion
from extender.placement.snapshot import MOST_BYTES

BytesArray = NDArray[np.int64]

#: Sums are held here: far more than any memory, and so many of them stay in int64.
TOO_MUCH_BYTES = 1 << 52


@dataclass(frozen=True, slots=True)
class Places:
    """Devices, as far as it matters how much a pod can put there; all arrays have one shape.

    Absent slots (figures below zero) give whatever; mask them.
    """

    allocatable_bytes: BytesArray
    replicas: BytesArray
    #: Whether several containers can be in its memory at once.
    common: NDArray[np.bool_]
    #: Devices that share its memory, itself included.
    sharers: BytesArray
    #: Whether its plugin caps each process, not each container.
    mps: NDArray[np.bool_]


def places_of(devices: Sequence[Device], reserve_bytes: int) -> Places:
    """The devices of one node as they are reported, one-dimensional; ``reserve_bytes`` of each
    are kept free.

    What a device holds whose report contradicts itself is not known: a share of it could be a
    share of the most that any has.
    """
    memories = memories_of(devices)
    unhealthy = health_issues(devices, memories, doubles(devices))
    told = [
        (device, health_issue not in UNBELIEVED, len(memory))
        for device, (health_issue, _), memory in zip(devices, unhealthy, memories, strict=True)
    ]
    return Places(
        allocatable_bytes=np.array(
            [allocatable(d, reserve_bytes) if ok else MAX_DEVICE_BYTES for d, ok, _ in told],
            np.int64,
        ),
        replicas=np.array([d.replicas.total if ok else 1 for d, ok, _ in told], np.int64),
        common=np.array([d.sharing != "none" or sharers > 1 for d, _, sharers in told], bool),
        sharers=np.array([sharers for _, _, sharers in told], np.int64),
        mps=np.array([d.sharing == "mps" for d, _, _ in told], bool),
    )


def bytes_of(amount: Amount, count: int, at: Places) -> BytesArray:
    """Bytes of one container on one device of which it may hold up to ``count`` replicas."""
    allocatable = at.allocatable_bytes
    match amount:
        case Bytes(count_bytes):
            return np.broadcast_to(np.int64(count_bytes), allocatable.shape)
        case Share(ppm):
            # Split so that bytes times a million stays in int64.
            share: BytesArray = allocatable // PPM * ppm + allocatable % PPM * ppm // PPM
            return np.maximum(share, 1)
        case ReplicaShare(processes):
            replicas = np.maximum(at.replicas, 1)
            taken = count if processes == 1 else count * np.where(at.mps, processes, 1)
            worth: BytesArray = allocatable // replicas * np.minimum(taken, replicas)
            return np.maximum(worth, 1)
        case _:
            assert_never(amount)


def needed(ask: Ask, asks: Sequence[Ask], at: Places) -> BytesArray:
    """The most bytes that a pod with these ``asks`` could put into the memory of each device, when
    the device is given to it for ``ask``."""
    joint = at.sharers > 1
    any_joint = bool(joint.any())
    need = _largest(ask, at, any_joint)
    if len(asks) > 1 and any_joint:
        # Devices of another resource can be in the same memory; that they are is assumed.
        for other in asks:
            if other is not ask:
                more = np.where(joint, _largest(other, at, any_joint), 0)
                need = np.minimum(need + more, MOST_BYTES)
    return need


def _largest(ask: Ask, at: Places, any_joint: bool) -> BytesArray:
    """The largest of its phases.

    In a common memory all containers of a phase may meet, each with as many devices as share it;
    any other holds one container. An absurd request is too large, never small again.
    """
    # One after the other: all phases of all devices at once would be gigabytes.
    largest = _of_phase(ask.phases[0], at, any_joint)
    for phase in ask.phases[1:]:
        largest = np.maximum(largest, _of_phase(phase, at, any_joint))
    return largest


def _of_phase(phase: Sequence[Portion], at: Places, any_joint: bool) -> BytesArray:
    sizes = [bytes_of(portion.amount, portion.count, at) for portion in phase]
    if len(sizes) == 1 and not any_joint:
        return sizes[0]
    together = alone = np.zeros(at.sharers.shape, np.int64)
    for portion, one in zip(phase, sizes, strict=True):
        devices = np.clip(at.sharers, 1, portion.count)
        together = np.minimum(together + one * devices, TOO_MUCH_BYTES)
        alone = np.maximum(alone, one)
    return np.where(at.common, together, alone)
