"""Measures how long pods have not used the SMs of the devices that they hold. Pure.

A pod is idle on a device while the device's SM activity is zero, or, if the source measures
processes, while none of the pod's processes has SM time. Values below ``IDLE_BELOW_RATIO`` count as
zero, because counters are not exact. The sources measure the whole time between two samples, so
they miss no activity. If other pods keep the device busy and the source does not measure processes,
no pod counts as idle.

Times are seconds since boot, as in ``agent.peaks``.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from agent.probes.readings import ActivityReading
from headroom.contract.gpunode import PodUse

#: Activity below this ratio counts as zero. It is shown as 0 %.
IDLE_BELOW_RATIO = 0.005
#: Shorter idle times are not reported, so that the report does not change whenever a pod pauses.
REPORTED_AFTER_S = 300.0
#: If the SM activity is unknown for longer than this number of seconds, the idle time starts again.
MOST_GAP_S = 60.0
MAX_IDLE = 4096


class Idle(msgspec.Struct):
    """A pod that is idle on a device."""

    uid: str
    device: str
    since_s: float
    #: Since when the pod has been idle (RFC 3339).
    since_at: str
    #: When the pod was last known to be idle.
    known_s: float


@dataclass(frozen=True, slots=True)
class OfPods:
    """The measurements of pods in one sample, apart from their memory."""

    #: High-water mark of a container's memory in bytes, by (container id, device).
    marks: Mapping[tuple[str, str], int]
    #: SM activity by device.
    activity: Mapping[str, ActivityReading]
    #: Share of SM time by (pod uid, device). Pods whose processes used no SM time are absent.
    shares: Mapping[tuple[str, str], float]


class IdleTimes:
    """Measures the idle times on one node. ``before`` contains the idle times that an earlier agent
    on the node stored."""

    def __init__(self, before: Sequence[Idle], now_s: float) -> None:
        self._idle = {(e.uid, e.device): e for e in before[:MAX_IDLE] if e.known_s <= now_s}

    @property
    def idle(self) -> list[Idle]:
        """A copy of the data that the next agent needs."""
        return [msgspec.structs.replace(each) for each in self._idle.values()]

    def measure(
        self,
        uses: Iterable[PodUse],
        activity: Mapping[str, ActivityReading],
        shares: Mapping[tuple[str, str], float],
        now_s: float,
        now: datetime,
    ) -> list[PodUse]:
        """Add a sample, and return its rows with the time since when each pod has been idle.

        ``activity`` maps each device to its SM activity. ``shares`` contains the share of SM time
        by pod uid and device. Pods whose processes used no SM time are omitted. ``now_s`` is the
        time of the sample in seconds since boot, and ``now`` its time on the wall clock.
        """
        # A pod that is missing from the report for a moment stays idle.
        self._idle = {
            key: idle for key, idle in self._idle.items() if now_s - idle.known_s <= MOST_GAP_S
        }
        uses = list(uses)
        for key in dict.fromkeys((use.uid, use.device) for use in uses if use.uid):
            is_idle = _is_idle(activity.get(key[1]), shares.get(key, 0.0))
            if is_idle is False:
                self._idle.pop(key, None)
            elif is_idle and key in self._idle:
                self._idle[key].known_s = now_s
            elif is_idle and len(self._idle) < MAX_IDLE:
                since_at = now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
                self._idle[key] = Idle(*key, now_s, since_at, now_s)
        return [self._timed(use) for use in uses]

    def _timed(self, use: PodUse) -> PodUse:
        idle = self._idle.get((use.uid, use.device))
        if idle is None or idle.known_s - idle.since_s < REPORTED_AFTER_S:
            return use
        return msgspec.structs.replace(use, idle_since=idle.since_at)


def _is_idle(activity: ActivityReading | None, share: float) -> bool | None:
    """Return whether a pod is idle on a device, or None if the device's activity is not known."""
    if activity is None or activity.sm_ratio is None:
        return None
    if activity.sm_ratio < IDLE_BELOW_RATIO:
        return True
    return bool(activity.sm_by_pid) and share < IDLE_BELOW_RATIO
