"""For whom places are held: pods for which others leave a node, until they are bound there.

Between the eviction and the bind the memory comes free, and whoever asked first would get it. So
filter counts the *nominees* of a node as if they were being bound to it, against every pod that
does not outrank them, on all replicas: the nomination is on the pod, in
``status.nominatedNodeName`` where kube-scheduler made room, in the annotation
``headroom.gpu/preempting`` where we did.

kube-scheduler takes its nomination back when it tries the pod while memory is not free yet and
finds nobody else to evict; the place is held a while longer. A hold lasts as long as somebody is
leaving the node, and ``hold_s`` more, but no longer than ``LONGEST_S``: a nominee that does not
come keeps nobody out for ever. It ends at once when the nominee is bound, gone, or nominated
elsewhere.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from contract.kube import Pod
from contract.preempting import attempt_of

#: Since kube-scheduler took a nomination back.
CLEARED_S = 15.0
#: From our answer to kube-scheduler until it writes the nomination on the pod.
EXPECTED_S = 5.0
#: A hold ends after so long even if pods leave the node all the time: it may be for other reasons.
LONGEST_S = 1800.0


@dataclass(slots=True)
class _Hold:
    pod: Pod
    node: str
    #: How long it lasts after somebody left last, and since when: on the receiver's clock.
    for_s: float
    since_s: float | None = None
    #: The attempt of ours; empty where kube-scheduler nominated the pod.
    by: str = ""
    #: Whether no nomination was seen yet.
    expected: bool = False
    #: When it was counted first.
    began_s: float | None = None


class Nominations:
    """``hold_s``: seconds for which a place is held once nobody is leaving any more; ``ours``:
    whether our own nominations count, which else nobody makes but users who may write on a pod."""

    def __init__(self, hold_s: float, ours: bool) -> None:
        self._hold_s = hold_s
        self._ours = ours
        self._holds: dict[str, _Hold] = {}

    def see(self, pod: Pod) -> None:
        """An unbound pod, as it is now."""
        uid, (node, by) = pod.metadata.uid, self._nomination(pod)
        hold = self._holds.get(uid)
        if node and (hold is None or hold.node != node or (by and hold.by != by)):
            self._holds[uid] = _Hold(pod, node, self._hold_s, by=by)
        elif hold is not None:
            hold.pod = pod
            hold.expected = hold.expected and not node
            if node and hold.for_s != self._hold_s:
                hold.for_s, hold.since_s = self._hold_s, None
            elif not node and hold.for_s == self._hold_s:
                hold.for_s, hold.since_s = min(CLEARED_S, self._hold_s), None

    def expect(self, pod: Pod, node: str, now_s: float) -> None:
        """kube-scheduler is about to nominate the pod, as we told it to.

        Somebody leaving the node later does not prolong this: if no nomination is seen, the pod
        may be gone, and nothing else would ever tell."""
        hold = self._holds.get(pod.metadata.uid)
        if hold is None or hold.node != node:
            self._holds[pod.metadata.uid] = _Hold(pod, node, EXPECTED_S, now_s, expected=True)

    def lose(self, uid: str) -> None:
        self._holds.pop(uid, None)

    def _nomination(self, pod: Pod) -> tuple[str, str]:
        """The node on which room is made for an unbound pod, and the attempt of ours; empty where
        there is none."""
        by_scheduler = pod.status.nominated_node_name if pod.status else None
        if by_scheduler:
            return by_scheduler, ""
        attempt = attempt_of(pod) if self._ours else None
        return (attempt.node, attempt.id) if attempt else ("", "")

    def node_of(self, uid: str) -> str:
        """The node that was held for the pod last; empty where none was."""
        hold = self._holds.get(uid)
        return hold.node if hold else ""

    def nominees(
        self, now_s: float, is_left: Callable[[str], bool]
    ) -> Mapping[str, tuple[Pod, ...]]:
        """Node -> for whom it is held; ``is_left`` says of a node whether somebody is leaving."""
        found: dict[str, tuple[Pod, ...]] = {}
        for uid, hold in list(self._holds.items()):
            if hold.began_s is None:
                hold.began_s = now_s
            if hold.since_s is None or (is_left(hold.node) and not hold.expected):
                hold.since_s = now_s
            if now_s <= min(hold.since_s + hold.for_s, hold.began_s + LONGEST_S):
                found[hold.node] = (*found.get(hold.node, ()), hold.pod)
            elif hold.expected:
                del self._holds[uid]
        return found

    def held_for(
        self, pod: Pod, now_s: float, is_left: Callable[[str], bool]
    ) -> dict[str, list[Pod]]:
        """Node -> the nominees that the pod leaves it to; ``is_left`` as above."""
        own = self.node_of(pod.metadata.uid)
        return {
            node: others
            for node, all_there in self.nominees(now_s, is_left).items()
            if (others := [other for other in all_there if yields(pod, other, own == node)])
        }


def priority(pod: Pod) -> int:
    return pod.spec.priority or 0


def yields(pod: Pod, nominee: Pod, both: bool) -> bool:
    """Whether the pod leaves a node to the nominee; ``both``: it is nominated there itself.

    Of two nominees of one priority the older one goes first: if each waited for the other, neither
    would ever come.
    """
    if pod.metadata.uid == nominee.metadata.uid or priority(nominee) < priority(pod):
        return False
    if priority(nominee) > priority(pod) or not both:
        return True
    return _age(nominee) < _age(pod)


def _age(pod: Pod) -> tuple[str, str]:
    return pod.metadata.creation_timestamp or "", pod.metadata.uid
