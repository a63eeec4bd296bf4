"""Decides when the reservation of a deleted pod can be removed.

A reservation is obsolete once the pod was seen to end, or if the pod never was on the node.
Otherwise the pod is only known to be deleted, for example by force, or while the watch was down.
Its containers may still run.

For such a pod a *mark* is kept: the resourceVersion that the agent's Lease had when the pod was
already found deleted. Each heartbeat of an agent names the version of its Lease that the agent knew
before it took the sample. If that version is later than the mark, the order of events is certain:

    pod deleted < mark read < later version written < agent received it < sample taken

It depends on no clock, and on no delay of a watch or a request. If this sample does not show the
pod, the pod's containers have ended.

A node without an agent has no samples. If the cluster can reach its kubelet, the containers of a
deleted pod count as ended after ``KUBELET_ENDS_S`` (ADR 30).
"""

from collections.abc import Collection
from dataclasses import dataclass

from contract.kube import Node, Pod
from extender.bounded import Bounded

#: Number of deleted pods whose last state is kept. If a pod is dropped from here, its reservation
#: only waits for a sample.
REMEMBERED = 10_000
#: A kubelet is notified of a deleted pod within a second. It kills the containers after their grace
#: period: 30 s by default, none for a pod that was deleted by force. If the kubelet does not run,
#: its node is tainted as unreachable within 50 s.
KUBELET_ENDS_S = 120.0
#: Taints of a Node whose kubelet sends no heartbeats.
UNREACHABLE = frozenset({"node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"})
#: Digits of 2**64 - 1.
_LONGEST_VERSION = 20


@dataclass(frozen=True, slots=True)
class DeletedPod:
    """The last state of a pod: its node ("" if it was not bound), and whether it had ended."""

    node: str
    ended: bool

    def settles(self, node: str) -> bool:
        """Whether none of its containers can run on this node."""
        return self.ended or self.node != node


class DeletedPods:
    def __init__(self) -> None:
        self._seen: Bounded[str, DeletedPod] = Bounded(REMEMBERED)
        #: (node, pod uid) -> version of the agent's Lease.
        self._marks: dict[tuple[str, str], int] = {}
        #: (node without an agent, pod uid) -> when the pod was found deleted.
        self._gone_since_s: dict[tuple[str, str], float] = {}

    def note(self, pod: Pod, ended: bool = False, last: bool = True) -> None:
        """Record a deleted pod. ``last``: this is its last version.

        An earlier version in which the pod is not bound is ignored: it may have been bound later.
        """
        if not last and not pod.node:
            return
        self._seen[pod.metadata.uid] = DeletedPod(pod.node, ended or pod.ended)

    def seen(self, uid: str) -> DeletedPod | None:
        return self._seen.get(uid)

    def mark(self, node: str, uid: str, lease_version: str, at_s: float = 0.0) -> None:
        """Set the mark of a deleted pod, unless it has one: the first one is the earliest proof.

        ``lease_version`` is empty if the node has no agent. Then ``at_s``, on the monotonic clock,
        is the time at which the pod was found deleted.
        """
        number = _number(lease_version)
        if number is not None:
            self._marks.setdefault((node, uid), number)
        elif not lease_version:
            self._gone_since_s.setdefault((node, uid), at_s)

    def restart(self, node: str) -> None:
        """Discard the times of a node whose kubelet was unreachable: the wait starts again."""
        for key in [key for key in self._gone_since_s if key[0] == node]:
            del self._gone_since_s[key]

    def ended_by_kubelet(self, node: str, uid: str, now_s: float) -> bool:
        """Whether the kubelet of a node without an agent has had enough time to end the pod."""
        since_s = self._gone_since_s.get((node, uid))
        return since_s is not None and now_s - since_s > KUBELET_ENDS_S

    def marked(self, node: str, uid: str) -> bool:
        return (node, uid) in self._marks

    def precede(self, node: str, uid: str, after: str) -> bool:
        """Whether the pod was deleted before the sample was taken.

        ``after``: the version of its Lease that the agent knew before it took the sample.
        """
        mark, number = self._marks.get((node, uid)), _number(after)
        return mark is not None and number is not None and number > mark

    def keep(self, node: str, uids: Collection[str]) -> None:
        """Drop the marks of this node, except for these pods."""
        marks: dict[tuple[str, str], int] | dict[tuple[str, str], float]
        for marks in (self._marks, self._gone_since_s):
            for key in [k for k in marks if k[0] == node and k[1] not in uids]:
                del marks[key]


def is_unreachable(node: Node | None) -> bool:
    """Whether the node is tainted because its kubelet sends no heartbeats."""
    taints = (node.spec.taints if node and node.spec else None) or ()
    return any(taint.key in UNREACHABLE for taint in taints)


def _number(version: str) -> int | None:
    """Return a resourceVersion as a number; None if it is not one.

    The versions of one object are ordered as numbers. A text that is longer than any version was
    made up by an agent, and gives None.
    """
    short = len(version) <= _LONGEST_VERSION
    return int(version) if short and version.isascii() and version.isdigit() else None
