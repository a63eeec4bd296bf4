"""The scheduler's verbs: bytes in, a decision on one snapshot, bytes out.

Filter, prioritize and preempt read one immutable snapshot, wait for nothing and promise nothing.
Bind is the only verb that changes the world; what it does is the ledger's business, given here as
a function.
"""

from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import structlog

from contract.decision import decision_id
from contract.gpunode import GPUNode, Reservation
from contract.kube import Pod
from contract.reasons import Reason
from extender.bounded import Bounded
from extender.observability.metrics import Telemetry
from extender.placement.fit import Codes
from extender.placement.fit_cache import FitCache
from extender.placement.non_gpu_pods import aside
from extender.placement.request import Unreadable, VramRequest
from extender.placement.snapshot import CODE_OF, REASONS, Rows, Snapshot
from extender.placement.top_nodes import Contender, best
from extender.scheduler import extender_v1
from extender.scheduler.assumed_binds import AssumedBinds
from extender.scheduler.retry_spreading import RetrySpreader
from extender.state.cluster_state import ClusterState
from extender.state.decision_records import TERMS, Asked, Candidate, Candidates, Ranked
from extender.state.journal import Decision, Journal, NodeSets, OfferedNodes, micros
from extender.state.node_templates import codes_of_new
from extender.state.node_whatif import rejection_beside
from extender.state.pending_pods import main_reason
from extender.state.preemption import Offer, answered, preemption
from extender.state.preemption_report import recorded
from extender.state.scheduling_preferences import prefers, prefers_no_schedule

log = structlog.get_logger()

#: Of those that were ranked, on record with the terms of their scores.
CONTENDERS = 5
#: All are alike: kube-scheduler decides as it would without us.
NO_PREFERENCE = extender_v1.encode_priorities(None)
#: Of a pod that was told before why it waits.
TRY_AGAIN = "no node has room; many pods wait, so this one is tried again within seconds"
#: kube-scheduler looks for victims by itself before it asks us.
PREEMPT_FOLLOWS_WITHIN_S = 5.0
#: Pods of which it is remembered which nodes refused them; each takes 50 kB at 5,000 nodes.
MOST_TURNED_AWAY = 64
#: Whether evicting pods could cure the reason of that code.
CURABLE = np.array([reason is not None and reason.evictable for reason in REASONS])

SENTENCES = [reason.sentence if reason else "" for reason in REASONS]

#: Binds a pod as kube-scheduler asked, given the pod and the node's object as this replica holds
#: them (None where it does not); returns a sentence when it could not, "" when the pod is bound.
Binder = Callable[[extender_v1.BindArgs, Pod | None, GPUNode | None], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The best of some rows."""

    #: Index into the rows.
    place: int
    #: The best of the rows with the terms of their scores, the winner first.
    contenders: tuple[Contender, ...]


class RejectedPod:
    """The nodes that one filter call refused; looked into when somebody asks."""

    def __init__(self, pod: Pod, rows: Rows, codes: Codes, snap: Snapshot, at_s: float) -> None:
        self.uid, self.version = pod.metadata.uid, pod.metadata.resource_version
        self.at_s = at_s
        # Not the snapshot: while somebody has it, the next one costs more.
        self._rows, self._codes, self._nodes = rows, codes, snap.nodes

    def names(self) -> list[str]:
        rows = self._rows[CURABLE[self._codes] & (self._rows >= 0)]
        return [self._nodes[row].name for row in rows.tolist()]


class Verbs:
    """``unready`` says in a sentence why nothing can be decided yet, "" when it can.

    ``shown`` is called with every pod that a filter call shows, before the decision. While
    ``observes`` nothing is rejected and nothing is preferred. With ``best_only`` filter returns the
    best node alone, unless a user's preference could favour another: kube-scheduler then scores no
    node.
    """

    def __init__(
        self,
        cluster: ClusterState,
        journal: Journal,
        telemetry: Telemetry,
        bind: Binder,
        unready: Callable[[], str],
        shown: Callable[[Pod], None],
        monotonic_s: Callable[[], float],
        wall_s: Callable[[], float],
        observes: Callable[[], bool] = bool,
        best_only: bool = False,
    ) -> None:
        self._cluster = cluster
        self._journal = journal
        self._telemetry = telemetry
        self._bind = bind
        self._unready = unready
        self._shown = shown
        self._monotonic_s = monotonic_s
        self._wall_s = wall_s
        #: Whether all is let pass, and what would have been decided goes on record only.
        self._observes = observes
        self._best_only = best_only
        self._weighings = FitCache(cluster.rules.weights)
        #: Uid -> which nodes filter refused it last, of the last pods: kube-scheduler asks preempt
        #: about one next.
        self._turned_away: Bounded[str, RejectedPod] = Bounded(MOST_TURNED_AWAY)
        self._coming = AssumedBinds(cluster)
        self._node_sets = NodeSets()
        self._pace = RetrySpreader()

    def rules_changed(self) -> None:
        """What was made of the rules of before is forgotten."""
        self._weighings = FitCache(self._cluster.rules.weights)
        self._coming.rules_changed()

    def filter(self, body: bytes) -> bytes:
        """Which of the offered nodes can take the pod, and why not the others."""
        began_s = self._monotonic_s()
        unready, observes = self._unready(), self._observes()
        if unready and not observes:
            return self.filter_error(unready)
        try:
            offered = extender_v1.decode_offer(body)
        except extender_v1.MalformedBody as err:
            return self.filter_error(str(err))
        if unready:
            against = _nothing(offered)
            return extender_v1.encode_filter(offered, against == 0, against, SENTENCES)
        if self._offers_only_new(offered):
            return self._filter_new(offered, began_s, observes)
        self._shown(offered.pod)
        snap = self._cluster.settled()
        request = self._cluster.understand(offered.pod)
        rows = snap.rows(offered.names)
        codes = self._codes(request, rows, snap)
        wanted = request if isinstance(request, VramRequest) and request.asks else None
        sure = True
        if wanted:
            now_s = self._monotonic_s()
            left = self._coming.leave_room(offered.pod, wanted, rows, codes, snap, now_s)
            held = self._hold_places(offered.pod, rows, codes, snap)
            sure = not (left or held)
            self._cluster.usual.see(wanted, offered.pod, snap, rows)
            if offered.objects:
                self._answer_new(offered.objects, wanted, rows, codes)
        against = _nothing(offered) if observes else codes
        kept = against == 0
        first: _Chosen | None = None
        known = bool((rows[kept] >= 0).all())
        if wanted and not observes and self._best_only and known:
            places = np.flatnonzero(kept)
            first = self._undisputed(offered.pod, wanted, rows[places], snap)
            if first is not None:  # the others are not rejected, only left out
                against, kept = _nothing(offered), np.zeros(len(rows), np.bool_)
                kept[places[first.place]] = True
        passed = np.flatnonzero(kept)
        only = ""
        if wanted and len(passed) == 1 and known and not observes:  # then prioritize is not called
            only = offered.names[passed[0]]
            self._coming.expect(offered.pod, wanted, only, self._monotonic_s())
        answer = extender_v1.encode_filter(offered, kept, against, SENTENCES)
        if wanted and not len(passed) and self._crowded(offered.pod, began_s):
            answer = extender_v1.encode_filter_error(TRY_AGAIN)
        took_s = self._monotonic_s() - began_s
        at, nodes = snap.generation, self._node_sets.offered(snap.row_of, rows)
        self._record(offered.pod, request, at, nodes, codes, sure, only, took_s, observes)
        if first is not None:
            self._note_ranked(offered.pod, began_s, snap, len(places), only, first.contenders)
        if wanted and not observes:
            self._turn_away(RejectedPod(offered.pod, rows, codes, snap, began_s))
        return answer

    def _offers_only_new(self, offered: extender_v1.Offered) -> bool:
        """Whether the nodes are whole objects of which none is known: an autoscaler's templates."""
        if not offered.objects:
            return False
        return bool((self._cluster.settled().rows(offered.names) < 0).all())

    def _filter_new(self, offered: extender_v1.Offered, began_s: float, observes: bool) -> bytes:
        """Answer filter for an autoscaler's templates. Nothing is kept of the call: no bind follows
        it, and the pod may be a template too."""
        pod, codes = offered.pod, _nothing(offered)
        request = self._cluster.understand(pod)
        if isinstance(request, Unreadable):
            codes[:] = CODE_OF[request.reason]
        elif request.asks:
            unknown = np.full(len(codes), -1, np.int64)
            self._answer_new(offered.objects or [], request, unknown, codes)
        against = _nothing(offered) if observes else codes
        kept = against == 0
        log.info(
            "filtered_new_nodes",
            namespace=pod.metadata.namespace,
            pod=pod.metadata.name,
            offered=len(codes),
            fits=int((codes == 0).sum()),
            took_ms=round(1000 * (self._monotonic_s() - began_s), 3),
        )
        return extender_v1.encode_filter(offered, kept, against, SENTENCES)

    def _answer_new(
        self, objects: Sequence[msgspec.Raw], request: VramRequest, rows: Rows, codes: Codes
    ) -> None:
        """Replace the codes of unknown nodes with what their own objects say."""
        unknown = np.flatnonzero(rows < 0)
        if len(unknown):
            new = [objects[place] for place in unknown.tolist()]
            codes[unknown] = codes_of_new(new, request, self._cluster.rules)

    def filter_error(self, message: str) -> bytes:
        """kube-scheduler backs off after an Error, and shows it on the pod."""
        self._telemetry.verb_errors.labels("filter").inc()
        log.warning("filter_error", message=message)
        return extender_v1.encode_filter_error(message)

    def prioritize(self, body: bytes) -> bytes:
        """Name the best of the nodes that filter let pass; of a pod that asks for no GPU those
        where it takes nothing away. Raises ``wire.MalformedBody``."""
        began_s = self._monotonic_s()
        observes = self._observes()
        offered = extender_v1.decode_offer(body)
        if self._offers_only_new(offered):
            return NO_PREFERENCE
        snap = self._cluster.settled()
        request = self._cluster.understand(offered.pod)
        winner: str | None = None
        contenders: tuple[Contender, ...] = ()
        if isinstance(request, VramRequest):
            rows = snap.rows(offered.names)
            if not request.asks:  # nothing to remember: it is none of ours
                chosen = aside(snap, rows)
                return (
                    NO_PREFERENCE if observes else extender_v1.encode_alike(offered.names, chosen)
                )
            known = rows >= 0
            first = self._first(request, rows[known], snap)
            if first is not None:
                winner, contenders = first.contenders[0].node, first.contenders
                if not observes:
                    self._coming.expect(offered.pod, request, winner, self._monotonic_s())
        self._note_ranked(offered.pod, began_s, snap, len(offered.names), winner or "", contenders)
        return NO_PREFERENCE if observes else extender_v1.encode_priorities(winner)

    def preempt(self, body: bytes) -> bytes:
        """Of the nodes with victims that kube-scheduler proposes those on which somebody's leaving
        makes room, with those who have to leave; raises ``wire.MalformedBody``. Nobody is evicted
        for nothing."""
        began_s = self._monotonic_s()
        pod, offered = extender_v1.decode_preempt(body)
        request = self._cluster.understand(pod)
        proposed = {node: offer for node, offer in offered.items() if offer.uids}
        if isinstance(request, VramRequest) and not request.asks:
            return extender_v1.encode_preempt(proposed)
        observes = self._observes()
        if self._unready():  # who would be evicted on what is not known yet
            return extender_v1.encode_preempt(proposed if observes else {})
        rejected = self._rejected_for_memory(pod, began_s)
        found = preemption(self._cluster, pod, offered, rejected, began_s)
        told = answered(found)
        if found.best is not None and not observes:
            self._cluster.nominations.expect(pod, found.best.node, began_s)
        took_us = micros(self._monotonic_s() - began_s)
        part = recorded(found, self._wall_s(), took_us, len(offered), len(told))
        self._journal.note(pod, part, part.at_s)
        if observes:
            return extender_v1.encode_preempt(proposed)
        self._telemetry.preemptions.labels(part.source or "none").inc()
        log.info(
            "preempted",
            decision_id=decision_id(pod.metadata.uid, pod.metadata.resource_version),
            namespace=pod.metadata.namespace,
            pod=pod.metadata.name,
            node=part.node,
            victims=[victim.uid for victim in part.victims],
            source=part.source,
            took_ms=round(took_us / 1000, 3),
        )
        return extender_v1.encode_preempt(
            {each.node: Offer(each.uids, each.pdb_violations) for each in told}
        )

    def _rejected_for_memory(self, pod: Pod, now_s: float) -> list[str]:
        """The nodes that have passed kube-scheduler's own filters for this very version of the pod,
        and that we refused for what the leaving of others could cure."""
        last = self._turned_away.get(pod.metadata.uid)
        if last is None or last.version != pod.metadata.resource_version:
            return []
        return last.names() if now_s < last.at_s + PREEMPT_FOLLOWS_WITHIN_S else []

    def rejected_for_memory(self, uid: str) -> list[str]:
        """The same of the last version that was shown here, however long ago; empty where that is
        not known any more."""
        last = self._turned_away.get(uid)
        return last.names() if last else []

    def coming(self, now_s: float) -> Iterator[tuple[str, str, Reservation]]:
        """The pods whose bind is expected next: uid, node, and what filter leaves free for it."""
        return self._coming.reservations(now_s)

    def _turn_away(self, last: RejectedPod) -> None:
        self._turned_away[last.uid] = last
        most = MOST_TURNED_AWAY if self._cluster.rules.evict_for_memory else 1
        self._turned_away.trim(most)

    async def bind(self, body: bytes) -> bytes:
        """Reserve and bind; an Error makes kube-scheduler try the pod again, with back-off."""
        if (unready := self._unready()) and not self._observes():
            return self.bind_error(unready)
        try:
            args = extender_v1.decode_bind(body)
        except extender_v1.MalformedBody as err:
            return self.bind_error(str(err))
        self._coming.came(args.pod_uid)
        message = await self._bind(
            args, self._known(args.pod_uid), self._cluster.gpunode(args.node)
        )
        if message:
            return self.bind_error(message)
        return extender_v1.encode_bind("")

    def _known(self, uid: str) -> Pod | None:
        """The pod as it was shown last, unless the cluster told of the very same version.

        A filter call is a stranger's word where the port is open to more than kube-scheduler, and
        the version alone would not give away one that asks for less than the pod does.
        """
        seen, decision = self._cluster.pod(uid), self._journal.of_uid(uid)
        if decision is None:
            return seen
        shown = decision.pod
        told = seen and seen.metadata.resource_version == shown.metadata.resource_version
        return seen if told else shown

    def bind_error(self, message: str) -> bytes:
        self._telemetry.verb_errors.labels("bind").inc()
        log.warning("bind_error", message=message)
        return extender_v1.encode_bind(message)

    def _codes(self, request: VramRequest | Unreadable, rows: Rows, snap: Snapshot) -> Codes:
        """The code of each node's reason; 0 where the pod fits."""
        if isinstance(request, Unreadable):
            return np.full(len(rows), CODE_OF[request.reason], np.int8)
        if not request.asks:
            return np.zeros(len(rows), np.int8)
        cached = self._weighings.weigh(request, snap)
        unknown = rows < 0
        if not unknown.any():
            return cached.codes(snap, rows, self._monotonic_s())
        codes = np.full(len(rows), CODE_OF[Reason.UNKNOWN_NODE], np.int8)
        codes[~unknown] = cached.codes(snap, rows[~unknown], self._monotonic_s())
        return codes

    def _hold_places(self, pod: Pod, rows: Rows, codes: Codes, snap: Snapshot) -> bool:
        """Refuse in ``codes`` the nodes that would be full with pods for which others have left or
        leave, and which do not rank behind this one; says whether there were any."""
        now_s, held = self._monotonic_s(), False
        for node, others in self._cluster.held_for(pod, now_s).items():
            passed = (codes == 0) & (rows == snap.row_of.get(node, -1))
            if passed.any():
                reason = rejection_beside(self._cluster, pod, node, others, now_s)
                codes[passed] = CODE_OF[reason]
                held = held or reason is not None
        return held

    def _first(self, request: VramRequest, rows: Rows, snap: Snapshot) -> _Chosen | None:
        """The best of these rows; None if the pod fits on none."""
        now_s, market = self._monotonic_s(), self._cluster.usual.market
        cached = self._weighings.weigh(request, snap)
        ranking = cached.rank(request, snap, rows, now_s, market)
        if ranking.winner is None:
            return None
        ranked = request, snap, rows, ranking, cached.standing
        return _Chosen(ranking.winner, best(*ranked, now_s, market, CONTENDERS))

    def _undisputed(
        self, pod: Pod, request: VramRequest, rows: Rows, snap: Snapshot
    ) -> _Chosen | None:
        """The best of several rows, unless users' preferences could make kube-scheduler take
        another."""
        if len(rows) < 2 or prefers(pod) or self._cluster.neighbours.match(pod):
            return None
        first = self._first(request, rows, snap)
        if first is None:
            return None
        node = self._cluster.node(snap.nodes[int(rows[first.place])].name)
        return None if node is None or prefers_no_schedule(node, pod) else first

    def _crowded(self, pod: Pod, now_s: float) -> bool:
        """Whether the refused pod had better come again when fewer do."""
        if pod.status and pod.status.nominated_node_name:
            return False  # others leave for it
        if self._pace.reject(pod.metadata.uid, now_s):
            return False
        self._telemetry.spread_retries.inc()
        return True

    def _note_ranked(
        self,
        pod: Pod,
        began_s: float,
        snap: Snapshot,
        offered: int,
        winner: str,
        contenders: Sequence[Contender],
    ) -> None:
        took_us = micros(self._monotonic_s() - began_s)
        told = Ranked(self._wall_s(), took_us, snap.generation, offered, winner)
        self._journal.note(pod, told, told.at_s, winner)
        if contenders:
            self._journal.note(pod, Candidates(tuple(map(_candidate, contenders))), told.at_s)

    def _record(
        self,
        pod: Pod,
        request: VramRequest | Unreadable,
        generation: int,
        offered: OfferedNodes,
        codes: Codes,
        sure: bool,
        only: str,
        took_s: float,
        observed: bool,
    ) -> None:
        metadata = pod.metadata
        nodes_by_code = np.bincount(codes, minlength=len(REASONS)).tolist()
        rejected = {code: n for code, n in enumerate(nodes_by_code) if code and n}
        counts = {reason: n for code, n in rejected.items() if (reason := REASONS[code])}
        decision = Decision(
            pod=pod,
            decision_id=decision_id(metadata.uid, metadata.resource_version),
            at_s=self._wall_s(),
            generation=generation,
            offered=len(codes),
            fits=nodes_by_code[0],
            rejected=counts,
            sure=sure,
            took_s=took_s,
            asked=_asked(request),
            only=only,
            observed=observed,
            offered_nodes=offered,
        )
        self._journal.record(decision)
        if not observed:
            for reason, count in counts.items():
                self._telemetry.rejected_nodes.labels(reason.code).inc(count)
        elif counts and not decision.fits:
            self._telemetry.would_reject.labels("filter", main_reason(counts)).inc()
        log.info(
            "observed" if observed else "filtered",
            decision_id=decision.decision_id,
            snapshot=decision.generation,
            namespace=metadata.namespace,
            pod=metadata.name,
            offered=decision.offered,
            fits=decision.fits,
            took_ms=round(1000 * decision.took_s, 3),
        )


def _candidate(contender: Contender) -> Candidate:
    terms = tuple(round(1000 * contender.terms[name]) for name in TERMS)
    return Candidate(contender.node, round(1000 * contender.score), terms)


def _nothing(offered: extender_v1.Offered) -> Codes:
    """Nothing against any of them."""
    return np.zeros(len(offered.names), np.int8)


def _asked(request: VramRequest | Unreadable) -> tuple[Asked, ...]:
    if isinstance(request, Unreadable):
        return ()
    return tuple(
        Asked(ask.name, ask.resource, ask.count, ask.amount_text, ask.source)
        for ask in request.containers
    )
