"""Decides which DRA devices to taint, with hysteresis, so that taints do not flap.

A device is tainted immediately when its excess reaches ``TAINTED_FROM_BYTES``. The taint ends when
the excess has been below ``CLEARED_BELOW_BYTES`` for some time. This time doubles if the device is
tainted again soon after.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headroom.bounded_dict import Bounded
from headroom.core.cluster.claimed_devices import DraDevice

#: Minimum excess for a taint. The CUDA context of a process is smaller.
TAINTED_FROM_BYTES = 512 << 20
CLEARED_BELOW_BYTES = 256 << 20
#: How long the excess must be below the lower limit before a taint ends, in seconds: the initial
#: and the maximum value.
FIRST_HOLD_S, LONGEST_HOLD_S = 3.0, 300.0
#: After this number of seconds without a taint, the next taint of a device counts as its first.
FORGOTTEN_AFTER_S = 600.0
#: Seconds without a report after which a taint ends, because a taint needs evidence.
UNKNOWN_AFTER_S = 600.0
#: Maximum number of taints. If more devices exceed their claims, the measurement is probably wrong.
MAX_TAINTS = 100
#: Number of devices that are remembered after their taint ended.
MAX_FORMER = 1_000


@dataclass(slots=True)
class _Taint:
    hold_s: float
    #: Time since which the excess has been below the lower limit, or None if it is not below it.
    low_since_s: float | None = None
    #: Time at which the excess was last known.
    known_at_s: float = 0.0


class TaintDecisions:
    """The devices to taint. Times are seconds of the monotonic clock."""

    def __init__(self) -> None:
        self._taints: dict[DraDevice, _Taint] = {}
        #: When the last taint of each device ended, and for how long the excess had to stay low.
        self._former: Bounded[DraDevice, tuple[float, float]] = Bounded(MAX_FORMER)
        #: Number of devices that the last decision left untainted because of ``MAX_TAINTS``.
        self.untainted = 0

    def adopt(self, devices: Iterable[DraDevice], now_s: float) -> None:
        """Continue the taints that already exist in the cluster."""
        for device in devices:
            self._taints.setdefault(device, _Taint(FIRST_HOLD_S, known_at_s=now_s))

    def decide(
        self,
        excess_bytes: Mapping[DraDevice, int],
        exists: Callable[[DraDevice], bool],
        is_known: Callable[[DraDevice], bool],
        now_s: float,
    ) -> set[DraDevice]:
        """Return the devices to taint now.

        ``excess_bytes`` maps devices to their excess. ``exists`` returns whether a slice offers the
        device and its node reports it. ``is_known`` returns whether the report is fresh and can
        attribute processes.
        """
        for device, taint in list(self._taints.items()):
            if not exists(device):
                del self._taints[device]
            elif self._is_over(taint, is_known(device), excess_bytes.get(device, 0), now_s):
                del self._taints[device]
                self._former[device] = now_s, taint.hold_s
        wanted = [
            device
            for device, count in excess_bytes.items()
            if count >= TAINTED_FROM_BYTES and device not in self._taints and is_known(device)
        ]
        wanted.sort(key=lambda each: (-excess_bytes[each], each.pool, each.name))
        room = max(0, MAX_TAINTS - len(self._taints))
        self.untainted = len(wanted[room:])
        for device in wanted[:room]:
            self._taints[device] = _Taint(self._hold_s(device, now_s), known_at_s=now_s)
        return set(self._taints)

    def _is_over(self, taint: _Taint, known: bool, excess_bytes: int, now_s: float) -> bool:
        if not known:
            taint.low_since_s = None
            return now_s - taint.known_at_s > UNKNOWN_AFTER_S
        taint.known_at_s = now_s
        if excess_bytes >= CLEARED_BELOW_BYTES:
            taint.low_since_s = None
            return False
        if taint.low_since_s is None:
            taint.low_since_s = now_s
        return now_s - taint.low_since_s >= taint.hold_s

    def _hold_s(self, device: DraDevice, now_s: float) -> float:
        ended_s, hold_s = self._former.pop(device, (0.0, 0.0))
        if hold_s and now_s - ended_s <= FORGOTTEN_AFTER_S:
            return min(LONGEST_HOLD_S, 2 * hold_s)
        return FIRST_HOLD_S
