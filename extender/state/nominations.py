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

A process that decides nothing takes the holds from the extenders that it follows.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from contract.kube import Pod
from contract.preemption import attempt_of

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


@dataclass(frozen=True, slots=True)
class Place:
    """A hold without its clocks. ``held`` is false once the hold is over: if the pod stays
    nominated, it still goes before younger nominees of that node."""

    node: str
    held: bool


def no_pod(uid: str) -> Pod | None:
    return None


class Nominations:
    """``hold_s``: seconds for which a place is held once nobody is leaving any more; ``ours``:
    whether our own nominations count, which else nobody makes but users who may write on a pod.
    ``unbound`` returns the unbound pod of a uid. ``held_for`` may be called from any thread."""

    def __init__(
        self, hold_s: float, ours: bool, unbound: Callable[[str], Pod | None] = no_pod
    ) -> None:
        self._hold_s = hold_s
        self._ours = ours
        self._unbound = unbound
        self._holds: dict[str, _Hold] = {}
        #: Uid -> place, as the extenders say; None if this process decides itself, or reads from no
        #: extender.
        self._followed: Mapping[str, Place] | None = None

    def follow(self, places: Mapping[str, Place] | None) -> None:
        """Hold exactly these places from now on, by uid; None: those of the pods seen here."""
        self._followed = places

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
        if self._followed is not None:
            place = self._followed.get(uid)
            return place.node if place else ""
        hold = self._holds.get(uid)
        return hold.node if hold else ""

    def nominees(
        self, now_s: float, is_left: Callable[[str], bool]
    ) -> Mapping[str, tuple[Pod, ...]]:
        """Node -> for whom it is held; ``is_left`` says of a node whether somebody is leaving."""
        if self._followed is not None:
            places = ((self._unbound(uid), place) for uid, place in self._followed.items())
            return _by_node((pod, at.node) for pod, at in places if pod is not None and at.held)
        found: list[tuple[Pod, str]] = []
        for uid, hold in list(self._holds.items()):
            if hold.began_s is None:
                hold.began_s = now_s
            hold.since_s = _left_at_s(hold, now_s, is_left)
            if _is_held(hold, now_s, is_left):
                found.append((hold.pod, hold.node))
            elif hold.expected:
                del self._holds[uid]
        return _by_node(found)

    def places(self, now_s: float, is_left: Callable[[str], bool]) -> Mapping[str, Place]:
        """All holds by uid, for ``follow``; unlike ``nominees`` it starts no clock."""
        return {
            uid: Place(hold.node, _is_held(hold, now_s, is_left))
            for uid, hold in list(self._holds.items())
            if _is_held(hold, now_s, is_left) or not hold.expected
        }

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


def _left_at_s(hold: _Hold, now_s: float, is_left: Callable[[str], bool]) -> float:
    """When somebody was leaving last."""
    leaves = is_left(hold.node) and not hold.expected
    return now_s if hold.since_s is None or leaves else hold.since_s


def _is_held(hold: _Hold, now_s: float, is_left: Callable[[str], bool]) -> bool:
    began_s = now_s if hold.began_s is None else hold.began_s
    return now_s <= min(_left_at_s(hold, now_s, is_left) + hold.for_s, began_s + LONGEST_S)


def _by_node(found: Iterable[tuple[Pod, str]]) -> Mapping[str, tuple[Pod, ...]]:
    by_node: dict[str, tuple[Pod, ...]] = {}
    for pod, node in found:
        by_node[node] = (*by_node.get(node, ()), pod)
    return by_node


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
