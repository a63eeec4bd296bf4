"""How busy the SMs of a device are, as decisions take it, and who says so.

Two witnesses: DCGM's history, a high quantile over a window, which tells what a device is wont to
be; and the last sample of the node's agent. Only what measures SM activity counts: not device
utilisation, which one small kernel on one SM makes 100 %.
"""

from math import inf

import msgspec

from contract.gpunode import SM_SOURCES, Device

#: DCGM's SM_ACTIVE as Prometheus kept it.
HISTORY = "dcgm-history"


class Activity(msgspec.Struct, frozen=True, gc=False):
    """The SM activity of one device. There is one for each device of the fleet, so the collector
    is spared them: they refer to nothing that could refer to them."""

    #: 0..1
    ratio: float
    #: ``HISTORY``, or who measured it for the agent: one of ``SM_SOURCES``.
    source: str
    #: It is this quantile over so many seconds; None: one sample.
    quantile: float | None = None
    window_s: float | None = None
    #: Of the newest sample in it: seconds of our monotonic clock; or, where the agent took it, the
    #: time that the agent says, RFC 3339.
    sampled_at_s: float = -inf
    sampled_at: str = ""


def reported(device: Device, sampled_at: str) -> Activity | None:
    """What the agent says; None where it does not, or no sense, or measured something else."""
    sm = device.sm_activity
    if sm is None or sm.source not in SM_SOURCES or not 0 <= sm.ratio <= 1:
        return None
    return Activity(sm.ratio, sm.source, sampled_at=sampled_at)
