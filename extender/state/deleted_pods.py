"""What is known of pods that are gone: how they went, and since when.

A pod whose end was seen, or that never sat on the node, needs its promise no longer. Of every
other one it is only known that it is *gone*: deleted by force, or while nobody looked. Its
containers may run on. Then a *mark* is kept: a version of the Lease of the node's agent, read from
the store when the pod was gone already. An agent says with each heartbeat which version of its
Lease it knew before it took the sample that the heartbeat is about. If that is a later one than the
mark, then

    pod gone < mark read < later version written < agent told of it < sample taken

in this order, whatever any clock shows, however late a watch is, and however long a request was on
its way. Such a sample, if it does not show the pod, is the proof that the pod has left.

A node without an agent has no samples. There a kubelet that the cluster can reach ends the
containers of a pod that is gone: after ``KUBELET_ENDS_S`` they count as ended (ADR 30).
"""

from collections.abc import Collection
from dataclasses import dataclass

from contract.kube import Node, Pod
from extender.bounded import Bounded

#: Of the pods that went last; forgetting one only means that its promise waits for a sample.
REMEMBERED = 10_000
#: A kubelet is told within a second that a pod is gone, and kills its containers after their
#: grace period, which is 30 s by default and none for a pod that was deleted by force. One that
#: does not run is found unreachable within 50 s.
KUBELET_ENDS_S = 120.0
#: Put on a Node whose kubelet is not heard of.
UNREACHABLE = frozenset({"node.kubernetes.io/unreachable", "node.kubernetes.io/not-ready"})
#: Digits of 2**64 - 1.
_LONGEST_VERSION = 20


@dataclass(frozen=True, slots=True)
class DeletedPod:
    """The last that was seen of a pod: where it sat ("" on no node), and whether it had ended."""

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
        #: (node without an agent, pod uid) -> since when the pod is known to be gone.
        self._gone_since_s: dict[tuple[str, str], float] = {}

    def note(self, pod: Pod, ended: bool = False, last: bool = True) -> None:
        """A pod went; ``last``: this is its last version. An earlier one does not tell where a pod
        sat that was not bound yet."""
        if not last and not pod.node:
            return
        self._seen[pod.metadata.uid] = DeletedPod(pod.node, ended or pod.ended)

    def seen(self, uid: str) -> DeletedPod | None:
        return self._seen.get(uid)

    def mark(self, node: str, uid: str, lease_version: str, at_s: float = 0.0) -> None:
        """The first mark stays: later ones are only later. Without a version, ``at_s`` is when the
        pod was gone."""
        number = _number(lease_version)
        if number is not None:
            self._marks.setdefault((node, uid), number)
        elif not lease_version:
            self._gone_since_s.setdefault((node, uid), at_s)

    def restart(self, node: str) -> None:
        """The kubelet was not reachable: what it has ended is counted from now on."""
        for key in [key for key in self._gone_since_s if key[0] == node]:
            del self._gone_since_s[key]

    def ended_by_kubelet(self, node: str, uid: str, now_s: float) -> bool:
        """Whether the kubelet of a node without an agent has had the time to end the pod."""
        since_s = self._gone_since_s.get((node, uid))
        return since_s is not None and now_s - since_s > KUBELET_ENDS_S

    def marked(self, node: str, uid: str) -> bool:
        return (node, uid) in self._marks

    def precede(self, node: str, uid: str, after: str) -> bool:
        """Whether a sample was taken when the pod was gone, of an agent that knew this version."""
        mark, number = self._marks.get((node, uid)), _number(after)
        return mark is not None and number is not None and number > mark

    def keep(self, node: str, uids: Collection[str]) -> None:
        """Forget the marks of this node but for these pods."""
        marks: dict[tuple[str, str], int] | dict[tuple[str, str], float]
        for marks in (self._marks, self._gone_since_s):
            for key in [k for k in marks if k[0] == node and k[1] not in uids]:
                del marks[key]


def is_unreachable(node: Node | None) -> bool:
    """Whether the cluster has not heard of the node's kubelet lately."""
    taints = (node.spec.taints if node and node.spec else None) or ()
    return any(taint.key in UNREACHABLE for taint in taints)


def _number(version: str) -> int | None:
    """resourceVersions of one object are ordered as numbers; what is no number is not compared, nor
    what an agent made up that is longer than any."""
    short = len(version) <= _LONGEST_VERSION
    return int(version) if short and version.isascii() and version.isdigit() else None
