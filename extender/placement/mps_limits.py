"""What the plugin lets each process of a pod take where it shares a device by MPS."""

import numpy as np
from numpy.typing import NDArray

from contract.annotations import ReplicaShare
from extender.placement.amounts import Places, bytes_of
from extender.placement.request import Ask
from extender.placement.snapshot import Bytes2D

MIB_BITS = 20


def above_cap(ask: Ask, processes: int, memory_bytes: Bytes2D, at: Places) -> NDArray[np.bool_]:
    """(n, slots) where a container asks for more than its processes may take.

    The plugin caps each MPS process at total memory / replicas, in whole MiB; waiting for more
    is waiting for ever. Who asks for what a replica is worth is content with the cap, and charged
    with it for each of his processes.
    """
    cap = (memory_bytes // np.maximum(at.replicas, 1) >> MIB_BITS << MIB_BITS) * processes
    above = np.zeros(cap.shape, bool)
    for portion in {portion for phase in ask.phases for portion in phase}:
        if not isinstance(portion.amount, ReplicaShare):
            above |= bytes_of(portion.amount, portion.count, at) > cap
    return above
