"""The pods whose bind must come next, and the room that filter leaves for them.

kube-scheduler asks about the next pod some milliseconds before it asks us to bind the last one; a
bind that we decline then costs its pod seconds of back-off.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from contract.gpunode import Reservation
from contract.kube import Pod
from contract.reasons import Reason
from extender.bounded import Bounded
from extender.placement.fit import Codes
from extender.placement.request import VramRequest
from extender.placement.snapshot import CODE_OF, Rows, Snapshot
from extender.placement.visible_devices import Visible
from extender.state.cluster_state import ClusterState
from extender.state.node_whatif import rejection_beside

BIND_FOLLOWS_WITHIN_S = 0.25
#: Of those pods the last ones: leaving room for each can cost a millisecond.
BINDS_EXPECTED = 2
#: Answers that are remembered.
MOST_ANSWERS = 16


@dataclass(frozen=True, slots=True)
class _Expected:
    pod: Pod
    request: VramRequest
    node: str
    until_s: float


class AssumedBinds:
    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        #: By uid, the last one last.
        self._expected: Bounded[str, _Expected] = Bounded(BINDS_EXPECTED)
        #: (kind of request, node, in which snapshot it changed last, kinds beside it) -> why not.
        self._answers: Bounded[tuple[object, ...], Reason | None] = Bounded(MOST_ANSWERS)

    def expect(self, pod: Pod, request: VramRequest, node: str, now_s: float) -> None:
        """kube-scheduler has us bind the pod there next, unless it fails or a user prefers another
        node, which our weight does not outdo."""
        uid = pod.metadata.uid
        self._expected[uid] = _Expected(pod, request, node, now_s + BIND_FOLLOWS_WITHIN_S)

    def came(self, uid: str) -> None:
        """Its bind."""
        self._expected.pop(uid, None)

    def reservations(self, now_s: float) -> Iterator[tuple[str, str, Reservation]]:
        """Uid, node, and what filter leaves free there for the pod."""
        for uid, each in list(self._expected.items()):
            gpunode = self._cluster.gpunode(each.node) if each.until_s >= now_s else None
            if gpunode is not None and (found := self._cluster.adopt(each.pod, gpunode)):
                yield uid, each.node, found

    def rules_changed(self) -> None:
        self._answers.clear()

    def leave_room(
        self,
        pod: Pod,
        request: VramRequest,
        rows: Rows,
        codes: Codes,
        snap: Snapshot,
        now_s: float,
    ) -> bool:
        """Refuse in ``codes`` the nodes that would be full with those that are expected; says
        whether there were any."""
        there: dict[str, list[_Expected]] = {}
        for uid, other in list(self._expected.items()):
            if uid == pod.metadata.uid or other.until_s < now_s:
                del self._expected[uid]
            else:
                there.setdefault(other.node, []).append(other)
        left = False
        for node, others in there.items():
            row = snap.row_of.get(node, -1)
            passed = (codes == 0) & (rows == row)
            if passed.any():
                version = int(snap.changed_in[row])
                reason = self._rejection(pod, request, node, version, others, now_s)
                codes[passed] = CODE_OF[reason]
                left = left or reason is not None
        return left

    def _rejection(
        self,
        pod: Pod,
        request: VramRequest,
        node: str,
        version: int,
        others: Sequence[_Expected],
        now_s: float,
    ) -> Reason | None:
        """Why the pod would not fit beside the others. Pods of one kind come one after the other:
        as long as the node is as it was, what was found for the last one holds for the next."""
        kinds = [other.request.kind for other in others]
        question = (request.kind, node, version, *kinds)
        alike = self._is_new_to(pod.metadata.uid, node) and all(
            # Else it is where it says itself, and its kind does not tell where.
            other.request.visible is Visible.BY_PLUGIN
            for other in others
        )
        if alike and question in self._answers:
            return self._answers[question]
        beside = [other.pod for other in others]
        reason = rejection_beside(self._cluster, pod, node, beside, now_s)
        if alike:
            self._answers[question] = reason
        return reason

    def _is_new_to(self, uid: str, node: str) -> bool:
        """Whether nothing there is the pod's own yet, which would not count against it."""
        gpunode = self._cluster.gpunode(node)
        reserved = gpunode.spec.reservations if gpunode else {}
        return uid not in reserved and uid not in self._cluster.binding_to(node)
