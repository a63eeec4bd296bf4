"""Counts the memory that is held for pods that are not bound yet, for filter, bind and all views.

``cluster.holds`` lists the pods for which memory of a node is held. A pod does not fit on a node if
it fits only without the pods that take precedence. Only this module applies this rule to verdicts,
with the reason ``HELD``.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from headroom.bounded_dict import Bounded
from headroom.contract.gpunode import Reservation
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.holds import Hold
from headroom.core.groups.membership import group_of
from headroom.core.placement.fit import Codes, Verdicts, fit
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import CODE_OF, Rows, Snapshot
from headroom.core.placement.snapshot_builder import Table, build
from headroom.core.whatif.node_whatif import rejection_beside, terms_beside

#: Maximum number of cached results of ``HeldMemory``. This is enough for the nodes that are held
#: for a large group while filter is called for its other pods.
MOST_ANSWERS = 4096


def because_held(reason: Reason | None) -> Reason | None:
    """Return the reason for rejecting a node on which the pod would fit without the pods that take
    precedence.

    ``reason`` is the reason with these pods. It is returned unchanged if it is not about memory or
    replicas.
    """
    return Reason.HELD if reason is not None and reason.evictable else reason


class HeldMemory:
    """Rejects nodes for filter, and caches results, because consecutive pods are often equal."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: The inputs of the result, and the result, for each (kind of request, node). The inputs
        #: are the generation of the snapshot in which the node last changed, and the pods that take
        #: precedence.
        self._answers: Bounded[tuple[object, str], tuple[tuple[object, ...], Reason | None]]
        self._answers = Bounded(MOST_ANSWERS)
        #: The kind of the last request. Equal kinds share one object, because the keys of the cache
        #: contain it.
        self._kind: object | None = None

    def rules_changed(self) -> None:
        """Drop cached answers, which depend on the placement rules."""
        self._answers.clear()

    def admit_reserved(
        self, request: VramRequest, rows: Rows, codes: Codes, snap: Snapshot, now_s: float
    ) -> list[int]:
        """For each node that already has a reservation for the pod, write to ``codes`` whether the
        pod would fit if that reservation did not exist.

        Return the positions of these nodes in the rows.
        """
        nodes = self._cluster.unfinished_binds.nodes_of(request.uid)
        found = [at for node in nodes for at in np.flatnonzero(rows == snap.row_of.get(node, -2))]
        for at in found:
            node = snap.nodes[int(rows[at])].name
            codes[at] = CODE_OF[rejection_beside(self._cluster, request, node, (), now_s)]
        return [int(at) for at in found]

    def reject_nodes(
        self,
        pod: Pod,
        request: VramRequest,
        rows: Rows,
        codes: Codes,
        snap: Snapshot,
        now_s: float,
    ) -> bool:
        """Reject the nodes on which the pod does not fit beside the pods that take precedence.

        Write the reason to ``codes``. Return whether a rejection may end without a gain of memory,
        because a node was rejected only for pods of other groups, whose binds may fail. The pods of
        its own group do not count, because none of them is bound without it.
        """
        may_change, group = False, group_of(pod)
        against = self._cluster.holds.against(pod, now_s)
        if not against:
            return False
        offered = np.full(len(snap.nodes) + 1, -1, np.int64)  # the last is for unknown nodes
        offered[rows] = np.arange(len(rows))
        for node, holds in against.items():
            row = snap.row_of.get(node, -1)
            at = int(offered[row]) if row >= 0 else -1
            if at >= 0 and codes[at] == 0:
                version = int(snap.changed_in[row])
                reason = self._rejection(request, node, version, holds, now_s)
                codes[at] = CODE_OF[reason]
                if reason is not None and not may_change:
                    may_change = group is None or any(group_of(h.pod) != group for h in holds)
        return may_change

    def _rejection(
        self, request: VramRequest, node: str, version: int, holds: Sequence[Hold], now_s: float
    ) -> Reason | None:
        others = [hold.pod for hold in holds]
        before = [
            hold.kind or (hold.pod.metadata.uid, hold.pod.metadata.resource_version)
            for hold in holds
        ]
        if self._kind != request.kind:
            self._kind = request.kind
        key, depends_on = (self._kind, node), (version, *before)
        cacheable = self._is_new_to(request.uid, node)
        if cacheable and (known := self._answers.get(key)) and known[0] == depends_on:
            return known[1]
        reason = because_held(rejection_beside(self._cluster, request, node, others, now_s))
        if cacheable:
            self._answers[key] = depends_on, reason
        return reason

    def _is_new_to(self, uid: str, node: str) -> bool:
        """Return whether the pod has no reservation on the node yet.

        A pod's own reservation does not count against it, so its result is not valid for other pods
        and must not be cached.
        """
        gpunode = self._cluster.gpunode(node)
        reserved = gpunode.spec.reservations if gpunode else {}
        return uid not in reserved and uid not in self._cluster.holds.binding_to(node)


def seen_by(cluster: Cluster, pod: Pod | None, snap: Snapshot, now_s: float) -> Snapshot:
    """Return the snapshot that filter uses for the pod.

    Memory that is held for pods with precedence counts as reserved, but the pod's own assumed bind
    and reservations do not. For views of all nodes ``pod`` is None, and all held memory counts.
    ``snap`` is a snapshot of the cluster, or a result of this function.
    """
    uid = pod.metadata.uid if pod is not None else ""
    held: dict[str, Mapping[str, Reservation]] = {}
    for name, holds in cluster.holds.against(pod, now_s).items():
        gpunode = cluster.gpunode(name)
        if gpunode is not None and name in snap.row_of:
            reservations = ((h.pod.metadata.uid, cluster.adopt(h.pod, gpunode)) for h in holds)
            held[name] = {uid: found for uid, found in reservations if found is not None}
    own = {name for name, assumed in cluster.holds.all_binding().items() if uid in assumed}
    own |= cluster.unfinished_binds.nodes_of(uid)
    names = {n for n in held.keys() | snap.held.keys() if held.get(n) != snap.held.get(n)}
    names |= own & snap.row_of.keys()
    if not names:
        return snap
    table = Table.after(snap)
    for name in sorted(names):
        table.put(terms_beside(cluster, name, held.get(name, {}), {uid}))
    return replace(table.snapshot(), generation=snap.generation, held=held)


def verdicts_on(
    cluster: Cluster, request: VramRequest, snap: Snapshot, rows: Rows, now_s: float
) -> Verdicts:
    """Fit the request on a snapshot of ``seen_by``, as ``fit`` does.

    A node with held memory is first judged as if the memory were not held. If the request fits in
    this case but not beside the held memory, ``because_held`` returns the reason.
    """
    found = fit(request, snap, rows, now_s)
    holding = snap.held.keys() | cluster.holds.all_binding().keys()
    at = [
        i for i in np.flatnonzero(~found.fits).tolist() if snap.nodes[int(rows[i])].name in holding
    ]
    if not at:
        return found
    names = [snap.nodes[int(rows[i])].name for i in at]
    free = build([cluster.terms_of(name, cluster.gpunode(name), {request.uid}) for name in names])
    without = fit(request, free, np.arange(len(at)), now_s)
    codes = found.codes.copy()
    for i, code in zip(at, without.codes.tolist(), strict=True):
        codes[i] = code or CODE_OF[because_held(found.reason(i))]
    return replace(found, codes=codes)


def rejection_by_nominees(cluster: Cluster, pod: Pod, node: str, now_s: float) -> Reason | None:
    """Return why a pod that fits on the node does not fit beside the nominees with precedence.

    Bind uses this function. Assumed binds do not count, because they may never be called.
    """
    if not (nominees := cluster.holds.nominees_before(pod, now_s).get(node)):
        return None
    request = cluster.understand(pod)
    return because_held(rejection_beside(cluster, request, node, nominees, now_s))
