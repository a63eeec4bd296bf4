"""Decides, by the receiver's clock, whether the report of a node's agent is stale.

A heartbeat is a change of a timestamp, which is the report's ``observedAt`` or the ``sampledAt`` of
a Lease that confirms this report. Only the first timestamp of each source is compared with the
receiver's clock, so that a report that was already old when this process started does not count as
fresh. After that, a wrong clock on the node has no effect.
"""

from dataclasses import dataclass

from headroom.contract.gpunode import GPUNode
from headroom.contract.heartbeat import Confirmation
from headroom.contract.timestamps import age
from headroom.core.tracker import Tracker, WeighedNode

NEVER_S = float("-inf")


@dataclass(slots=True)
class Heartbeat:
    """The last timestamp of one source on one node, and when it changed."""

    stamp: str = ""
    moved_at_s: float = NEVER_S

    def beat(self, stamp: str, at_s: float, epoch_s: float, recent_s: float) -> None:
        """Process a timestamp received at ``at_s``, in seconds of a monotonic clock.

        ``epoch_s`` is the Unix time at which this clock was 0. A timestamp that differs from the
        last one is a heartbeat at ``at_s``. The first timestamp counts as a heartbeat at its own
        time, but only if this time is less than ``recent_s`` seconds from ``at_s``.
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


_NONE = Heartbeat()


class Heartbeats(Tracker):
    """The heartbeats of each node's agent, taken from its report and from a Lease that confirms the
    report."""

    def __init__(self, stale_after_s: float, epoch_s: float) -> None:
        self.stale_after_s = stale_after_s
        #: The Unix time, in seconds, at which the monotonic clock was 0.
        self.epoch_s = epoch_s
        self._reports: dict[str, Heartbeat] = {}
        self._leases: dict[str, Heartbeat] = {}
        #: The confirmation in the Lease of each node's agent.
        self._vouches: dict[str, Confirmation] = {}
        #: Nodes whose report was stale and is fresh again.
        self.revived: set[str] = set()

    def leased(self) -> set[str]:
        """Return the nodes whose agent has a Lease that confirms a report."""
        return set(self._leases)

    def gpunode_seen(self, gpunode: GPUNode, at_s: float) -> None:
        stamp = gpunode.status.observed_at if gpunode.status else ""
        self._beat(self._reports, gpunode.name, gpunode, stamp, at_s)

    def gpunode_gone(self, name: str) -> None:
        self._reports.pop(name, None)

    def node_weighed(self, node: WeighedNode) -> None:
        self.revived.discard(node.name)

    def lease_seen(
        self, name: str, confirmation: Confirmation, gpunode: GPUNode | None, at_s: float
    ) -> None:
        self._vouches[name] = confirmation
        self._beat(self._leases, name, gpunode, confirmation.sampled_at, at_s)

    def lease_gone(self, name: str) -> None:
        self._leases.pop(name, None)
        self._vouches.pop(name, None)

    def confirmation(self, name: str, gpunode: GPUNode | None) -> Confirmation | None:
        """Return the Lease's confirmation of this report, or None if it does not confirm this
        report."""
        vouch = self._vouches.get(name)
        if vouch is None or gpunode is None or gpunode.status is None:
            return None
        same = gpunode.metadata.uid, gpunode.status.observed_at
        return vouch if (vouch.gpunode, vouch.observed_at) == same else None

    def fresh_until_s(self, name: str, gpunode: GPUNode | None) -> float:
        """Return when the report becomes stale, on the receiver's clock, or -inf if there is
        none."""
        report, lease = self._reports.get(name, _NONE), self._leases.get(name, _NONE)
        if self.confirmation(name, gpunode) is None:
            lease = _NONE
        return max(report.moved_at_s, lease.moved_at_s) + self.stale_after_s

    def _beat(
        self,
        heartbeats: dict[str, Heartbeat],
        name: str,
        gpunode: GPUNode | None,
        stamp: str,
        at_s: float,
    ) -> None:
        heartbeat = heartbeats.setdefault(name, Heartbeat())
        if self.fresh_until_s(name, gpunode) < at_s:
            self.revived.add(name)
        heartbeat.beat(stamp, at_s, self.epoch_s, self.stale_after_s)
