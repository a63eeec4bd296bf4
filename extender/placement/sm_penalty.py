"""Computes the cost of SM activity, in bytes of unused memory, if Headroom chooses the device.

Packing prefers the device with the least free memory. Low interference requires the device with the
least SM activity. Full SM activity costs as much as leaving a quarter of the node's largest device
unused. So of two devices with equal free memory the less busy one is chosen. An idle device is
chosen only if that wastes less than a quarter of a device. Unknown activity counts as 50 %.
"""

import numpy as np

from extender.placement.snapshot import Bytes2D, Int2D

#: Full SM activity costs 1 / this number of a device.
_PART = 4
_UNKNOWN_PPM = 500_000


def unrest_bytes(sm_ppm: Int2D, allocatable_bytes: Bytes2D) -> Bytes2D:
    """Return the cost of each device's SM activity in bytes, (n, slots).

    An idle device with this many more free bytes is equally good.
    """
    ppm = np.where(sm_ppm < 0, _UNKNOWN_PPM, sm_ppm)
    largest = allocatable_bytes.max(axis=1, initial=0)
    bytes_of_ppm = largest // (_PART * 1_000_000)
    cost: Bytes2D = bytes_of_ppm[:, None] * ppm
    return cost
