"""Decides when the reservation of a deleted pod can be removed.

A reservation is obsolete if the pod was seen to end, or if the pod was never on the node. If it is
only known that the pod was deleted, for example by force or while the watch was down, its
containers may still run.

For such a pod a *mark* is kept, which is the resourceVersion of the agent's Lease, read after the
pod was found deleted. Each heartbeat of an agent names the version of its Lease that the agent had
before it took the sample. If this version is later than the mark, the order of events is certain:

    pod deleted < mark read < later version written < agent received it < sample taken

This order depends neither on clocks nor on the delay of a watch or a request. So if this sample
does not show the pod, the pod's containers have ended.

A node without an agent has no samples. If the cluster can reach its kubelet, the containers of a
deleted pod count as ended after ``KUBELET_ENDS_S`` (ADR 30).
"""

from collections.abc import Collection

from headroom.bounded_dict import Bounded
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Node
from headroom.core.tracker import LastSeen, Tracker

#: Number of deleted pods whose last state is kept. The reservation of a pod whose state was dropped
#: is removed only after a sample.
REMEMBERED = 10_000
#: A kubelet is notified of a deleted pod within a second. It kills the containers after their grace
#: period, which is 30 s by default and 0 for a pod that was deleted by force. If the kubelet does
#: not run, its node is tainted as unreachable within 50 s.
KUBELET_ENDS_S = 120.0
#: Taints of a Node whose kubelet sends no heartbeats.
UNREACHABLE = frozenset({"node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"})
#: Digits of 2**64 - 1.
_LONGEST_VERSION = 20


class DeletedPods(Tracker):
    """The last states of deleted pods, and the marks."""

    def __init__(self) -> None:
        self._seen: Bounded[str, LastSeen] = Bounded(REMEMBERED)
        #: Version of the agent's Lease by (node, pod uid).
        self._marks: dict[tuple[str, str], int] = {}
        #: When a pod on a node without an agent was found deleted, by (node, pod uid).
        self._gone_since_s: dict[tuple[str, str], float] = {}

    def pod_gone(self, uid: str, last: LastSeen | None) -> None:
        if last is not None:
            self._seen[uid] = last

    def node_seen(self, node: Node, before: Node | None) -> None:
        """Discard the times of a node whose kubelet was unreachable, so that the wait starts
        again."""
        if is_unreachable(node) or is_unreachable(before):
            name = node.metadata.name
            for key in [key for key in self._gone_since_s if key[0] == name]:
                del self._gone_since_s[key]

    def gpunode_seen(self, gpunode: GPUNode, at_s: float) -> None:
        self._keep(gpunode.name, gpunode.spec.reservations)

    def gpunode_gone(self, name: str) -> None:
        self._keep(name, ())

    def seen(self, uid: str) -> LastSeen | None:
        return self._seen.get(uid)

    def mark(self, node: str, uid: str, lease_version: str, at_s: float = 0.0) -> None:
        """Set the mark of a deleted pod, unless it already has a mark, because the first mark is
        the earliest proof.

        ``lease_version`` is empty if the node has no agent. In this case ``at_s`` is the time on
        the monotonic clock at which the pod was found deleted.
        """
        number = _number(lease_version)
        if number is not None:
            self._marks.setdefault((node, uid), number)
        elif not lease_version:
            self._gone_since_s.setdefault((node, uid), at_s)

    def ended_by_kubelet(self, node: str, uid: str, now_s: float) -> bool:
        """Return whether the kubelet of a node without an agent has had enough time to end the
        pod."""
        since_s = self._gone_since_s.get((node, uid))
        return since_s is not None and now_s - since_s > KUBELET_ENDS_S

    def marked(self, node: str, uid: str) -> bool:
        return (node, uid) in self._marks

    def precede(self, node: str, uid: str, after: str) -> bool:
        """Return whether the pod was deleted before the sample was taken.

        ``after`` is the version of its Lease that the agent had before it took the sample.
        """
        mark, number = self._marks.get((node, uid)), _number(after)
        return mark is not None and number is not None and number > mark

    def _keep(self, node: str, uids: Collection[str]) -> None:
        """Drop all marks of this node except the marks of these pods."""
        marks: dict[tuple[str, str], int] | dict[tuple[str, str], float]
        for marks in (self._marks, self._gone_since_s):
            for key in [k for k in marks if k[0] == node and k[1] not in uids]:
                del marks[key]


def is_unreachable(node: Node | None) -> bool:
    """Return whether the node is tainted because its kubelet sends no heartbeats."""
    taints = (node.spec.taints if node and node.spec else None) or ()
    return any(taint.key in UNREACHABLE for taint in taints)


def _number(version: str) -> int | None:
    """Return a resourceVersion as a number, or None if it is not a number.

    The versions of one object are ordered as numbers. A text that is longer than any version must
    come from a misbehaving agent, so the result is None.
    """
    short = len(version) <= _LONGEST_VERSION
    return int(version) if short and version.isascii() and version.isdigit() else None
