"""Chooses nodes for pods without a GPU, so that GPU pods lose as little as possible.

Such a pod takes CPU and host memory, which GPU pods on the node also need. It is best placed on a
node without GPUs, else on the node with the least *spare* GPU memory. Filling nodes one by one
keeps the others whole.
"""

import numpy as np

from extender.placement.candidate_devices import Mask
from extender.placement.device_accounting import DeviceTerms
from extender.placement.snapshot import MOST_BYTES, NodeTerms, Rows, Snapshot, clamped

#: Spare bytes of a node without devices; less than any node with a device has.
NO_DEVICE = -1


def spare_bytes(node: NodeTerms) -> int:
    """Return the bytes free for reservation on the node; ``NO_DEVICE`` if it has no devices.

    A node with GPUs but without a report counts as the largest.
    """
    if not node.devices:
        return MOST_BYTES if node.equipped else NO_DEVICE
    return clamped(sum(map(_spare_bytes, node.devices)))


def _spare_bytes(terms: DeviceTerms) -> int:
    """Return the device's part of its memory's headroom; 0 if no pod can get the device."""
    if terms.health_issue is not None or not terms.device.replicas.free:
        return 0
    return max(terms.headroom_bytes, 0) // max(terms.sharers, 1)


def aside(snap: Snapshot, rows: Rows) -> Mask:
    """Return the mask of the best rows; -1 is an unknown node, which is never best.

    All nodes without devices are equally good. If there are none, exactly one node is best. Its
    name breaks ties, so that pods fill one node before they use the next.
    """
    best = np.zeros(len(rows), bool)
    known = np.flatnonzero(rows >= 0)
    if not len(known):
        return best
    spare = snap.spare_bytes.take(rows[known])
    least = known[spare == spare.min()]
    if spare.min() == NO_DEVICE:
        best[least] = True
    else:
        best[least[snap.name_rank.take(rows[least]).argmin()]] = True
    return best
