"""Chooses preemption victims for a pod that fits nowhere, by correcting kube-scheduler's proposal.

kube-scheduler proposes victims by the resources that it counts, such as replicas, CPU, and perhaps
the node's total GPU memory. It does not consider which device the preemptor would get. So for each
offered node, this module searches for the smallest set of victims with two properties:

* Without the victims, the preemptor fits on every device that it could get.
* The victims free enough of each requested resource (``evictable_pods.Needs``).

Pods without managed GPUs stay victims if kube-scheduler proposed them, but are never added. A node
on which no eviction helps is omitted.

kube-scheduler does not offer nodes on which only GPU memory is short, because they passed its own
filters and only Headroom rejected them. The best of these nodes is added if it is better than all
offered nodes.

Pods that are leaving anyway count as gone. If the preemptor fits without them, no other pod is
evicted. Leaving pods that kube-scheduler may evict are returned as victims, which only holds the
node for the preemptor. Otherwise there are no victims, and the preemptor waits.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from functools import cached_property
from heapq import nsmallest
from itertools import accumulate
from math import inf
from operator import itemgetter

import numpy as np

from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.fit import fit
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.visible_devices import Visible
from headroom.core.preemption.evictable_pods import (
    CRITICAL,
    Needs,
    as_evictable,
    is_evictable,
    is_stuck,
    leaving,
    left_bytes,
    may_preempt,
    only_resources_missing,
)
from headroom.core.preemption.victims import (
    NO_VICTIMS,
    OFFSET,
    Evictable,
    Rank,
    Tries,
    importance,
    rank,
    smallest,
    violators,
)
from headroom.core.rules.pod_requests import demands
from headroom.core.whatif.node_whatif import rejection_beside

#: The lowest rank of a set that violates a disruption budget. Sets without violations rank lower.
VIOLATING: Rank = (1, *NO_VICTIMS[1:])
#: Maximum number of what-if computations for one preemptor. Each takes half a millisecond.
MAX_TRIES = 500
#: Maximum number of offered nodes, and of other nodes, that are examined. Nodes with the least
#: important pods come first. kube-scheduler offers a tenth of all nodes, or a hundred nodes.
MAX_NODES = 512
#: The search waits for pods that end within this number of seconds instead of evicting other pods.
SOON_S = 120.0
#: If at most this many nodes are offered, all are examined, so that the record shows why the others
#: lost.
COMPARED = 8


@dataclass(frozen=True, slots=True)
class Offer:
    """kube-scheduler's victims on one node."""

    uids: tuple[str, ...] = ()
    pdb_violations: int = 0
    #: Victims that kube-scheduler sent as whole objects, by uid.
    pods: Mapping[str, Pod] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Victims:
    """The pods to evict from one node."""

    node: str
    #: The victims with managed GPUs, most important first, including pods that are leaving anyway.
    pods: tuple[Pod, ...]
    #: Uids of kube-scheduler's victims without managed GPUs.
    others: tuple[str, ...]
    pdb_violations: int
    #: The rank that decides between nodes, over the pods that are not leaving anyway.
    rank: Rank
    #: The rank that kube-scheduler computes for the node, or None if some of its victims are
    #: unknown here.
    listed: Rank | None
    #: Whether kube-scheduler proposed the node.
    offered: bool
    #: Whether kube-scheduler proposed exactly these victims.
    as_offered: bool

    @property
    def uids(self) -> tuple[str, ...]:
        return (*(pod.metadata.uid for pod in self.pods), *self.others)

    @property
    def leaving_anyway(self) -> bool:
        return self.rank == NO_VICTIMS and not self.others


@dataclass(frozen=True, slots=True)
class Preemption:
    """The result of the search.

    If ``best`` is None, evictions do not help or are unnecessary because the pod fits soon.
    """

    best: Victims | None = None
    #: Nodes that lost, next best first.
    others: tuple[Victims, ...] = ()
    #: Number of offered nodes on which no helpful eviction was found.
    helpless: int = 0
    #: Whether the preemptor fits as soon as terminating pods have ended.
    soon: bool = False
    #: The examined nodes that were not offered, if no helpful eviction was found on any node.
    helpless_nodes: tuple[str, ...] = ()
    #: Whether some node was not examined completely.
    cut_short: bool = False


def preemption(
    state: Cluster,
    pod: Pod,
    offered: Mapping[str, Offer],
    rejected: Iterable[str],
    now_s: float,
    without_violations: bool = False,
) -> Preemption:
    """Return which pods to evict from which node so that the pod fits. Changes nothing.

    ``offered`` contains kube-scheduler's victims by node, and ``rejected`` the nodes that passed
    kube-scheduler's own filters for this pod but that Headroom rejected. ``without_violations``
    considers only victims whose evictions violate no disruption budget. ``now_s`` is the time of
    the monotonic clock.
    """
    request = state.understand(pod)
    if not isinstance(request, VramRequest) or not request.asks:
        return Preemption()
    if not may_preempt(pod) or state.budgets.unlisted:
        return Preemption()
    search = _Search(state, pod, request, now_s)
    found: list[Victims] = []
    ceiling = VIOLATING if without_violations else None
    examined = nsmallest(MAX_NODES, offered, key=search.sort_key)
    not_offered = [name for name in rejected if name not in offered]
    not_offered = nsmallest(MAX_NODES, not_offered, key=search.sort_key)
    search.compute_needs([*examined, *not_offered])
    candidates = [search.candidate(name, offered.get(name)) for name in examined + not_offered]
    helpless, soon = candidates[: len(examined)].count(None), False
    for candidate in sorted(filter(None, candidates), key=_Candidate.sort_key):
        best = min((each.rank for each in found), default=ceiling)
        limit = best if not candidate.offered or len(offered) > COMPARED else ceiling
        if limit is not None and candidate.least >= limit:
            continue
        victims, fits_anyway = candidate.victims(limit, whole=not found)
        soon = soon or fits_anyway
        if victims is not None:
            found.append(victims)
        elif candidate.offered:
            helpless += 1
    cut_short = search.tries.left <= 0 or len(examined) < len(offered)
    found.sort(key=lambda each: (each.rank, not each.offered, each.node))
    if not found or (soon and not found[0].leaving_anyway):
        nodes = () if found else tuple(not_offered)
        return Preemption(soon=soon, helpless_nodes=nodes, helpless=helpless, cut_short=cut_short)
    return Preemption(found[0], tuple(found[1:]), helpless, soon, cut_short=cut_short)


class _Search:
    """The part of the search that does not depend on the node."""

    def __init__(self, state: Cluster, pod: Pod, request: VramRequest, now_s: float) -> None:
        self.state, self.pod, self.request, self.now_s = state, pod, request, now_s
        self.tries = Tries(MAX_TRIES)
        self.demands = demands(pod)
        self.held_for = state.holds.nominees_before(pod, now_s)
        #: The bytes needed on each device for each ask, by node.
        self.needed_bytes: dict[str, list[list[int]]] = {}

    def compute_needs(self, names: Sequence[str]) -> None:
        """Compute the pod's needs on all of these nodes in one step."""
        snap = self.state.snapshot()
        rows = snap.rows(names)
        rows = rows[rows >= 0]
        part = snap.part(rows)
        verdicts = fit(self.request, part, np.arange(len(rows)), self.now_s)
        needs = [each.need_bytes.tolist() for each in verdicts.asks]
        for i, node in enumerate(part.nodes):
            self.needed_bytes[node.name] = [of_ask[i] for of_ask in needs]

    def sort_key(self, name: str) -> tuple[int, str]:
        """Return a sort key. Nodes that a pod is already leaving come first, and the other nodes
        are ordered by their least important pods."""
        pods = self.state.pods_on(name)
        if any(pod.metadata.deletion_timestamp for pod in pods):
            return NO_VICTIMS[1], name
        return min((pod.priority for pod in pods), default=CRITICAL), name

    def candidate(self, name: str, offer: Offer | None) -> "_Candidate | None":
        """Return the node as a candidate, or None if evicting pods cannot help there."""
        snap = self.state.snapshot()
        terms = snap.nodes[snap.row_of[name]] if name in snap.row_of else None
        if terms is None or terms.reason is not None or terms.fresh_until_s < self.now_s:
            return None
        # If pods leave the node for this pod, wait for them however long they take to end.
        own = self.state.holds.node_of(self.pod.metadata.uid) == name
        going = leaving(self.state, name, self.now_s, inf if own else SOON_S)
        pods = {
            pod.metadata.uid: pod
            for pod in self.state.pods_on(name)
            if pod.metadata.uid not in going
            and is_evictable(pod, self.pod)
            and not is_stuck(self.state, pod, self.now_s)
        }
        if offer is None and not pods and not going:
            return None
        candidate = _Candidate(self, name, terms, offer, pods, going)
        return candidate if candidate.possible else None


class _Candidate:
    """One node from which pods could be evicted."""

    def __init__(
        self,
        search: _Search,
        name: str,
        terms: NodeTerms,
        offer: Offer | None,
        pods: Mapping[str, Pod],
        leaving: Set[str],
    ) -> None:
        self._search = search
        self.name, self._terms = name, terms
        self.offered, self._offer = offer is not None, offer or Offer()
        self._pods, self._leaving = pods, leaving
        self._needed_bytes = search.needed_bytes[name]
        self._nominees = search.held_for.get(name, ())
        self._evictable = {uid: as_evictable(pod) for uid, pod in pods.items()}
        sitting = {pod.metadata.uid: pod for pod in search.state.pods_on(name)}
        #: Pods that are leaving anyway and that kube-scheduler may evict.
        self._named = [
            pod
            for uid, pod in sitting.items()
            if uid in leaving and pod.metadata.deletion_timestamp and is_evictable(pod, search.pod)
        ]
        self._others = tuple(uid for uid in self._offer.uids if uid not in sitting)
        self._proposed = [sitting[uid] for uid in self._offer.uids if uid in sitting]
        #: Uids of kube-scheduler's victims that must leave in any case.
        self._kept = frozenset(
            ()
            if only_resources_missing(search.pod, self._proposed)
            else (p.metadata.uid for p in self._proposed)
        )
        #: Whether kube-scheduler's victims, or others in their place, can be evicted.
        self.possible = self._kept - leaving <= pods.keys()
        #: A lower bound for the rank of every set of victims.
        self.least = NO_VICTIMS
        if not leaving:
            self.possible = self.possible and bool(self._floors or self._others)
            self.least = min((floor for floor, _ in self._floors), default=NO_VICTIMS)

    def sort_key(self) -> tuple[bool, Rank, str]:
        """Return a sort key. Offered nodes come first, and among them the nodes with the least
        important pods, so that other nodes can be skipped."""
        return not self.offered, self.least, self.name

    @cached_property
    def _floors(self) -> list[tuple[Rank, set[str]]]:
        """Return (lower bound of the rank, pods) for each device on which eviction can help.

        No set of victims that frees enough on the device ranks below the bound. The lowest bound
        comes first. If the device plugin does not choose, the pod could get any device.
        """
        request = self._search.request
        ranks = [rank([pod]) for pod in self._evictable.values()]
        if not ranks:
            return []
        found: list[tuple[Rank, set[str]]] = []
        for terms, need_bytes in zip(self._terms.devices, self._needed_bytes[0], strict=False):
            on = {holder.uid for holder in terms.holders}
            floor: Rank | None = min(ranks)
            if request.visible is Visible.BY_PLUGIN:
                is_requested = terms.device.resource == request.asks[0].resource
                floor = self._floor(terms, need_bytes, min(ranks)) if is_requested else None
            if floor is not None:
                found.append((floor, on))
        return sorted(found, key=itemgetter(0))

    def _floor(self, terms: DeviceTerms, need_bytes: int, least: Rank) -> Rank | None:
        staying = [h for h in terms.holders if h.observed and h.uid not in self._leaving]
        leavers = [(h, self._evictable[h.uid]) for h in staying if h.uid in self._evictable]
        if not terms.common:
            all_can_go = len(leavers) == len(staying)
            return rank([pod for _, pod in leavers]) if all_can_go else None
        missing_bytes = need_bytes - left_bytes(terms, self._leaving)
        if missing_bytes <= 0:
            return least
        leavers.sort(key=lambda each: each[1].priority)
        freed = list(accumulate(h.charged_bytes for h, _ in leavers))
        if not freed or freed[-1] < missing_bytes:
            return None
        highest = leavers[bisect_left(freed, missing_bytes)][1].priority
        largest = accumulate(sorted((h.charged_bytes for h, _ in leavers), reverse=True))
        count = 1 + sum(freed_bytes < missing_bytes for freed_bytes in largest)
        summed = (count - 1) * (leavers[0][1].priority + OFFSET) + highest + OFFSET
        return 0, highest, summed, count, -max(pod.started_s for _, pod in leavers)

    def victims(self, below: Rank | None, whole: bool) -> tuple[Victims | None, bool]:
        """Return the best victims with a rank below ``below`` (any rank if None), and
        ``is_enough``.

        ``is_enough`` states whether the preemptor fits without victims when the pods that leave
        anyway have left. ``whole`` is passed to ``smallest``.
        """
        search = self._search
        budgets = search.state.budgets.over(self._pods.values())
        uids = smallest(
            list(self._evictable.values()),
            budgets,
            self._floors,
            self._reserving,
            self._fits,
            search.tries,
            below,
            whole,
        )
        if uids is None:
            return None, False
        if not uids and not self._named and not self._others:
            return None, True
        chosen = [self._evictable[uid] for uid in uids]
        violations = len(violators(chosen, budgets))
        violations += min(self._offer.pdb_violations, len(self._others))
        named = [*(self._pods[uid] for uid in uids), *self._named]
        named.sort(key=lambda pod: importance(as_evictable(pod)))
        sent = self._offer.pods
        others = [as_evictable(sent[uid]) for uid in self._others if uid in sent]
        listed: Rank | None = (violations, *rank([*map(as_evictable, named), *others])[1:])
        if len(others) < len(self._others):
            # Assume the highest priority that victims can have.
            others = [Evictable(uid, search.pod.priority - 1, 0) for uid in self._others]
            listed = None
        victims = Victims(
            node=self.name,
            pods=tuple(named),
            others=self._others,
            pdb_violations=violations,
            rank=(violations, *rank([*chosen, *others])[1:]),
            listed=listed,
            offered=self.offered,
            as_offered=self.offered
            and {pod.metadata.uid for pod in named} | {*self._others} == {*self._offer.uids},
        )
        return victims, victims.leaving_anyway

    def _reserving(self, uids: frozenset[str]) -> bool:
        """Return whether evicting the pods may free enough. This is cheap to compute."""
        gone = uids | self._leaving
        if self.offered and not (
            # According to kube-scheduler's own checks, at least one pod has to leave.
            (gone or self._others) and self._kept <= gone and self._needs.met(gone)
        ):
            return False
        request = self._search.request
        if request.visible is not Visible.BY_PLUGIN:
            return True
        return all(
            any(
                terms.device.resource == ask.resource and left_bytes(terms, gone) >= need_bytes
                for terms, need_bytes in zip(self._terms.devices, needs, strict=False)
            )
            for ask, needs in zip(request.asks, self._needed_bytes, strict=True)
        )

    @cached_property
    def _needs(self) -> Needs:
        search = self._search
        return Needs(search.state, self.name, search.demands, self._proposed, self._nominees)

    def _fits(self, uids: frozenset[str]) -> bool:
        search = self._search
        gone, on = uids | self._leaving, self.name
        return not rejection_beside(
            search.state, search.request, on, self._nominees, search.now_s, gone
        )
