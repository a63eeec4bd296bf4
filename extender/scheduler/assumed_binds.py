"""Assumed binds: pods that kube-scheduler is about to bind, whose memory filter keeps free.

kube-scheduler filters the next pod some milliseconds before it asks the extender to bind the last
one. If filter offered the same memory to both, the extender would have to decline that bind, and
its pod would back off for seconds.
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

#: Seconds after which a bind is no longer expected.
BIND_FOLLOWS_WITHIN_S = 0.25
#: Maximum number of assumed binds, the latest ones: each can cost filter a millisecond.
BINDS_EXPECTED = 2
#: Cached answers of ``_rejection``.
MOST_ANSWERS = 16


@dataclass(frozen=True, slots=True)
class _Expected:
    pod: Pod
    request: VramRequest
    node: str
    until_s: float


class AssumedBinds:
    """The latest pods for which kube-scheduler has a node, until their bind comes."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        #: By uid, the latest last.
        self._expected: Bounded[str, _Expected] = Bounded(BINDS_EXPECTED)
        #: (kind of request, node, snapshot of its last change, kinds of assumed binds) -> reason.
        self._answers: Bounded[tuple[object, ...], Reason | None] = Bounded(MOST_ANSWERS)

    def expect(self, pod: Pod, request: VramRequest, node: str, now_s: float) -> None:
        """Expect the bind of the pod to the node.

        It does not come if kube-scheduler fails, or if a user's preference for another node
        outweighs the extender's score.
        """
        uid = pod.metadata.uid
        self._expected[uid] = _Expected(pod, request, node, now_s + BIND_FOLLOWS_WITHIN_S)

    def bind_received(self, uid: str) -> None:
        """Forget the pod: its bind has come."""
        self._expected.pop(uid, None)

    def reservations(self, now_s: float) -> Iterator[tuple[str, str, Reservation]]:
        """Yield uid, node, and the reservation that filter keeps free there for the pod."""
        for uid, each in list(self._expected.items()):
            gpunode = self._cluster.gpunode(each.node) if each.until_s >= now_s else None
            if gpunode is not None and (found := self._cluster.adopt(each.pod, gpunode)):
                yield uid, each.node, found

    def rules_changed(self) -> None:
        """Drop cached answers, which depend on the placement rules."""
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
        """Reject in ``codes`` the nodes that assumed binds would fill.

        Return whether any node was rejected.
        """
        by_node: dict[str, list[_Expected]] = {}
        for uid, other in list(self._expected.items()):
            if uid == pod.metadata.uid or other.until_s < now_s:
                del self._expected[uid]
            else:
                by_node.setdefault(other.node, []).append(other)
        rejected = False
        for node, others in by_node.items():
            row = snap.row_of.get(node, -1)
            passed = (codes == 0) & (rows == row)
            if passed.any():
                version = int(snap.changed_in[row])
                reason = self._rejection(pod, request, node, version, others, now_s)
                codes[passed] = CODE_OF[reason]
                rejected = rejected or reason is not None
        return rejected

    def _rejection(
        self,
        pod: Pod,
        request: VramRequest,
        node: str,
        version: int,
        others: Sequence[_Expected],
        now_s: float,
    ) -> Reason | None:
        """Return why the pod does not fit beside the others, None if it fits.

        Similar pods come one after the other, so the answer is cached until the node changes.
        """
        kinds = [other.request.kind for other in others]
        question = (request.kind, node, version, *kinds)
        cacheable = self._is_new_to(pod.metadata.uid, node) and all(
            # Otherwise the pod selects its device itself, and its kind does not include which.
            other.request.visible is Visible.BY_PLUGIN
            for other in others
        )
        if cacheable and question in self._answers:
            return self._answers[question]
        beside = [other.pod for other in others]
        reason = rejection_beside(self._cluster, pod, node, beside, now_s)
        if cacheable:
            self._answers[question] = reason
        return reason

    def _is_new_to(self, uid: str, node: str) -> bool:
        """Return whether the pod has no reservation on the node yet.

        Its own reservation would not count against it.
        """
        gpunode = self._cluster.gpunode(node)
        reserved = gpunode.spec.reservations if gpunode else {}
        return uid not in reserved and uid not in self._cluster.binding_to(node)
