"""What a newcomer does to the memory that cannot be promised because the plugin is not ours.

``distributed`` fills devices level by level: those with equally many replicas taken come next
together, in any order, so a pod must fit on the fullest of them, and what the others have more
than that one is out of reach while it is so. A node whose devices hold alike at every level wastes
nothing; one large pod among small ones closes its node for every large pod. Therefore a pod goes
best where it makes its device look like those that have as many pods already.

Only a preference: what is reckoned wrongly here costs density, never safety. Where a device is
not chosen by its level, because it is ours to choose, or a pod asks for several replicas, nothing
is said.
"""

import numpy as np

from contract.gpunode import MAX_DEVICE_BYTES
from extender.placement.fit import AskVerdict
from extender.placement.snapshot import MOST_BYTES, Rows, Snapshot


def more_wasted(verdict: AskVerdict, snap: Snapshot) -> Rows:
    """(nodes,) bytes by which more is out of reach when the pod comes; negative where it is less.

    The pod is taken to get the fullest of its candidates, on which it must fit in any case.
    """
    could, columns = verdict.all_candidates, snap.columns
    if verdict.ask.count > 1 or not could.size:
        return np.zeros(len(could), np.int64)
    # For a few nodes the number of numpy's calls is what counts.
    room, level = columns.headroom_bytes, columns.replicas - columns.replicas_free
    given = np.arange(len(could)), np.where(could, room, MOST_BYTES).argmin(axis=1)
    here = level[given]
    alike = columns.resource == columns.resource[given][:, None]
    alike[given] = False
    #: Those at the level that it leaves, then those at the one that it comes to.
    others = alike & (level == np.array([here, here + 1])[:, :, None])
    before = room[given]
    own = np.array([before, before - verdict.all_need_bytes[given]])
    least = np.where(others, room, MOST_BYTES).min(axis=2)
    # Absurd figures would overflow when they are multiplied.
    apart = np.maximum(np.minimum(own - least, MAX_DEVICE_BYTES), -MAX_DEVICE_BYTES)
    left, joined = np.where(apart >= 0, apart, -apart * others.sum(axis=2))
    known = could[given] & (columns.replicas[given] > 1) & ~verdict.all_ours
    change: Rows = (joined - left) * known
    return change
