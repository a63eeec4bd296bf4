"""Estimates how much memory a new pod strands: free memory that the plugin's choice makes unusable.

The policy ``distributed`` fills devices level by level. It chooses any of the devices with equally
few replicas taken, so a pod must fit on the fullest of them. The additional free memory of the
others is stranded. A node whose devices are equally full at every level strands nothing. One large
pod among small ones makes its node unusable for all large pods. So a pod is best placed where its
device becomes similar to those with as many pods.

The estimate is only a preference: errors cost density, never safety. It is 0 if the plugin does not
choose by levels, because Headroom chooses or because the pod requests several replicas.
"""

import numpy as np

from contract.gpunode import MAX_DEVICE_BYTES
from extender.placement.fit import AskVerdict
from extender.placement.snapshot import MOST_BYTES, Rows, Snapshot


def more_wasted(verdict: AskVerdict, snap: Snapshot) -> Rows:
    """Return how many more bytes are stranded with the pod, (nodes,); negative if fewer.

    The pod is assumed to get the fullest of its candidates, on which it must fit in any case.
    """
    could, columns = verdict.all_candidates, snap.columns
    if verdict.ask.count > 1 or not could.size:
        return np.zeros(len(could), np.int64)
    # With few nodes the number of numpy calls dominates the cost.
    room, level = columns.headroom_bytes, columns.replicas - columns.replicas_free
    given = np.arange(len(could)), np.where(could, room, MOST_BYTES).argmin(axis=1)
    here = level[given]
    alike = columns.resource == columns.resource[given][:, None]
    alike[given] = False
    #: Other devices at the level that the device leaves, and at the level that it reaches.
    others = alike & (level == np.array([here, here + 1])[:, :, None])
    before = room[given]
    own = np.array([before, before - verdict.all_need_bytes[given]])
    least = np.where(others, room, MOST_BYTES).min(axis=2)
    # Limited, because products of absurd values would overflow.
    apart = np.maximum(np.minimum(own - least, MAX_DEVICE_BYTES), -MAX_DEVICE_BYTES)
    left, joined = np.where(apart >= 0, apart, -apart * others.sum(axis=2))
    known = could[given] & (columns.replicas[given] > 1) & ~verdict.all_ours
    change: Rows = (joined - left) * known
    return change
