"""Assumed binds: pods that kube-scheduler is about to bind, whose memory filter keeps free.

kube-scheduler filters the next pod some milliseconds before it asks the extender to bind the last
one. If filter offered the same memory to both, the extender would have to decline that bind, and
its pod would back off for seconds.

kube-scheduler with the Coscheduling plugin binds the pods of a group together, after it has chosen
a node for each of them. So their binds are assumed for longer.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from contract.kube import Pod
from extender.bounded import Bounded
from extender.placement.request import VramRequest

#: Seconds after which a bind is no longer expected.
BIND_FOLLOWS_WITHIN_S = 0.25
#: Maximum number of assumed binds; the oldest is dropped. Each can cost filter a millisecond.
BINDS_EXPECTED = 2
#: Label with the name of a pod's group.
POD_GROUP = "scheduling.x-k8s.io/pod-group"
#: The same for pods of a group. If the last pod of a group comes later, the memory of the first may
#: be gone. A longer time would let groups that are never complete keep memory from other pods.
GROUP_FOLLOWS_WITHIN_S = 5.0
#: Maximum number of assumed binds of pods of groups.
GROUPED_EXPECTED = 64
#: Seconds after filter rejected a pod of a group for which its binds are not assumed for longer.
GROUP_REJECTED_S = 5.0
#: Maximum number of such groups.
GROUPS_REJECTED = 256


@dataclass(frozen=True, slots=True)
class ExpectedBind:
    pod: Pod
    request: VramRequest
    node: str
    until_s: float


class AssumedBinds:
    """The latest pods for which kube-scheduler has chosen a node but not called bind yet."""

    def __init__(self) -> None:
        #: By uid, the latest last: single pods, and pods of groups.
        self._expected: Bounded[str, ExpectedBind] = Bounded(BINDS_EXPECTED)
        self._grouped: Bounded[str, ExpectedBind] = Bounded(GROUPED_EXPECTED)
        #: (namespace, group) -> until when its binds are not assumed for longer.
        self._rejected_until_s: Bounded[tuple[str, str], float] = Bounded(GROUPS_REJECTED)

    def expect(self, pod: Pod, request: VramRequest, node: str, now_s: float) -> None:
        """Expect a bind call for the pod and the node within ``BIND_FOLLOWS_WITHIN_S``, or
        ``GROUP_FOLLOWS_WITHIN_S`` if the pod belongs to a group.

        kube-scheduler does not make the call if it fails, or if a user's preference for another
        node outweighs the extender's score.
        """
        group = group_of(pod)
        grouped = group is not None and self._rejected_until_s.get(group, now_s) <= now_s
        expected = self._grouped if grouped else self._expected
        until_s = now_s + (GROUP_FOLLOWS_WITHIN_S if grouped else BIND_FOLLOWS_WITHIN_S)
        expected[pod.metadata.uid] = ExpectedBind(pod, request, node, until_s)

    def group_rejected(self, pod: Pod, now_s: float) -> None:
        """Drop the assumed binds of the pod's group, because filter rejected the pod.

        The plugin then rejects the pods of the group that wait for this one.
        """
        if (group := group_of(pod)) is None:
            return
        self._rejected_until_s[group] = now_s + GROUP_REJECTED_S
        for uid, each in list(self._grouped.items()):
            if group_of(each.pod) == group:
                del self._grouped[uid]

    def drop(self, uid: str) -> None:
        """Drop the assumed bind of the pod: kube-scheduler has called bind, or filters again."""
        self._expected.pop(uid, None)
        self._grouped.pop(uid, None)

    def current(self, now_s: float) -> Iterator[ExpectedBind]:
        """Yield the assumed binds whose time is not over. May be called from any thread."""
        for each in [*self._expected.values(), *self._grouped.values()]:
            if each.until_s >= now_s:
                yield each


def group_of(pod: Pod) -> tuple[str, str] | None:
    """Return the namespace and the name of the pod's group; None if it has none."""
    name = (pod.metadata.labels or {}).get(POD_GROUP)
    return (pod.metadata.namespace, name) if name else None
