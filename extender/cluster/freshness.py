"""Whether a node's agent is alive, by the receiver's clock.

Something must have *moved* lately: the report's ``observedAt``, or the ``sampledAt`` of a Lease
that vouches for that very report. What they say is compared with our own time only once, at first
sight, so that a report that was old when we started is not taken for news; after that a wrong clock
on the node harms nobody, nor does one that jumps.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

NEVER_S = float("-inf")


@dataclass(slots=True)
class Pulse:
    """The last sign of life of one source on one node."""

    stamp: str = ""
    moved_at_s: float = NEVER_S

    def beat(self, stamp: str, at_s: float, epoch_s: float, recent_s: float) -> None:
        """Note a stamp seen at ``at_s``, seconds of a monotonic clock that was 0 at ``epoch_s``.

        A stamp that differs from the last one has moved. A first one counts from when it says,
        and only if that is less than ``recent_s`` away.
        """
        if not stamp or stamp == self.stamp:
            return
        if self.stamp:
            self.moved_at_s = at_s
        else:
            age_s = age(stamp, epoch_s + at_s)
            if age_s is not None and abs(age_s) < recent_s:
                self.moved_at_s = at_s - max(0.0, age_s)
        self.stamp = stamp


def age(stamp: str, wall_s: float) -> float | None:
    """Seconds from an RFC 3339 stamp to ``wall_s``; None when it is no such stamp."""
    try:
        then = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return wall_s - then.timestamp()
