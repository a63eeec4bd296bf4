"""The scheduler's verbs: decode a call, decide on one snapshot, encode the answer.

Filter, prioritize and preempt read one immutable snapshot. They do not block and reserve nothing.
Only bind changes the cluster; the ledger implements it and passes it to ``Verbs`` as a function.
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
from extender.placement.request import Unreadable, VramRequest
from extender.placement.score import Contender, aside, best
from extender.placement.snapshot import CODE_OF, REASONS, Rows, Snapshot
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

#: Number of best nodes whose scores a decision records, term by term.
CONTENDERS = 5
#: All nodes score the same: kube-scheduler decides as without the extender.
NO_PREFERENCE = extender_v1.encode_priorities(None)
#: The Error for a pod whose retry is delayed; its owner got the reason with an earlier rejection.
TRY_AGAIN = "no node has room; many pods wait, so this one is tried again within seconds"
#: Seconds between filter and preempt of a pod: kube-scheduler first looks for victims itself.
PREEMPT_FOLLOWS_WITHIN_S = 5.0
#: Rejected pods whose nodes are kept; each takes 50 kB at 5,000 nodes.
MAX_REJECTED_PODS = 64
#: Whether evicting pods could resolve the reason, by its code.
CURABLE = np.array([reason is not None and reason.evictable for reason in REASONS])

SENTENCES = [reason.sentence if reason else "" for reason in REASONS]

#: Binds a pod, given the call, and the pod and GPUNode as this replica has them (None if it does
#: not). Returns "" if the pod is bound, otherwise the reason as a sentence.
Binder = Callable[[extender_v1.BindArgs, Pod | None, GPUNode | None], Awaitable[str]]


@dataclass(frozen=True, slots=True)
class _Chosen:
    """The best node of some rows of a snapshot."""

    #: Index into the rows.
    place: int
    #: The best nodes with the terms of their scores, the winner first.
    contenders: tuple[Contender, ...]


class RejectedPod:
    """The nodes that one filter call rejected; their names are collected only when needed."""

    def __init__(self, pod: Pod, rows: Rows, codes: Codes, snap: Snapshot, at_s: float) -> None:
        self.uid, self.version = pod.metadata.uid, pod.metadata.resource_version
        self.at_s = at_s
        # Not the snapshot: a reference to it would make the next snapshot more expensive.
        self._rows, self._codes, self._nodes = rows, codes, snap.nodes

    def names(self) -> list[str]:
        """Return the nodes that evicting pods could free for this pod."""
        rows = self._rows[CURABLE[self._codes] & (self._rows >= 0)]
        return [self._nodes[row].name for row in rows.tolist()]


class Verbs:
    """Answers filter, prioritize, preempt and bind.

    ``unready`` returns why nothing can be decided yet, "" if it can. ``shown`` is called with the
    pod of every filter call, before the decision. While ``observes`` returns True, no node is
    rejected or preferred. With ``best_only``, filter returns only the best node, unless a user's
    preference could favor another node; kube-scheduler then scores no nodes.
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
        #: Whether all nodes pass and the decision is only recorded (mode observe).
        self._observes = observes
        self._best_only = best_only
        self._fit_cache = FitCache(cluster.rules.weights)
        #: Uid -> the nodes that the last filter call rejected. kube-scheduler may call preempt for
        #: the pod next.
        self._rejected_pods: Bounded[str, RejectedPod] = Bounded(MAX_REJECTED_PODS)
        self._assumed = AssumedBinds(cluster)
        self._node_sets = NodeSets()
        self._retries = RetrySpreader()

    def rules_changed(self) -> None:
        """Drop cached results, which depend on the placement rules."""
        self._fit_cache = FitCache(self._cluster.rules.weights)
        self._assumed.rules_changed()

    def filter(self, body: bytes) -> bytes:
        """Return which of the offered nodes can take the pod, and why the others cannot."""
        began_s = self._monotonic_s()
        unready, observes = self._unready(), self._observes()
        if unready and not observes:
            return self.filter_error(unready)
        try:
            offered = extender_v1.decode_offer(body)
        except extender_v1.MalformedBody as err:
            return self.filter_error(str(err))
        if unready:
            against = _all_pass(offered)
            return extender_v1.encode_filter(offered, against == 0, against, SENTENCES)
        if self._offers_only_new(offered):
            return self._filter_new(offered, began_s, observes)
        self._shown(offered.pod)
        snap = self._cluster.settled()
        request = self._cluster.understand(offered.pod)
        rows = _rows(offered, snap)
        codes = self._codes(request, rows, snap)
        wanted = request if isinstance(request, VramRequest) and request.asks else None
        sure = True
        if wanted:
            now_s = self._monotonic_s()
            assumed = self._assumed.leave_room(offered.pod, wanted, rows, codes, snap, now_s)
            held = self._hold_places(offered.pod, rows, codes, snap)
            sure = not (assumed or held)
            self._cluster.usual.see(wanted, offered.pod, snap, rows)
            if offered.objects:
                self._answer_new(offered.objects, wanted, rows, codes)
        against = _all_pass(offered) if observes else codes
        kept = against == 0
        first: _Chosen | None = None
        known = bool((rows[kept] >= 0).all())
        if wanted and not observes and self._best_only and known:
            places = np.flatnonzero(kept)
            first = self._undisputed(offered.pod, wanted, rows[places], snap)
            if first is not None:  # the other nodes are left out, not rejected
                against, kept = _all_pass(offered), np.zeros(len(rows), np.bool_)
                kept[places[first.place]] = True
        passed = np.flatnonzero(kept)
        only = ""
        if wanted and len(passed) == 1 and known and not observes:  # then prioritize is not called
            only = offered.names[passed[0]]
            self._assumed.expect(offered.pod, wanted, only, self._monotonic_s())
        answer = extender_v1.encode_filter(offered, kept, against, SENTENCES)
        if wanted and not len(passed) and self._crowded(offered.pod, began_s):
            answer = extender_v1.encode_filter_error(TRY_AGAIN)
        took_s = self._monotonic_s() - began_s
        at, nodes = snap.generation, self._node_sets.offered(snap.row_of, rows)
        self._record(offered.pod, request, at, nodes, codes, sure, only, took_s, observes)
        if first is not None:
            self._note_ranked(offered.pod, began_s, snap, len(places), only, first.contenders)
        if wanted and not observes:
            self._keep_rejected(RejectedPod(offered.pod, rows, codes, snap, began_s))
        return answer

    def _offers_only_new(self, offered: extender_v1.Offered) -> bool:
        """Return whether the nodes are unknown whole objects: node templates of an autoscaler."""
        if not offered.objects:
            return False
        return bool((self._cluster.settled().rows(offered.names) < 0).all())

    def _filter_new(self, offered: extender_v1.Offered, began_s: float, observes: bool) -> bytes:
        """Answer filter for node templates of an autoscaler.

        The call is not recorded: no bind follows it, and the pod may be a template too.
        """
        pod, codes = offered.pod, _all_pass(offered)
        request = self._cluster.understand(pod)
        if isinstance(request, Unreadable):
            codes[:] = CODE_OF[request.reason]
        elif request.asks:
            unknown = np.full(len(codes), -1, np.int64)
            self._answer_new(offered.objects or [], request, unknown, codes)
        against = _all_pass(offered) if observes else codes
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
        """Replace the codes of unknown nodes with those computed from their Node objects."""
        unknown = np.flatnonzero(rows < 0)
        if len(unknown):
            new = [objects[place] for place in unknown.tolist()]
            codes[unknown] = codes_of_new(new, request, self._cluster.rules)

    def filter_error(self, message: str) -> bytes:
        """Return an Error: kube-scheduler shows it on the pod and backs off."""
        self._telemetry.verb_errors.labels("filter").inc()
        log.warning("filter_error", message=message)
        return extender_v1.encode_filter_error(message)

    def prioritize(self, body: bytes) -> bytes:
        """Return the best of the nodes that passed filter.

        For a pod without GPUs, return the nodes where it blocks no GPU pod. Raises
        ``extender_v1.MalformedBody``.
        """
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
            rows = _rows(offered, snap)
            if not request.asks:  # not recorded: Headroom does not manage the pod
                chosen = aside(snap, rows)
                return (
                    NO_PREFERENCE if observes else extender_v1.encode_alike(offered.names, chosen)
                )
            known = rows >= 0
            first = self._first(request, rows[known], snap)
            if first is not None:
                winner, contenders = first.contenders[0].node, first.contenders
                if not observes:
                    self._assumed.expect(offered.pod, request, winner, self._monotonic_s())
        self._note_ranked(offered.pod, began_s, snap, len(offered.names), winner or "", contenders)
        return NO_PREFERENCE if observes else extender_v1.encode_priorities(winner)

    def preempt(self, body: bytes) -> bytes:
        """Return the nodes on which evictions make room for the pod, with the necessary victims.

        kube-scheduler proposes nodes and victims. A node on which no eviction helps is dropped, so
        that no pod is evicted in vain. Raises ``extender_v1.MalformedBody``.
        """
        began_s = self._monotonic_s()
        pod, offered = extender_v1.decode_preempt(body)
        request = self._cluster.understand(pod)
        proposed = {node: offer for node, offer in offered.items() if offer.uids}
        if isinstance(request, VramRequest) and not request.asks:
            return extender_v1.encode_preempt(proposed)
        observes = self._observes()
        if self._unready():  # do not evict pods on incomplete data
            return extender_v1.encode_preempt(proposed if observes else {})
        rejected = self._rejected_for_memory(pod, began_s)
        found = preemption(self._cluster, pod, offered, rejected, began_s)
        answer = answered(found)
        if found.best is not None and not observes:
            self._cluster.nominations.expect(pod, found.best.node, began_s)
        took_us = micros(self._monotonic_s() - began_s)
        part = recorded(found, self._wall_s(), took_us, len(offered), len(answer))
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
            {each.node: Offer(each.uids, each.pdb_violations) for each in answer}
        )

    def _rejected_for_memory(self, pod: Pod, now_s: float) -> list[str]:
        """Return the nodes that filter rejected for reasons that evictions could resolve.

        They passed kube-scheduler's own filters. Empty if the last filter call was for another
        version of the pod, or too long ago.
        """
        last = self._rejected_pods.get(pod.metadata.uid)
        if last is None or last.version != pod.metadata.resource_version:
            return []
        return last.names() if now_s < last.at_s + PREEMPT_FOLLOWS_WITHIN_S else []

    def rejected_for_memory(self, uid: str) -> list[str]:
        """Return the same for the last filter call of the pod, whatever its version and age.

        Empty if it is no longer on record.
        """
        last = self._rejected_pods.get(uid)
        return last.names() if last else []

    def coming(self, now_s: float) -> Iterator[tuple[str, str, Reservation]]:
        """Yield the assumed binds: uid, node, and the reservation that filter keeps free."""
        return self._assumed.reservations(now_s)

    def _keep_rejected(self, last: RejectedPod) -> None:
        self._rejected_pods[last.uid] = last
        limit = MAX_REJECTED_PODS if self._cluster.rules.evict_for_memory else 1
        self._rejected_pods.trim(limit)

    async def bind(self, body: bytes) -> bytes:
        """Reserve and bind; after an Error kube-scheduler retries the pod, with back-off."""
        if (unready := self._unready()) and not self._observes():
            return self.bind_error(unready)
        try:
            args = extender_v1.decode_bind(body)
        except extender_v1.MalformedBody as err:
            return self.bind_error(str(err))
        self._assumed.bind_received(args.pod_uid)
        message = await self._bind(
            args, self._known(args.pod_uid), self._cluster.gpunode(args.node)
        )
        if message:
            return self.bind_error(message)
        return extender_v1.encode_bind("")

    def _known(self, uid: str) -> Pod | None:
        """Return the pod of the last filter call, or the watched pod if it has the same version.

        If clients other than kube-scheduler can reach the port, a filter call is not trustworthy:
        it could show the right version with a smaller request.
        """
        seen, decision = self._cluster.pod(uid), self._journal.of_uid(uid)
        if decision is None:
            return seen
        shown = decision.pod
        same = seen and seen.metadata.resource_version == shown.metadata.resource_version
        return seen if same else shown

    def bind_error(self, message: str) -> bytes:
        self._telemetry.verb_errors.labels("bind").inc()
        log.warning("bind_error", message=message)
        return extender_v1.encode_bind(message)

    def _codes(self, request: VramRequest | Unreadable, rows: Rows, snap: Snapshot) -> Codes:
        """Return the code of each node's reason, (n,); 0 if the pod fits."""
        if isinstance(request, Unreadable):
            return np.full(len(rows), CODE_OF[request.reason], np.int8)
        if not request.asks:
            return np.zeros(len(rows), np.int8)
        cached = self._fit_cache.weigh(request, snap)
        unknown = rows < 0
        if not unknown.any():
            return cached.codes(snap, rows, self._monotonic_s())
        codes = np.full(len(rows), CODE_OF[Reason.UNKNOWN_NODE], np.int8)
        codes[~unknown] = cached.codes(snap, rows[~unknown], self._monotonic_s())
        return codes

    def _hold_places(self, pod: Pod, rows: Rows, codes: Codes, snap: Snapshot) -> bool:
        """Reject in ``codes`` the nodes that nominated pods of equal or higher rank would fill.

        Victims leave or have left for those pods. Return whether any node was rejected.
        """
        now_s, held = self._monotonic_s(), False
        for node, others in self._cluster.held_for(pod, now_s).items():
            passed = (codes == 0) & (rows == snap.row_of.get(node, -1))
            if passed.any():
                reason = rejection_beside(self._cluster, pod, node, others, now_s)
                codes[passed] = CODE_OF[reason]
                held = held or reason is not None
        return held

    def _first(self, request: VramRequest, rows: Rows, snap: Snapshot) -> _Chosen | None:
        """Return the best of these rows; None if the pod fits on none."""
        now_s, market = self._monotonic_s(), self._cluster.usual.market
        cached = self._fit_cache.weigh(request, snap)
        ranking = cached.rank(request, snap, rows, now_s, market)
        if ranking.winner is None:
            return None
        ranked = request, snap, rows, ranking, cached.standing
        return _Chosen(ranking.winner, best(*ranked, now_s, market, CONTENDERS))

    def _undisputed(
        self, pod: Pod, request: VramRequest, rows: Rows, snap: Snapshot
    ) -> _Chosen | None:
        """Return the best of several rows.

        None if users' preferences could make kube-scheduler choose another node.
        """
        if len(rows) < 2 or prefers(pod) or self._cluster.neighbours.match(pod):
            return None
        first = self._first(request, rows, snap)
        if first is None:
            return None
        node = self._cluster.node(snap.nodes[int(rows[first.place])].name)
        return None if node is None or prefers_no_schedule(node, pod) else first

    def _crowded(self, pod: Pod, now_s: float) -> bool:
        """Return whether to delay the retry of the rejected pod, because many are retried now."""
        if pod.status and pod.status.nominated_node_name:
            return False  # victims leave for it
        if self._retries.reject(pod.metadata.uid, now_s):
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
        ranked = Ranked(self._wall_s(), took_us, snap.generation, offered, winner)
        self._journal.note(pod, ranked, ranked.at_s, winner)
        if contenders:
            self._journal.note(pod, Candidates(tuple(map(_candidate, contenders))), ranked.at_s)

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


def _rows(offered: extender_v1.Offered, snap: Snapshot) -> Rows:
    """Return the row of each offered node, and change the order of the names if that is faster.

    kube-scheduler reads the answer by name.
    """
    if offered.objects is not None:
        return snap.rows(offered.names)
    offered.names, rows = snap.sorted_by_row(offered.names)
    return rows


def _all_pass(offered: extender_v1.Offered) -> Codes:
    """Return codes with which every offered node passes."""
    return np.zeros(len(offered.names), np.int8)


def _asked(request: VramRequest | Unreadable) -> tuple[Asked, ...]:
    if isinstance(request, Unreadable):
        return ()
    return tuple(
        Asked(ask.name, ask.resource, ask.count, ask.amount_text, ask.source)
        for ask in request.containers
    )
