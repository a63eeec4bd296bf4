"""Assumed binds: pods that kube-scheduler is about to bind, whose memory filter keeps free.

kube-scheduler filters the next pod some milliseconds before it asks the extender to bind the last
one. If filter offered the same memory to both, the extender would have to decline that bind, and
its pod would back off for seconds.

kube-scheduler with the Coscheduling plugin binds the pods of a group together, after it has chosen
a node for each of them. So their binds are assumed for longer.
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
#: Maximum number of cached results of ``_rejection``.
MOST_ANSWERS = 16


@dataclass(frozen=True, slots=True)
class _Expected:
    pod: Pod
    request: VramRequest
    node: str
    until_s: float


class AssumedBinds:
    """The latest pods for which kube-scheduler has chosen a node but not called bind yet."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        #: By uid, the latest last: single pods, and pods of groups.
        self._expected: Bounded[str, _Expected] = Bounded(BINDS_EXPECTED)
        self._grouped: Bounded[str, _Expected] = Bounded(GROUPED_EXPECTED)
        #: (namespace, group) -> until when its binds are not assumed for longer.
        self._rejected_until_s: Bounded[tuple[str, str], float] = Bounded(GROUPS_REJECTED)
        #: (kind of request, node, generation of the snapshot in which the node last changed, kinds
        #: of the requests of assumed binds) -> reason.
        self._answers: Bounded[tuple[object, ...], Reason | None] = Bounded(MOST_ANSWERS)

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
        expected[pod.metadata.uid] = _Expected(pod, request, node, until_s)

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

    def bind_received(self, uid: str) -> None:
        """Drop the assumed bind of the pod, because kube-scheduler has called bind."""
        self._expected.pop(uid, None)
        self._grouped.pop(uid, None)

    def reservations(self, now_s: float) -> Iterator[tuple[str, str, Reservation]]:
        """Yield the uid, the node and the future reservation of each assumed bind."""
        for uid, each in [*self._expected.items(), *self._grouped.items()]:
            gpunode = self._cluster.gpunode(each.node) if each.until_s >= now_s else None
            if gpunode is not None and (found := self._cluster.adopt(each.pod, gpunode)):
                yield uid, each.node, found

    def rules_changed(self) -> None:
        """Drop cached answers, which depend on the placement rules."""
        self._answers.clear()

    def reject_nodes(
        self,
        pod: Pod,
        request: VramRequest,
        rows: Rows,
        codes: Codes,
        snap: Snapshot,
        now_s: float,
    ) -> bool:
        """Reject the nodes on which the pod does not fit beside assumed binds.

        Write the reasons into ``codes``. Return whether any node was rejected.
        """
        by_node: dict[str, list[_Expected]] = {}
        for expected in (self._expected, self._grouped):
            for uid, other in list(expected.items()):
                if uid == pod.metadata.uid or other.until_s < now_s:
                    del expected[uid]
                else:
                    by_node.setdefault(other.node, []).append(other)
        rejected = False
        for node, others in by_node.items():
            row = snap.row_of.get(node, -1)
            passed = (codes == 0) & (rows == row)
            if passed.any():
                version = int(snap.changed_in[row])
                reason = self._rejection(request, node, version, others, now_s)
                codes[passed] = CODE_OF[reason]
                rejected = rejected or reason is not None
        return rejected

    def _rejection(
        self,
        request: VramRequest,
        node: str,
        version: int,
        others: Sequence[_Expected],
        now_s: float,
    ) -> Reason | None:
        """Return why the pod does not fit on the node beside ``others``; None if it fits.

        Consecutive pods are often of one kind, so the reason is cached until the node changes.
        ``version`` is the generation of the snapshot in which the node last changed.
        """
        kinds = [other.request.kind for other in others]
        key = (request.kind, node, version, *kinds)
        cacheable = self._is_new_to(request.uid, node) and all(
            # If the pod's own variable decides its device, its kind does not determine the device.
            other.request.visible is Visible.BY_PLUGIN
            for other in others
        )
        if cacheable and key in self._answers:
            return self._answers[key]
        other_pods = [other.pod for other in others]
        reason = rejection_beside(self._cluster, request, node, other_pods, now_s)
        if cacheable:
            self._answers[key] = reason
        return reason

    def _is_new_to(self, uid: str, node: str) -> bool:
        """Return whether the pod has no reservation on the node yet.

        A pod's own reservation does not count against it. So its result is not valid for other
        pods, and must not be cached.
        """
        gpunode = self._cluster.gpunode(node)
        reserved = gpunode.spec.reservations if gpunode else {}
        return uid not in reserved and uid not in self._cluster.binding_to(node)


def group_of(pod: Pod) -> tuple[str, str] | None:
    """Return the namespace and the name of the pod's group; None if it has none."""
    name = (pod.metadata.labels or {}).get(POD_GROUP)
    return (pod.metadata.namespace, name) if name else None
