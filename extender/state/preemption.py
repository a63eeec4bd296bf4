"""Who has to leave which node for a newcomer that fits nowhere: kube-scheduler's word, corrected.

kube-scheduler proposes victims by what it counts: replicas, CPU, the node's memory in all where it
is mirrored. Which device the newcomer would get is not among that. So for each node that it offers
the smallest set is looked for whose removal makes the newcomer fit on every device that it could be
given then (``placement.victims``), and which frees as much as kube-scheduler's own victims of
everything that the newcomer asks for. Pods that are none of ours stay victims where kube-scheduler
needs them, and never become one here. A node that no removal helps is left out.

Besides there are nodes that kube-scheduler did not offer, because there only memory is short:
those which passed its own filters a moment ago, in the very filter call, and which we refused. One
of them is added where it is better than all that were offered.

Who is leaving anyway is counted as gone. Where that alone makes room nobody else has to go: those
who leave are named as the victims, if kube-scheduler may evict them, which holds the place and does
nothing else; else nobody is named, and the newcomer waits.
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

from contract.kube import Pod
from extender.placement.device_accounting import DeviceTerms
from extender.placement.fit import Verdicts, fit
from extender.placement.request import VramRequest
from extender.placement.snapshot import NodeTerms
from extender.placement.snapshot_builder import build
from extender.placement.victims import (
    NOBODY,
    NOT_STARTED_S,
    OFFSET,
    Evictable,
    Rank,
    Tries,
    importance,
    rank,
    smallest,
    violators,
)
from extender.placement.visible_devices import Visible
from extender.state.cluster_state import ClusterState
from extender.state.heartbeats import age
from extender.state.node_whatif import OVERDUE_S, leaving, overdue_s, vacated
from extender.state.nominations import priority
from extender.state.pod_requests import demands
from extender.state.scheduler_deficits import Needs, plain

#: The kubelet marks the API server's copy of a static pod so.
MIRRORED = "kubernetes.io/config.mirror"
#: Of system-cluster-critical and system-node-critical, and more than any user may give.
CRITICAL = 2_000_000_000
#: No set without a violation ranks as high.
VIOLATING: Rank = (1, *NOBODY[1:])
#: How often nodes are weighed without somebody, for one newcomer: half a millisecond each time.
MOST_TRIES = 500
#: Of the nodes that were offered, and of the others, so many are looked at: those first where the
#: least important pods are. kube-scheduler offers a tenth of all nodes, or a hundred.
MOST_LOOKED_AT = 512
#: Who ends within that time is waited for, rather than somebody else be evicted.
SOON_S = 120.0
#: Of offered nodes that many are looked at whatever the others gave, so that it can be told what
#: they lost by.
COMPARED = 8


@dataclass(frozen=True, slots=True)
class Offer:
    """kube-scheduler's victims on one node."""

    uids: tuple[str, ...] = ()
    pdb_violations: int = 0
    #: Uid -> those of them that were sent whole.
    pods: Mapping[str, Pod] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Victims:
    node: str
    #: Those who have to leave, the most important first; then the ones kube-scheduler named that
    #: we know nothing of.
    pods: tuple[Pod, ...]
    #: Of kube-scheduler's victims those that are none of ours.
    others: tuple[str, ...]
    pdb_violations: int
    #: What decides between nodes: of those who would not leave anyway.
    rank: Rank
    #: As kube-scheduler ranks the same node; None where it has victims that we do not know.
    listed: Rank | None
    #: Whether kube-scheduler proposed the node, and whether these very victims.
    offered: bool
    as_offered: bool

    @property
    def uids(self) -> tuple[str, ...]:
        return (*(pod.metadata.uid for pod in self.pods), *self.others)

    @property
    def leaving_anyway(self) -> bool:
        return self.rank == NOBODY and not self.others


@dataclass(frozen=True, slots=True)
class Preemption:
    """``best`` is None where nobody is to leave: nobody can help, or there is room soon anyway."""

    best: Victims | None = None
    #: Nodes that lost, the next best first.
    others: tuple[Victims, ...] = ()
    #: Nodes on which no removal helps, or none was found in time.
    helpless: int = 0
    #: Whether the newcomer fits as soon as those have left who are leaving already.
    soon: bool = False
    #: Whether some node was not looked at to the end.
    cut_short: bool = False


def may_preempt(pod: Pod) -> bool:
    return pod.spec.preemption_policy != "Never"


def may_leave(pod: Pod, newcomer: Pod) -> bool:
    """Whether the newcomer is worth more, and the pod could be evicted at all."""
    owners = pod.metadata.owner_references or ()
    return (
        priority(pod) < min(priority(newcomer), CRITICAL)
        and MIRRORED not in (pod.metadata.annotations or {})
        and not any(owner.kind == "Node" for owner in owners)
    )


def preemption(
    state: ClusterState,
    pod: Pod,
    offered: Mapping[str, Offer],
    rejected: Iterable[str],
    now_s: float,
    without_violations: bool = False,
) -> Preemption:
    """Say who has to leave which node for the pod.

    ``refused`` are nodes that passed kube-scheduler's own filters for this very pod and that we
    refused; ``without_violations``: no budget may be violated, whatever that costs. Changes
    nothing; ``now_s`` is the receiver's monotonic clock.
    """
    request = state.understand(pod)
    if not isinstance(request, VramRequest) or not request.asks or not may_preempt(pod):
        return Preemption()
    if state.budgets.awaited:
        return Preemption()
    search = _Search(state, pod, request, now_s)
    found: list[Victims] = []
    ceiling = VIOLATING if without_violations else None
    looked_at = nsmallest(MOST_LOOKED_AT, offered, key=search.glance)
    besides = [name for name in rejected if name not in offered]
    besides = nsmallest(MOST_LOOKED_AT, besides, key=search.glance)
    search.reckon([*looked_at, *besides])
    stages = [search.stage(name, offered[name]) for name in looked_at]
    helpless = stages.count(None)
    added = [search.stage(name) for name in besides]
    # Nodes on which the least important pods are come first, so that others need no look.
    queue = sorted((stage for stage in stages if stage), key=_Stage.prospect)
    queue += sorted((stage for stage in added if stage), key=_Stage.prospect)
    soon = False
    for stage in queue:
        best = min((each.rank for each in found), default=ceiling)
        limit = best if stage.offer is None or len(offered) > COMPARED else ceiling
        if limit is not None and stage.least >= limit:
            continue
        victims, room_anyway = stage.victims(limit, whole=not found)
        soon = soon or room_anyway
        if victims is not None:
            found.append(victims)
        elif stage.offer is not None:
            helpless += 1
    cut_short = search.tries.left <= 0 or len(looked_at) < len(offered)
    found.sort(key=lambda each: (each.rank, not each.offered, each.node))
    if soon and not (found and found[0].leaving_anyway):
        return Preemption(soon=True, helpless=helpless, cut_short=cut_short)
    if not found:
        return Preemption(helpless=helpless, cut_short=cut_short)
    return Preemption(found[0], tuple(found[1:]), helpless, soon, cut_short)


def answered(found: Preemption) -> list[Victims]:
    """What kube-scheduler is told: of these nodes it takes the best one, by the same order.

    So that it is known which one that is, no node is named that it could take for as good; where it
    cannot be known how it ranks them, the best one alone. Nodes that were not offered are named
    only when they are the best.
    """
    best = found.best
    if best is None:
        return []
    if best.listed is None or best.leaving_anyway:
        return [best]
    return [
        best,
        *(
            other
            for other in found.others
            if other.offered and other.listed is not None and other.listed > best.listed
        ),
    ]


class _Search:
    """What is the same for all nodes."""

    def __init__(
        self,
        state: ClusterState,
        pod: Pod,
        request: VramRequest,
        now_s: float,
    ) -> None:
        self.state, self.pod, self.request, self.now_s = state, pod, request, now_s
        self.tries = Tries(MOST_TRIES)
        self.demands = demands(pod)
        self.held_for = state.held_for(pod, now_s)
        #: Node -> of each ask what it needs on each device.
        self.needed_bytes: dict[str, list[list[int]]] = {}

    def reckon(self, names: Sequence[str]) -> None:
        """What the pod needs on these nodes, at once."""
        snap = self.state.snapshot()
        rows = snap.rows(names)
        rows = rows[rows >= 0]
        part = snap.part(rows)
        verdicts = fit(self.request, part, np.arange(len(rows)), self.now_s)
        needs = [each.need_bytes.tolist() for each in verdicts.asks]
        for i, node in enumerate(part.nodes):
            self.needed_bytes[node.name] = [of_ask[i] for of_ask in needs]

    def glance(self, name: str) -> tuple[int, str]:
        """Of thousands of nodes those come first where somebody leaves already, or where the least
        important pods are."""
        pods = self.state.sitting_on(name)
        if any(pod.metadata.deletion_timestamp for pod in pods):
            return NOBODY[1], name
        return min(map(priority, pods), default=CRITICAL), name

    def stage(self, name: str, offer: Offer | None = None) -> "_Stage | None":
        """None where evicting pods cannot help."""
        snap = self.state.snapshot()
        row = snap.row_of.get(name)
        if row is None:
            return None
        terms = snap.nodes[row]
        if terms.reason is not None or terms.fresh_until_s < self.now_s:
            return None
        # Where they leave for this very pod it is waited for them however long they take.
        own = self.state.nominations.node_of(self.pod.metadata.uid) == name
        going = leaving(self.state, name, self.now_s, inf if own else SOON_S)
        pods = {
            pod.metadata.uid: pod
            for pod in self.state.sitting_on(name)
            if pod.metadata.uid not in going
            and may_leave(pod, self.pod)
            and not self._is_stuck(pod)
        }
        if offer is None and not pods and not going:
            return None
        stage = _Stage(self, name, terms, offer, pods, going)
        return stage if stage.possible else None

    def _is_stuck(self, pod: Pod) -> bool:
        """Whether it should be gone by now, and who knows what it waits for: to evict it once more
        frees nothing."""
        late_s = overdue_s(self.state, pod, self.now_s)
        return late_s is not None and late_s > OVERDUE_S


class _Stage:
    """One node."""

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
        self.name, self._terms, self.offer = name, terms, offer
        self._pods, self._leaving = pods, leaving
        self._needed_bytes = search.needed_bytes[name]
        self._evictable = {uid: _evictable(pod) for uid, pod in pods.items()}
        sitting = {pod.metadata.uid: pod for pod in search.state.sitting_on(name)}
        #: Those who leave anyway and that kube-scheduler may call victims.
        self._named = [
            pod
            for uid, pod in sitting.items()
            if uid in leaving and pod.metadata.deletion_timestamp and may_leave(pod, search.pod)
        ]
        proposed = offer.uids if offer else ()
        self._others = tuple(uid for uid in proposed if uid not in sitting)
        self._proposed = [sitting[uid] for uid in proposed if uid in sitting]
        #: Uids of those that have to leave in any case.
        self._kept = frozenset(
            () if plain(search.pod, self._proposed) else (p.metadata.uid for p in self._proposed)
        )
        #: Whether kube-scheduler's victims can be had, or others in their place.
        self.possible = self._kept - leaving <= pods.keys()
        #: No set of victims ranks lower.
        self.least = NOBODY
        if not leaving:
            self.possible = self.possible and bool(self._floors or self._others)
            self.least = min((floor for floor, _ in self._floors), default=NOBODY)

    def prospect(self) -> tuple[Rank, str]:
        return self.least, self.name

    @cached_property
    def _floors(self) -> list[tuple[Rank, set[str]]]:
        """Of each device on which room can be made a rank below which no set makes it, and who may
        leave it; the lowest first. Where the plugin does not choose it could be any device."""
        request, ones = self._search.request, list(map(_rank_of_one, self._evictable.values()))
        if not ones:
            return []
        found: list[tuple[Rank, set[str]]] = []
        for terms, need_bytes in zip(self._terms.devices, self._needed_bytes[0], strict=False):
            on = {h.uid for h in terms.holders if h.uid in self._evictable}
            floor: Rank | None = min(ones)
            if request.visible is Visible.BY_PLUGIN:
                ours = terms.device.resource == request.asks[0].resource
                floor = self._floor(terms, need_bytes, min(ones)) if ours else None
            if floor is not None:
                found.append((floor, on))
        return sorted(found, key=itemgetter(0))

    def _floor(self, terms: DeviceTerms, need_bytes: int, least: Rank) -> Rank | None:
        staying = [h for h in terms.holders if h.observed and h.uid not in self._leaving]
        mine = [(h, self._evictable[h.uid]) for h in staying if h.uid in self._evictable]
        if not terms.common:
            return None if len(mine) < len(staying) else rank([pod for _, pod in mine] or ())
        missing_bytes = need_bytes - left_bytes(terms, self._leaving)
        if missing_bytes <= 0:
            return least
        mine.sort(key=lambda each: each[1].priority)
        freed = list(accumulate(h.charged_bytes for h, _ in mine))
        if not freed or freed[-1] < missing_bytes:
            return None
        highest = mine[bisect_left(freed, missing_bytes)][1].priority
        largest = accumulate(sorted((h.charged_bytes for h, _ in mine), reverse=True))
        count = 1 + sum(freed_bytes < missing_bytes for freed_bytes in largest)
        summed = (count - 1) * (mine[0][1].priority + OFFSET) + highest + OFFSET
        return 0, highest, summed, count, -max(pod.started_s for _, pod in mine)

    def victims(self, below: Rank | None, whole: bool) -> tuple[Victims | None, bool]:
        """The smallest set, of a lower rank than ``below`` if that is given, ``whole`` as
        ``smallest`` has it; and whether there is room as soon as those have left who are leaving
        anyway."""
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
        strangers = self._strangers()
        if self._others and self.offer is not None:
            violations += min(self.offer.pdb_violations, len(self._others))
        named = [*(self._pods[uid] for uid in uids), *self._named]
        named.sort(key=lambda pod: importance(_evictable(pod)))
        listed = rank([*map(_evictable, named), *(strangers or ())])
        own = rank([*chosen, *(strangers if strangers is not None else self._worst())])
        victims = Victims(
            node=self.name,
            pods=tuple(named),
            others=self._others,
            pdb_violations=violations,
            rank=(violations, *own[1:]),
            listed=None if strangers is None else (violations, *listed[1:]),
            offered=self.offer is not None,
            as_offered=self.offer is not None
            and {pod.metadata.uid for pod in named} | {*self._others} == {*self.offer.uids},
        )
        return victims, victims.leaving_anyway

    def _strangers(self) -> list[Evictable] | None:
        """Those of kube-scheduler's victims that are none of ours; None where nothing is known of
        one of them but that it is."""
        told = self.offer.pods if self.offer else {}
        found = [_evictable(told[uid]) for uid in self._others if uid in told]
        return found if len(found) == len(self._others) else None

    def _worst(self) -> list[Evictable]:
        return [Evictable(uid, priority(self._search.pod) - 1, 0) for uid in self._others]

    def _reserving(self, uids: frozenset[str]) -> bool:
        """Whether enough is freed, by what is cheap to know."""
        gone = uids | self._leaving
        if self.offer is not None and not (
            # Somebody is in the way there, whatever we think.
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
        beside = search.held_for.get(self.name, ())
        return Needs(search.state, self.name, search.demands, self._proposed, beside)

    def _fits(self, uids: frozenset[str]) -> bool:
        search = self._search
        gone = uids | self._leaving
        beside = search.held_for.get(self.name, ())
        terms = vacated(search.state, self.name, gone, search.pod, beside)
        return bool(self._judged(terms).fits[0])

    def _judged(self, terms: NodeTerms) -> Verdicts:
        search = self._search
        return fit(search.request, build([terms]), np.zeros(1, np.int64), search.now_s)


def left_bytes(terms: DeviceTerms, gone: Set[str]) -> int:
    """More is not left on the device when these have gone."""
    staying = [h for h in terms.holders if h.observed and h.uid not in gone]
    if staying and not terms.common:
        return -1
    return terms.allocatable_bytes - sum(holder.charged_bytes for holder in staying)


def _evictable(pod: Pod) -> Evictable:
    stamp = pod.status.start_time if pod.status else None
    since_s = age(stamp, 0.0) if stamp else None
    started_s = NOT_STARTED_S if since_s is None else round(-since_s)
    return Evictable(pod.metadata.uid, priority(pod), started_s)


def _rank_of_one(pod: Evictable) -> Rank:
    return rank([pod])
