"""Holds nodes for nominated pods while their victims leave, until the pods are bound there.

Memory becomes free between the eviction and the bind, and any other pod could take it. So for every
pod that does not outrank them, filter counts the *nominees* of a node as if they were being bound
to it. All replicas do so, because they read the nomination from the pod: from
``status.nominatedNodeName`` if kube-scheduler preempted, and from the annotation
``headroom.gpu/preempting`` if Headroom did.

kube-scheduler clears its nomination if it retries the pod before the memory is free and finds no
other victim. In this case the node is held a while longer. kube-scheduler also nominates pods that
preempt no other pod, while they wait for the rest of their group or for volumes. If it clears such
a nomination, the node is no longer held. A hold lasts while a pod is leaving the node and
``hold_s`` seconds longer, but at most ``LONGEST_S``, because a nominee that is never bound must not
block the node forever. The hold ends immediately when the nominee is bound, deleted, or nominated
elsewhere.

``cluster.holds`` combines these holds with the other reasons for which memory is held.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from headroom.contract.kube import Pod
from headroom.contract.preemption import attempt_of
from headroom.core.tracker import LastSeen, Tracker

#: Seconds for which a hold lasts after kube-scheduler has cleared the nomination.
CLEARED_S = 15.0
#: Maximum number of seconds from preempt's response until kube-scheduler has written the
#: nomination.
EXPECTED_S = 5.0
#: Maximum duration of a hold in seconds, even if pods keep leaving the node, because they may leave
#: for other reasons.
LONGEST_S = 1800.0


@dataclass(slots=True)
class _Hold:
    pod: Pod
    node: str
    #: The hold lasts for ``for_s`` seconds after ``since_s``, which is the last time on the
    #: receiver's clock at which a pod was leaving the node.
    for_s: float
    since_s: float | None = None
    #: The id of Headroom's preemption attempt. Empty if kube-scheduler nominated the pod.
    by: str = ""
    #: Whether the nomination is expected but not yet seen on the pod.
    expected: bool = False
    #: Whether a pod is leaving the node, or has left it, since the nomination.
    preempts: bool = False
    #: When the hold was first counted.
    began_s: float | None = None


class Nominations(Tracker):
    """Tracks which node is held for which pod.

    ``hold_s`` is the number of seconds for which a node is held after the last pod has left it.
    ``ours`` states whether annotations with Headroom's nominations count. If Headroom does not
    preempt, they do not count, because only users can have written them. ``is_left`` returns
    whether a pod is leaving the node. Any thread may call the readers.
    """

    def __init__(self, hold_s: float, ours: bool, is_left: Callable[[str], bool]) -> None:
        self._hold_s = hold_s
        self._ours = ours
        self._is_left = is_left
        self._holds: dict[str, _Hold] = {}

    def pod_seen(self, pod: Pod, managed: bool) -> None:
        if pod.node or pod.ended:
            self._holds.pop(pod.metadata.uid, None)
        elif managed:
            self._update(pod)

    def pod_gone(self, uid: str, last: LastSeen | None) -> None:
        self._holds.pop(uid, None)
        for hold in list(self._holds.values()):
            hold.preempts = hold.preempts or (last is not None and last.node == hold.node)

    def give_up(self, uid: str) -> None:
        """End the hold of a pod that is not bound with its group, unless it preempts other pods."""
        hold = self._holds.get(uid)
        if hold is not None and not (hold.preempts or self._is_left(hold.node)):
            self._holds.pop(uid, None)

    def _update(self, pod: Pod) -> None:
        """Update the hold of an unbound pod."""
        uid, (node, by) = pod.metadata.uid, self._nomination(pod)
        hold = self._holds.get(uid)
        if node and (hold is None or hold.node != node or (by and hold.by != by)):
            self._holds[uid] = _Hold(pod, node, self._hold_s, by=by, preempts=bool(by))
        elif hold is not None:
            hold.pod = pod
            hold.expected = hold.expected and not node
            if node and hold.for_s != self._hold_s:
                hold.for_s, hold.since_s = self._hold_s, None
            elif not node:
                self.give_up(uid)
            if not node and hold.for_s == self._hold_s:
                hold.for_s, hold.since_s = min(CLEARED_S, self._hold_s), None

    def expect(self, pod: Pod, node: str, now_s: float) -> None:
        """Hold the node for a pod that kube-scheduler is about to nominate after Headroom's
        response.

        Pods that leave the node later do not extend this hold. If the nomination never appears, the
        pod may be gone, and no other event would end the hold.
        """
        hold = self._holds.get(pod.metadata.uid)
        if hold is None or hold.node != node:
            expected = _Hold(pod, node, EXPECTED_S, now_s, expected=True, preempts=True)
            self._holds[pod.metadata.uid] = expected

    def _nomination(self, pod: Pod) -> tuple[str, str]:
        """Return the node nominated for an unbound pod, and the id of Headroom's attempt.

        Both are empty if there is no nomination.
        """
        by_scheduler = pod.status.nominated_node_name if pod.status else None
        if by_scheduler:
            return by_scheduler, ""
        attempt = attempt_of(pod) if self._ours else None
        return (attempt.node, attempt.id) if attempt else ("", "")

    def node_of(self, uid: str) -> str:
        """Return the node that was last held for the pod, or an empty string if there was none."""
        hold = self._holds.get(uid)
        return hold.node if hold else ""

    def current(self, now_s: float) -> Iterator[tuple[Pod, str]]:
        """Yield each nominee and its node while the node is held.

        The duration of a hold is counted from the first call.
        """
        for uid, hold in list(self._holds.items()):
            if hold.began_s is None:
                hold.began_s = now_s
            hold.since_s = self._left_at_s(hold, now_s)
            if self._is_held(hold, now_s):
                yield hold.pod, hold.node
            elif hold.expected:
                self._holds.pop(uid, None)  # another thread may have removed it

    def places(self, now_s: float) -> Iterator[tuple[str, str, bool, float | None]]:
        """Yield (uid, node, whether it is held, latest monotonic time at which the hold ends) of
        all nominees.

        A pod that stays nominated still takes precedence over younger nominees of the node when its
        hold is over. The time is None if it is unknown. Unlike ``current``, this method does not
        begin to count the duration of a hold.
        """
        for uid, hold in list(self._holds.items()):
            if is_held := self._is_held(hold, now_s):
                yield uid, hold.node, True, self._until_s(hold)
            elif not hold.expected:
                yield uid, hold.node, is_held, None

    def until_s(self, uid: str) -> float | None:
        """Return the latest monotonic time at which a hold ends, or None if it is unknown."""
        hold = self._holds.get(uid)
        return self._until_s(hold) if hold else None

    def _left_at_s(self, hold: _Hold, now_s: float) -> float:
        """Return when a pod was last leaving the node of the hold."""
        leaves = self._is_left(hold.node) and not hold.expected
        hold.preempts = hold.preempts or leaves
        return now_s if hold.since_s is None or leaves else hold.since_s

    def _until_s(self, hold: _Hold) -> float | None:
        if hold.began_s is None or hold.since_s is None:
            return None  # the duration of the hold is not counted yet
        last_s = hold.began_s + LONGEST_S
        leaves = self._is_left(hold.node) and not hold.expected
        return last_s if leaves else min(last_s, hold.since_s + hold.for_s)

    def _is_held(self, hold: _Hold, now_s: float) -> bool:
        began_s = now_s if hold.began_s is None else hold.began_s
        return now_s <= min(self._left_at_s(hold, now_s) + hold.for_s, began_s + LONGEST_S)


def yields(pod: Pod, nominee: Pod, is_nominated: bool) -> bool:
    """Return whether the nominee takes precedence over the pod on a node.

    ``is_nominated`` states whether the pod is nominated there too. Of two nominees with the same
    priority, the older nominee takes precedence, because if each waited for the other, neither
    would ever be bound.
    """
    if pod.metadata.uid == nominee.metadata.uid or nominee.priority < pod.priority:
        return False
    if nominee.priority > pod.priority or not is_nominated:
        return True
    return _age(nominee) < _age(pod)


def _age(pod: Pod) -> tuple[str, str]:
    return pod.metadata.creation_timestamp or "", pod.metadata.uid
