"""Which devices a pod could end on: the kubelet and the plugin choose, by counting replicas.

First cut of DESIGN section 5: every device of the resource that has a free replica, whatever its
memory and whatever we think of its health, because the plugin looks at neither.
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


def candidates(slots: Mask, snap: Snapshot) -> Mask:
    """(nodes, slots) where the plugin could place the next replica of these slots' resource."""
    chosen: Mask = slots & (snap.columns.replicas_free > 0)
    return chosen
