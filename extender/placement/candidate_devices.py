"""Which devices a pod could end on, for all nodes at once.

The kubelet and the plugin choose, by counting replicas, whatever the memory and whatever we think
of the device's health. What they could do was reckoned when the node was weighed
(``placement.plugin``); here it is only read.
"""

import numpy as np
from numpy.typing import NDArray

from extender.placement.snapshot import Snapshot

Mask = NDArray[np.bool_]


def slots_of(resource: str, snap: Snapshot) -> Mask:
    """(nodes, slots) where the node advertises a device under ``resource``."""
    index = snap.resources.get(resource)
    advertised = snap.columns.resource
    return np.zeros(advertised.shape, bool) if index is None else advertised == index


def candidates(slots: Mask, count: int, snap: Snapshot) -> Mask:
    """(nodes, slots) where the plugin could place one of the next ``count`` replicas of these
    slots' resource."""
    chosen: Mask = slots & (snap.columns.reach <= count)
    return chosen
