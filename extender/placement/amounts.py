"""How many bytes an amount is on a given device. Integers only: shares are rounded down, so that
the shares of one device never add up to more than the device."""

from typing import assert_never

import numpy as np
from numpy.typing import NDArray

from contract.annotations import PPM, Amount, Bytes, ReplicaShare, Share
from extender.placement.request import Ask

BytesArray = NDArray[np.int64]


def bytes_of(amount: Amount, allocatable: BytesArray, replicas: BytesArray) -> BytesArray:
    """Bytes of one amount on devices with these allocatable bytes and replicas; same shape.

    Absent slots (allocatable below zero) give whatever; mask them.
    """
    match amount:
        case Bytes(count_bytes):
            return np.full(allocatable.shape, count_bytes, np.int64)
        case Share(ppm):
            # Split so that bytes times a million stays in int64.
            return allocatable // PPM * ppm + allocatable % PPM * ppm // PPM
        case ReplicaShare():
            return allocatable // np.maximum(replicas, 1)
        case _:
            assert_never(amount)


def largest(ask: Ask, allocatable: BytesArray, replicas: BytesArray, shared: bool) -> BytesArray:
    """The most bytes that the pod could put on each device, over its phases.

    On a shared device all containers of a phase may meet; an unshared one holds one container.
    Additions saturate: an absurd request is too large, never small again.
    """
    most = np.zeros(allocatable.shape, np.int64)
    for phase in ask.phases:
        together = np.zeros(allocatable.shape, np.int64)
        for amount in phase:
            one = bytes_of(amount, allocatable, replicas)
            together = _saturating_add(together, one) if shared else np.maximum(together, one)
        most = np.maximum(most, together)
    return most


def _saturating_add(left: BytesArray, right: BytesArray) -> BytesArray:
    """Sum of non-negative int64, held at the largest int64."""
    total = left + right
    return np.where(total < left, np.iinfo(np.int64).max, total)
