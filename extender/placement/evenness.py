"""What a newcomer does to the memory that cannot be promised because the plugin is not ours.

``distributed`` fills devices level by level: those with equally many replicas taken come next
together, in any order, so a pod must fit on the fullest of them, and what the others have more
than that one is out of reach while it is so. A node whose devices hold alike at every level wastes
nothing; one large pod among small ones closes its node for every large pod. Therefore a pod goes
best where it makes its device look like those that have as many pods already.

Only a preference: what is reckoned wrongly here costs density, never safety. Where a device is
not chosen by its level, or a pod asks for several replicas, nothing is said.
"""

import numpy as np

from contract.gpunode import MAX_DEVICE_BYTES
from extender.placement.candidates import Mask
from extender.placement.fit import AskVerdict
from extender.placement.snapshot import MOST_BYTES, Bytes2D, Rows, Snapshot


def more_wasted(verdict: AskVerdict, snap: Snapshot) -> Rows:
    """(nodes,) bytes by which more is out of reach when the pod comes; negative where it is less.

    The pod is taken to get the fullest of its candidates, on which it must fit in any case.
    """
    could, columns = verdict.all_candidates, snap.columns
    rows = np.arange(len(could))
    if verdict.ask.count > 1 or not could.size:
        return np.zeros(len(rows), np.int64)
    room, has = columns.headroom_bytes, columns.resource
    given = np.where(could, room, MOST_BYTES).argmin(axis=1)
    level = np.where(columns.replicas > 1, columns.replicas - columns.replicas_free, -1)
    alike = has == has[rows, given][:, None]
    at = level[rows, given][:, None]
    before_bytes = room[rows, given]
    after_bytes = before_bytes - np.where(could, verdict.all_need_bytes, 0).max(axis=1)
    left = alike & (level == at)
    left[rows, given] = False
    joined = alike & (level == at + 1)
    change = _fullest_apart(joined, room, after_bytes) - _fullest_apart(left, room, before_bytes)
    return np.where((at[:, 0] >= 0) & could.any(axis=1), change, 0)


def _fullest_apart(others: Mask, room: Bytes2D, own_bytes: Rows) -> Rows:
    """What one more device with ``own_bytes`` of room adds to what ``others`` waste."""
    count = others.sum(axis=1)
    least = np.where(others, room, MOST_BYTES).min(axis=1)
    # Absurd figures would overflow when they are multiplied.
    apart: Rows = np.clip(own_bytes - least, -MAX_DEVICE_BYTES, MAX_DEVICE_BYTES)
    return np.where(count == 0, 0, np.where(apart >= 0, apart, -apart * count))
