"""What a busy device costs when the device is ours to choose: bytes, as of memory left unused.

Packing looks for the device on which least is left, interference for the one that is least busy.
They are weighed: all SMs busy count as much as a quarter of the node's largest device left over. So
of two devices on which equally much is left the quieter one is chosen, however little quieter; and
a device that nobody uses is not opened for the sake of quiet unless that wastes less than a quarter
of a device. Whose activity nobody knows counts as half busy.
"""

import numpy as np

from extender.placement.snapshot import Bytes2D, Int2D

#: All SMs busy are worth 1 / so much of a device.
_PART = 4
_UNKNOWN_PPM = 500_000


def unrest_bytes(sm_ppm: Int2D, allocatable_bytes: Bytes2D) -> Bytes2D:
    """(n, slots) how many bytes more may be left on an idle device than on this one for it to be
    as good."""
    ppm = np.where(sm_ppm < 0, _UNKNOWN_PPM, sm_ppm)
    largest = allocatable_bytes.max(axis=1, initial=0)
    bytes_of_ppm = largest // (_PART * 1_000_000)
    cost: Bytes2D = bytes_of_ppm[:, None] * ppm
    return cost
