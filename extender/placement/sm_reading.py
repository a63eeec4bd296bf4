"""The SM activity of a device as decisions use it, and its source.

There are two sources. DCGM's history gives a high quantile over a window, which shows the usual
load. The node's agent gives its last sample. Device utilisation is not SM activity: one small
kernel on one SM makes it 100 %.
"""

from math import inf

import msgspec

from contract.gpunode import SM_SOURCES, Device

#: Source: DCGM's SM_ACTIVE from Prometheus.
HISTORY = "dcgm-history"


class Activity(msgspec.Struct, frozen=True, gc=False):
    """The SM activity of one device.

    The garbage collector does not track these objects: every device of the cluster has one, and
    they cannot be part of a cycle.
    """

    #: 0..1
    ratio: float
    #: ``HISTORY``, or the agent's source: one of ``SM_SOURCES``.
    source: str
    #: The quantile and its window in seconds; None for a single sample.
    quantile: float | None = None
    window_s: float | None = None
    #: Time of the newest sample: seconds of the extender's monotonic clock, or RFC 3339 from the
    #: agent.
    sampled_at_s: float = -inf
    sampled_at: str = ""


def reported(device: Device, sampled_at: str) -> Activity | None:
    """Return the agent's sample; None if it is absent, out of range or not SM activity."""
    sm = device.sm_activity
    if sm is None or sm.source not in SM_SOURCES or not 0 <= sm.ratio <= 1:
        return None
    return Activity(sm.ratio, sm.source, sampled_at=sampled_at)
