"""The state that the calls of kube-scheduler share, such as the cluster, the journal and earlier
results."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from extender.groups.binds import GroupBinds
from extender.metrics import Telemetry
from extender.scheduler.candidate_nodes import CURABLE, CandidateNodes
from extender.scheduler.extender_v1 import Offered
from headroom.bounded_dict import Bounded
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.assumed_binds import Calls
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster import Cluster
from headroom.core.journal.decision_records import Candidates, Ranked
from headroom.core.journal.journal import Journal, micros
from headroom.core.placement.fit import Codes
from headroom.core.placement.fit_cache import FitCache
from headroom.core.placement.request import VramRequest
from headroom.core.placement.score import BestNodes, best
from headroom.core.placement.snapshot import CODE_OF, Mask, Rows, Snapshot
from headroom.core.whatif.held_memory import HeldMemory
from headroom.runtime.settings.settings import Settings

#: Number of best nodes for which a decision records each term of the score. A record takes 30 bytes
#: for each node.
CONTENDERS = 50
#: Maximum number of rejected pods whose nodes are kept. Each pod takes 50 kB if there are 5,000
#: nodes.
MAX_REJECTED_PODS = 64


class Replica(Protocol):
    """The process that serves the calls."""

    @property
    def observes(self) -> bool:
        """Whether the mode is observe, in which every decision is recorded but no node is rejected
        or preferred."""

    @property
    def settings(self) -> Settings:
        """The current settings, which can change between two calls."""

    def unready(self) -> str:
        """Return a sentence that states why no decision is possible yet, or "" if decisions are
        possible."""

    def deliver(self, events: Sequence[Event]) -> None:
        """Apply changes that this process makes."""


class Clock(Protocol):
    """The clocks of module ``time``, in seconds."""

    def monotonic(self) -> float: ...

    def time(self) -> float: ...


@dataclass(frozen=True, slots=True, eq=False)
class RejectedPod:
    """The nodes that one filter call rejected. Their names are collected only when needed."""

    #: Resource version of the pod.
    version: str
    #: Time of the filter call on the monotonic clock.
    at_s: float
    rows: Rows
    codes: Codes
    names_of_all: tuple[str, ...]

    def names(self) -> list[str]:
        """Return the known nodes on which the pod could fit after evictions."""
        rows = self.rows[CURABLE[self.codes] & (self.rows >= 0)]
        return [self.names_of_all[row] for row in rows.tolist()]


@dataclass(frozen=True, slots=True)
class Best:
    """The best node among some rows of a snapshot."""

    #: Index of the best node in the rows.
    place: int
    nodes: BestNodes

    @property
    def node(self) -> str:
        return self.nodes.names[0]


class SchedulingState:
    """The state that filter, prioritize, preempt and bind of one process share."""

    def __init__(
        self,
        cluster: Cluster,
        calls: Calls,
        journal: Journal,
        telemetry: Telemetry,
        replica: Replica,
        clock: Clock,
    ) -> None:
        self.cluster = cluster
        self.calls = calls
        self.journal = journal
        self.telemetry = telemetry
        self.replica = replica
        self.clock = clock
        self.held_memory = HeldMemory(cluster)
        self.candidate_nodes = CandidateNodes(cluster)
        self.group_binds = GroupBinds(calls.assumed, clock.monotonic)
        self._rules = cluster.rules
        self._fit_cache = FitCache(cluster.rules.weights)
        #: The nodes that the last filter call rejected, by the pod's uid, because kube-scheduler
        #: may call preempt for the pod next.
        self._rejected_pods: Bounded[str, RejectedPod] = Bounded(MAX_REJECTED_PODS)

    def fit_cache(self) -> FitCache:
        """Return the cache of fits, which is emptied when the placement rules change."""
        if self._rules is not self.cluster.rules:
            self._rules = self.cluster.rules
            self._fit_cache = FitCache(self._rules.weights)
            self.held_memory.rules_changed()
        return self._fit_cache

    def codes(self, request: VramRequest, rows: Rows, snap: Snapshot, now_s: float) -> Codes:
        """Return the code of each node's reason as an array (n,). The code is 0 if the pod fits.

        A row of -1 stands for an unknown node.
        """
        cached = self.fit_cache().weigh(request, snap)
        if rows.min(initial=0) >= 0:
            return cached.codes(snap, rows, now_s)
        codes = np.full(len(rows), CODE_OF[Reason.UNKNOWN_NODE], np.int8)
        codes[rows >= 0] = cached.codes(snap, rows[rows >= 0], now_s)
        return codes

    def best(
        self,
        request: VramRequest,
        rows: Rows,
        snap: Snapshot,
        now_s: float,
        fits: Mask | None = None,
    ) -> Best | None:
        """Return the best of these rows, which must all be rows of known nodes. Return None if the
        pod fits on no node, or only on nodes where kube-scheduler allocates the GPUs.

        ``fits`` (n,) is whether ``codes`` returns 0 for each row, if the caller has called it.
        """
        market = self.cluster.market
        cached = self.fit_cache().weigh(request, snap)
        ranking = cached.rank(request, snap, rows, now_s, market, fits)
        if ranking.winner is None or cached.standing.by_dra[rows[ranking.winner]]:
            return None
        nodes = best(request, snap, rows, ranking, cached.standing, now_s, market, CONTENDERS)
        return Best(ranking.winner, nodes)

    def record_ranked(
        self,
        pod: Pod,
        began_s: float,
        snap: Snapshot,
        offered: int,
        best: Best | None,
        by_filter: bool = False,
    ) -> None:
        """Record that ``best`` has the best of ``offered`` nodes.

        If it is None, record that no node was preferred. ``by_filter`` is true if filter
        returned only the best node, because kube-scheduler then does not call prioritize.
        """
        took_us = micros(self.clock.monotonic() - began_s)
        winner = best.node if best else ""
        at_s = self.clock.time()
        ranked = Ranked(at_s, took_us, snap.generation, offered, winner, by_filter)
        self.journal.note(pod, ranked, ranked.at_s, winner)
        if best:
            nodes = best.nodes
            candidates = Candidates.of(nodes.names, nodes.scores, nodes.terms)
            self.journal.note(pod, candidates, ranked.at_s)

    def keep_rejected(
        self, pod: Pod, rows: Rows, codes: Codes, snap: Snapshot, at_s: float
    ) -> None:
        """Keep the nodes that filter rejected, for a later preempt call.

        If Headroom does not evict pods for memory, only the latest pod is kept.
        """
        version = pod.metadata.resource_version
        rejected = RejectedPod(version, at_s, rows, codes, snap.names)
        self._rejected_pods[pod.metadata.uid] = rejected
        if not self.cluster.rules.evict_for_memory:
            self._rejected_pods.trim(1)

    def last_rejection(self, uid: str) -> RejectedPod | None:
        """Return the nodes that the pod's last filter call rejected, or None if they are no longer
        kept."""
        return self._rejected_pods.get(uid)

    def rejected_for_memory(self, uid: str) -> list[str]:
        """Return the nodes that the pod's last filter call rejected, and on which evictions could
        help.

        These nodes passed kube-scheduler's own filters. The list is empty if the rejected nodes are
        no longer kept.
        """
        last = self._rejected_pods.get(uid)
        return last.names() if last else []


def rows_of(offered: Offered, snap: Snapshot) -> Rows:
    """Decode the names of the offered nodes and return their rows, with -1 for unknown nodes.

    If only names were offered, their order may be changed, because this is faster. The order does
    not matter, because kube-scheduler reads the response by name.
    """
    offered.decode_names()
    if offered.objects is not None:
        return snap.rows(offered.names)
    offered.names, rows = snap.sorted_by_row(offered.names)
    return rows


def are_templates(offered: Offered, snap: Snapshot) -> bool:
    """Return whether the nodes are an autoscaler's templates, which are whole objects of unknown
    nodes."""
    return bool(offered.objects) and bool((snap.rows(offered.names) < 0).all())
