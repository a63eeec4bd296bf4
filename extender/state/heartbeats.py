"""Whether a node's agent is alive, by the receiver's clock.

Something must have *moved* lately: the report's ``observedAt``, or the ``sampledAt`` of a Lease
that vouches for that very report. What they say is compared with our own time only once, at first
sight, so that a report that was old when we started is not taken for news; after that a wrong clock
on the node harms nobody, nor does one that jumps.
"""

from dataclasses import dataclass
from datetime import UTC, datetime

from contract.gpunode import GPUNode
from contract.heartbeat import Vouch

NEVER_S = float("-inf")


@dataclass(slots=True)
class Heartbeat:
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


_SILENT = Heartbeat()


class Signs:
    """What was heard of each node's agent: by its report, and by a Lease while that vouches for the
    very report that is held."""

    def __init__(self, stale_after_s: float) -> None:
        self._stale_after_s = stale_after_s
        self._reports: dict[str, Heartbeat] = {}
        self._leases: dict[str, Heartbeat] = {}
        #: Node -> what the Lease of its agent vouches for.
        self._vouches: dict[str, Vouch] = {}
        #: Nodes whose report was stale and is not any more.
        self.woke_up: set[str] = set()

    def leased(self) -> set[str]:
        """The nodes whose agent has a Lease that vouches for anything."""
        return set(self._leases)

    def see_report(self, gpunode: GPUNode, at_s: float, epoch_s: float) -> None:
        """``gpunode`` is held from now on."""
        stamp = gpunode.status.observed_at if gpunode.status else ""
        self._beat(self._reports, gpunode.name, gpunode, stamp, at_s, epoch_s)

    def see_lease(
        self, name: str, vouch: Vouch, gpunode: GPUNode | None, at_s: float, epoch_s: float
    ) -> None:
        self._vouches[name] = vouch
        self._beat(self._leases, name, gpunode, vouch.sampled_at, at_s, epoch_s)

    def lose_report(self, name: str) -> None:
        self._reports.pop(name, None)

    def lose_lease(self, name: str) -> None:
        self._leases.pop(name, None)
        self._vouches.pop(name, None)

    def confirmation(self, name: str, gpunode: GPUNode | None) -> Vouch | None:
        """What the Lease says of this very report; None where it says nothing of it, or speaks of
        another."""
        vouch = self._vouches.get(name)
        if vouch is None or gpunode is None or gpunode.status is None:
            return None
        same = gpunode.metadata.uid, gpunode.status.observed_at
        return vouch if (vouch.gpunode, vouch.observed_at) == same else None

    def fresh_until_s(self, name: str, gpunode: GPUNode | None) -> float:
        """On the receiver's clock; -inf for never."""
        report, lease = self._reports.get(name, _SILENT), self._leases.get(name, _SILENT)
        if self.confirmation(name, gpunode) is None:
            lease = _SILENT
        return max(report.moved_at_s, lease.moved_at_s) + self._stale_after_s

    def _beat(
        self,
        pulses: dict[str, Heartbeat],
        name: str,
        gpunode: GPUNode | None,
        stamp: str,
        at_s: float,
        epoch_s: float,
    ) -> None:
        pulse = pulses.setdefault(name, Heartbeat())
        if self.fresh_until_s(name, gpunode) < at_s:
            self.woke_up.add(name)
        pulse.beat(stamp, at_s, epoch_s, self._stale_after_s)


def age(stamp: str, wall_s: float) -> float | None:
    """Seconds from an RFC 3339 stamp to ``wall_s``; None when it is no such stamp."""
    try:
        then = datetime.fromisoformat(stamp)
    except ValueError:
        return None
    if then.tzinfo is None:
        then = then.replace(tzinfo=UTC)
    return wall_s - then.timestamp()
