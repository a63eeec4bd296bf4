"""Checks requests against the memory limit that the plugin sets for each MPS process."""

import numpy as np
from numpy.typing import NDArray

from contract.annotations import ReplicaShare
from extender.placement.amounts import DeviceArrays, bytes_of
from extender.placement.request import Ask
from extender.placement.snapshot import Bytes2D

MIB_BITS = 20


def above_cap(
    ask: Ask, processes: int, memory_bytes: Bytes2D, arrays: DeviceArrays
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
