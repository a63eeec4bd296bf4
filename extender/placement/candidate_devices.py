"""Candidate devices: the devices that the plugin could give to a pod, for all nodes at once.

The kubelet and the plugin choose by replicas only, regardless of memory and of the health that
Headroom sees. ``placement.device_plugin_model`` computes what they can choose when a node changes.
This module reads the result.
"""

import numpy as np
from numpy.typing import NDArray

from extender.placement.snapshot import Snapshot

Mask = NDArray[np.bool_]


def slots_of(resource: str, snap: Snapshot) -> Mask:
    """Return the mask (nodes, slots) of devices that are advertised as ``resource``."""
    index = snap.resources.get(resource)
    advertised = snap.columns.resource
    return np.zeros(advertised.shape, bool) if index is None else advertised == index


def candidates(slots: Mask, count: int, snap: Snapshot) -> Mask:
    """Return the mask (nodes, slots) of devices that the next ``count`` replicas could be on.

    ``slots`` are the devices of the requested resource.
    """
    chosen: Mask = slots & (snap.columns.reach <= count)
    return chosen
