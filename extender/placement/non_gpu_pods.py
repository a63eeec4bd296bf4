"""Where a pod that asks for no GPU takes least away from those that do.

It takes CPU and memory of the host, and without these nobody can use the devices of a node. So it
is best on a node that has none; else on the one with the least *spare* GPU memory: what pods could
still be promised there. Who filled up nodes one by one leaves the others whole.
"""

import numpy as np

from extender.placement.candidate_devices import Mask
from extender.placement.device_accounting import DeviceTerms
from extender.placement.snapshot import MOST_BYTES, NodeTerms, Rows, Snapshot, clamped

#: Less than any node with a device has.
NO_DEVICE = -1


def spare_bytes(node: NodeTerms) -> int:
    """What pods could still be promised on its devices; ``NO_DEVICE`` where there are none. Devices
    of which nobody told anything count as more than all others."""
    if not node.devices:
        return MOST_BYTES if node.equipped else NO_DEVICE
    return clamped(sum(map(_spare_bytes, node.devices)))


def _spare_bytes(terms: DeviceTerms) -> int:
    """Of a device that nobody can be given nothing, and its part of a memory that several share."""
    if terms.health_issue is not None or not terms.device.replicas.free:
        return 0
    return max(terms.headroom_bytes, 0) // max(terms.sharers, 1)


def aside(snap: Snapshot, rows: Rows) -> Mask:
    """Which of the rows are best, -1 being a node that is not known: none of these.

    All nodes without devices, which are all alike to us. Of the others one: of equal ones always
    the first by name, so that pods fill up one node before they begin another.
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
