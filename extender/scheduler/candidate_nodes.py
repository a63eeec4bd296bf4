"""Chooses the rejected nodes on which kube-scheduler may search for victims.

Filter returns these nodes in ``FailedNodes``, and all other rejected nodes in
``FailedAndUnresolvableNodes``. All candidates passed kube-scheduler's own filters, so
kube-scheduler itself needs no victims there. From version 1.38 on, it calls preempt nevertheless,
with an empty list of victims. Older versions report an error that lists the nodes in random order.
So the pod's message changes with each attempt, and these versions retry the pod a hundred times per
second. The extender cannot detect the version, because kube-scheduler does not send it. So the
extender names candidates only if the setting ``preempt_for_memory`` allows it, and it pauses for a
while if no preempt call follows.

A search for victims takes far longer than filter. So a node on which a search found no victims is
not a candidate for other pods of the same kind and priority either, until a node has gained
headroom.
"""

from collections.abc import Set
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np
import structlog

from headroom.bounded_dict import Bounded
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.fit import Codes
from headroom.core.placement.request import Kind, VramRequest
from headroom.core.placement.snapshot import REASONS, Mask, Rows, Snapshot
from headroom.core.preemption.evictable_pods import CRITICAL, may_preempt
from headroom.core.preemption.victim_search import Preemption

log = structlog.get_logger()

#: Whether evictions could resolve a reason, by the code of the reason.
CURABLE = np.array([reason is not None and reason.evictable for reason in REASONS])
#: After this number of responses with candidates, kube-scheduler is assumed to be older than 1.38,
#: unless it has called preempt with an empty list of victims.
MOST_UNCONFIRMED = 4
#: Number of seconds for which no candidates are named after ``MOST_UNCONFIRMED`` responses.
PAUSE_S = 60.0
#: Minimum and maximum number of seconds for which a search without victims is not repeated.
FRUITLESS_S, LONGEST_FRUITLESS_S = 2.0, 60.0
#: Maximum number of kinds of pods whose searches are remembered.
MOST_FRUITLESS = 16


@dataclass(slots=True)
class _Fruitless:
    """Searches that found no victims. The first of them was made at ``at_s`` on the given
    generation of the snapshot."""

    at_s: float
    generation: int
    nodes: set[str] = field(default_factory=set)


class CandidateNodes:
    """Chooses candidates for preemption, as long as kube-scheduler calls preempt for them."""

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster
        #: Number of responses with candidates since the last confirmation.
        self._unconfirmed = 0
        self._paused_until_s = float("-inf")
        #: Searches without victims, by the kind of request and the priority of the pods.
        self._fruitless: Bounded[tuple[Kind, int], _Fruitless] = Bounded(MOST_FRUITLESS)

    def confirm(self) -> None:
        """Record a preempt call with an empty list of victims, which only kube-scheduler 1.38 and
        newer versions make."""
        self._unconfirmed = 0

    def searched(self, pod: Pod, request: VramRequest, found: Preemption, now_s: float) -> None:
        """Record the result of a search for victims.

        A search without victims is recorded only if its cause can end only with a gain of headroom.
        So it is not recorded while nodes are held for other pods, pods are leaving or disruption
        budgets are unknown.
        """
        kind, cluster = (request.kind, pod.priority), self._cluster
        held = cluster.holds.nominees_before(pod, now_s)
        passing = found.soon or cluster.budgets.unlisted or held
        if found.best is not None or passing:
            self._fruitless.pop(kind, None)
            return
        if not self.fruitless(pod, request, now_s):
            self._fruitless[kind] = _Fruitless(now_s, cluster.generation)
        self._fruitless[kind].nodes.update(found.helpless_nodes)

    def fruitless(self, pod: Pod, request: VramRequest, now_s: float) -> Set[str]:
        """Return the nodes on which another search would probably find no victims either."""
        noted = self._fruitless.get((request.kind, pod.priority))
        if noted is None:
            return frozenset()
        gained = self._cluster.latest_gain > noted.generation
        is_over = now_s >= noted.at_s + (FRUITLESS_S if gained else LONGEST_FRUITLESS_S)
        return frozenset() if is_over else noted.nodes

    def choose(
        self,
        pod: Pod,
        request: VramRequest,
        rows: Rows,
        codes: Codes,
        large_enough: Mask,
        snap: Snapshot,
        now_s: float,
    ) -> Mask | None:
        """Return the mask (n,) of the rejected nodes on which evictions could help, or None if
        there are no such nodes.

        ``rows`` contains the rows of the nodes, with -1 for unknown nodes. ``codes`` contains the
        codes of their reasons. ``large_enough`` contains ``Verdicts.large_enough`` for each row of
        the snapshot.

        A node is a candidate if evictions can resolve its reason, its devices are large enough, it
        has a GPU pod with a lower priority, and it is not ``fruitless``. If the pod is nominated to
        one of these nodes, only that node is a candidate, so that kube-scheduler waits for the
        victims there.
        """
        if now_s < self._paused_until_s or not may_preempt(pod):
            return None
        candidates: Mask = CURABLE[codes] & (rows >= 0)
        nominated = pod.status.nominated_node_name if pod.status else None
        if nominated:
            candidates &= rows == snap.row_of.get(nominated, -1)
        found = candidates.nonzero()[0]
        found_rows = rows[found]
        names = [snap.names[row] for row in found_rows.tolist()]
        limit = min(pod.priority, CRITICAL)
        least = map(self._cluster.least_priority.get, names, repeat(limit))
        candidates[found] = large_enough[found_rows] & (
            np.fromiter(least, np.int64, len(names)) < limit
        )
        if fruitless := self.fruitless(pod, request, now_s):
            candidates[found] &= [name not in fruitless for name in names]
        if not candidates.any():
            return None
        if not nominated:
            self._count(now_s)
        return candidates

    def _count(self, now_s: float) -> None:
        """Count a response with candidates, and pause after too many responses without a
        confirmation."""
        self._unconfirmed += 1
        if self._unconfirmed > MOST_UNCONFIRMED:
            self._unconfirmed = 0
            self._paused_until_s = now_s + PAUSE_S
            log.warning(
                "preempt_for_memory_has_no_effect",
                message="kube-scheduler did not call preempt for nodes where evictions could help; "
                "set preempt_for_memory: true only with kube-scheduler 1.38 or newer and with "
                "preemptVerb: preempt in its extender entry",
            )
