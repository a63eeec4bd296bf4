"""Handles the filter call: decides, from one snapshot, on which of the offered nodes the pod fits.

Filter does not block and reserves nothing. It counts memory that is held for other pods as if it
were reserved. It records the decision, and assumes the bind if exactly one node passes.
"""

from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
import structlog

from extender.scheduler import extender_v1
from extender.scheduler.retry_spreading import RetrySpreader
from extender.scheduler.scheduling_state import Best, SchedulingState, are_templates, rows_of
from headroom.contract.decision import decision_id
from headroom.contract.kube import Pod
from headroom.core.cluster.trackers.pod_selectors import prefers, prefers_no_schedule
from headroom.core.journal.decision_records import Asked
from headroom.core.journal.journal import Decision, NodeSets
from headroom.core.placement.fit import Codes
from headroom.core.placement.request import Unreadable, VramRequest
from headroom.core.placement.snapshot import CODE_OF, REASONS, Mask, Rows, Snapshot
from headroom.core.whatif.node_whatif import codes_of_new
from headroom.core.whatif.pending_pods import main_reason

log = structlog.get_logger()

#: The Error for a pod whose retry is delayed. The pod's owner has seen the reason in an earlier
#: rejection.
TRY_AGAIN = (
    "no node has enough free GPU memory; many pods wait, so this one is retried within seconds"
)
SENTENCES = [reason.sentence if reason else "" for reason in REASONS]


class PodStore(Protocol):
    """A store of pods for use without an API server. It receives pods only from filter calls."""

    def admit(self, pod: Pod) -> object: ...


@dataclass(slots=True)
class _Judged:
    """The verdicts about nodes for one pod."""

    rows: Rows
    #: (n,) The code of the reason of each node, or 0 if the pod fits on the node.
    codes: Codes
    #: Indices of the nodes that the answer names.
    passed: Rows
    #: Whether no node was rejected because of memory that is held for other pods.
    sure: bool = True
    #: Number of nodes from which the named nodes were chosen.
    candidates: int = 0
    #: Whether the answer leaves out nodes without rejecting them.
    leaves_out: bool = False
    #: The only named node, if it is the best of several nodes.
    best: Best | None = None


class Filter:
    """Handles the filter call.

    With the setting ``filter_best_only``, only the best node passes, so that kube-scheduler does
    not have to score nodes. If a user's preference could favor another node, all nodes that fit
    pass. ``pods`` receives the pod of each call before the decision.
    """

    def __init__(self, state: SchedulingState, pods: PodStore | None = None) -> None:
        self._state = state
        self._pods = pods
        self._node_sets = NodeSets()
        #: The names of the nodes in the last snapshot, and their length as a JSON array.
        self._names: tuple[str, ...] = ()
        self._names_bytes = 2
        self._retries = RetrySpreader()

    def __call__(self, body: bytes) -> bytes:
        """Return the offered nodes on which the pod fits, and a reason for each of the other nodes.

        Return an Error if the extender is not ready, or to delay the retry of one of many rejected
        pods. In mode observe, every node passes. Every node also passes for a bound pod, because
        kube-scheduler calls filter for a bound pod only if its resize is deferred, and a resize
        does not change GPU memory. Raises ``extender_v1.MalformedBody``.
        """
        state, began_s = self._state, self._state.clock.monotonic()
        unready, observes = state.replica.unready(), state.replica.observes
        if unready and not observes:
            return self.error(unready)
        offered = extender_v1.decode_offer(body)
        if unready or offered.pod.node:
            offered.decode_names()
            return _answer(offered, np.zeros(len(offered.names), np.int8))
        snap = state.cluster.settled()
        if are_templates(offered, snap):
            return self._filter_templates(offered, began_s)
        if self._pods is not None:
            self._pods.admit(offered.pod)
            snap = state.cluster.settled()
        request = state.cluster.understand(offered.pod)
        state.calls.assumed.ask(offered.pod, began_s)
        state.group_binds.withdraw(offered.pod.metadata.uid)
        best_only = not observes and self._may_name_best(offered.pod, request)
        judged = None
        if best_only and offered.may_cover(self._json_bytes(snap.names)):
            judged = self._judge(offered, request, np.arange(len(snap.names)), snap, began_s, True)
        if judged is None or judged.best is None or not offered.has_name(judged.best.node):
            rows = rows_of(offered, snap)
            judged = self._judge(offered, request, rows, snap, began_s, best_only)
        else:  # the best of all nodes is also the best of the offered nodes
            offered.names = snap.names
        return self._conclude(offered, request, judged, snap, began_s)

    def _json_bytes(self, names: tuple[str, ...]) -> int:
        """Return the length of all names of a snapshot as a JSON array."""
        if names is not self._names:
            self._names, self._names_bytes = names, len(msgspec.json.encode(names))
        return self._names_bytes

    def _judge(
        self,
        offered: extender_v1.Offered,
        request: VramRequest | Unreadable,
        rows: Rows,
        snap: Snapshot,
        began_s: float,
        best_only: bool,
    ) -> _Judged:
        """Judge the nodes of these rows, without recording anything about the pod."""
        state, pod, observes = self._state, offered.pod, self._state.replica.observes
        if isinstance(request, Unreadable) or not request.asks:
            codes = _codes_without_gpu(request, len(rows))
            return _Judged(rows, codes, np.flatnonzero((codes == 0) | observes))
        codes = state.codes(request, rows, snap, began_s)
        reserved = state.held_memory.admit_reserved(request, rows, codes, snap, began_s)
        sure = not state.held_memory.reject_nodes(pod, request, rows, codes, snap, began_s)
        state.calls.demand.prepare(request, snap)
        if offered.objects and (rows < 0).any():
            unknown = np.flatnonzero(rows < 0)
            templates = [offered.objects[i] for i in unknown.tolist()]
            codes[unknown] = codes_of_new(templates, request, state.cluster.rules)
        passed = np.arange(len(rows)) if observes else np.flatnonzero(codes == 0)
        judged = _Judged(rows, codes, passed, sure, candidates=len(passed))
        if observes:
            return judged
        if reserved and len(again := np.intersect1d(passed, reserved)):
            # kube-scheduler has already chosen this node, and the bind is not finished. If the pod
            # were placed on another node, its memory would be reserved twice.
            judged.passed, judged.candidates, judged.leaves_out = again, len(again), True
        elif best_only and (fitting := rows.take(passed)).min(initial=0) >= 0:
            judged.best = self._undisputed(pod, request, fitting, snap, began_s)
            if judged.best is not None:
                judged.passed, judged.leaves_out = passed[[judged.best.place]], True
        return judged

    def _conclude(
        self,
        offered: extender_v1.Offered,
        request: VramRequest | Unreadable,
        judged: _Judged,
        snap: Snapshot,
        began_s: float,
    ) -> bytes:
        """Record the decision, update assumed binds and demand, and return the response."""
        state, pod, observes = self._state, offered.pod, self._state.replica.observes
        rows, codes, passed, node = judged.rows, judged.codes, judged.passed, ""
        managed = request if isinstance(request, VramRequest) and request.asks else None
        if managed is not None and not observes and len(passed) == 1 and rows[passed[0]] >= 0:
            node = offered.names[passed[0]]  # then prioritize is not called
            state.calls.assumed.assume(pod, managed, node, state.clock.monotonic())
        if not len(passed):
            state.calls.assumed.reject(pod, began_s)
        if managed is not None:
            state.calls.demand.see(managed, pod, snap, rows)
        if managed is None or len(passed):
            shown = None if observes or judged.leaves_out else codes
            answer = extender_v1.encode_filter(offered, passed, shown, SENTENCES)
        elif self._is_crowded(pod, began_s):
            answer = extender_v1.encode_filter_error(TRY_AGAIN)
        else:
            resolvable = self._resolvable(pod, managed, rows, codes, snap, began_s)
            answer = extender_v1.encode_filter(offered, passed, codes, SENTENCES, resolvable)
        self._record(pod, request, rows, codes, snap, judged.sure, node, began_s)
        if (best := judged.best) is not None:
            state.record_ranked(pod, began_s, snap, judged.candidates, best, by_filter=True)
        if managed is not None and not observes:
            state.keep_rejected(pod, rows, codes, snap, began_s)
        return answer

    def error(self, message: str) -> bytes:
        """Count, log and return an Error. kube-scheduler shows it on the pod and retries the pod
        with backoff."""
        self._state.telemetry.verb_errors.labels("filter").inc()
        log.warning("filter_error", message=message)
        return extender_v1.encode_filter_error(message)

    def _filter_templates(self, offered: extender_v1.Offered, began_s: float) -> bytes:
        """Handle a filter call with node templates of an autoscaler.

        The decision is not recorded, because no bind follows and the pod may be a template too.
        """
        state, pod, objects = self._state, offered.pod, offered.objects or ()
        request = state.cluster.understand(pod)
        if isinstance(request, VramRequest) and request.asks:
            codes = codes_of_new(objects, request, state.cluster.rules)
        else:
            codes = _codes_without_gpu(request, len(objects))
        log.info(
            "filtered_new_nodes",
            namespace=pod.metadata.namespace,
            pod=pod.metadata.name,
            offered=len(codes),
            fits=int((codes == 0).sum()),
            took_ms=round(1000 * (state.clock.monotonic() - began_s), 3),
        )
        return _answer(offered, np.zeros_like(codes) if state.replica.observes else codes)

    def _resolvable(
        self,
        pod: Pod,
        request: VramRequest,
        rows: Rows,
        codes: Codes,
        snap: Snapshot,
        now_s: float,
    ) -> Mask | None:
        """Return the mask (n,) of the rejected nodes on which kube-scheduler may search for
        victims, or None if there are no such nodes."""
        if not self._state.replica.settings.preempt_for_memory:
            return None
        large_enough = self._state.fit_cache().weigh(request, snap).large_enough
        return self._state.candidate_nodes.choose(
            pod, request, rows, codes, large_enough, snap, now_s
        )

    def _may_name_best(self, pod: Pod, request: VramRequest | Unreadable) -> bool:
        """Return whether filter may name only the best node for the pod. This requires that the pod
        requests GPUs, and that no preference of this pod or of another pod could make
        kube-scheduler choose another node.

        The preferences of a group whose last bind was declined do not count. Memory is held on the
        nodes that filter names, so kube-scheduler must choose these nodes.
        """
        if not isinstance(request, VramRequest) or not request.asks:
            return False
        if self._state.group_binds.was_declined(pod):
            return True
        cluster = self._state.cluster
        return (
            self._state.replica.settings.filter_best_only
            and not prefers(pod)
            and not cluster.neighbours.match(pod)
        )

    def _undisputed(
        self, pod: Pod, request: VramRequest, rows: Rows, snap: Snapshot, now_s: float
    ) -> Best | None:
        """Return the best of several rows, or None if there are fewer than two rows or if a taint
        of the best node could make kube-scheduler choose another node. The pod fits on all rows.

        The taint does not count for a group whose last bind was declined, as in ``_may_name_best``.
        """
        if len(rows) < 2:
            return None
        best = self._state.best(request, rows, snap, now_s, np.ones(len(rows), bool))
        if best is None:
            return None
        if self._state.group_binds.was_declined(pod):
            return best
        node = self._state.cluster.node(best.node)
        return None if node is None or prefers_no_schedule(node, pod) else best

    def _is_crowded(self, pod: Pod, now_s: float) -> bool:
        """Return whether to delay the retry of the rejected pod, because many are retried now.

        The call counts the rejection or the delay.
        """
        if pod.status and pod.status.nominated_node_name:
            return False  # the pod's victims are terminating
        if self._retries.reject(pod.metadata.uid, now_s):
            return False
        self._state.telemetry.spread_retries.inc()
        return True

    def _record(
        self,
        pod: Pod,
        request: VramRequest | Unreadable,
        rows: Rows,
        codes: Codes,
        snap: Snapshot,
        sure: bool,
        node: str,
        began_s: float,
    ) -> None:
        """Record the decision in the journal, the metrics and the log.

        ``sure`` is true if no node was rejected because of memory that is held for other pods.
        ``node`` is the node in the response if the response has only one node, and otherwise empty.
        """
        state, metadata, observed = self._state, pod.metadata, self._state.replica.observes
        took_s = state.clock.monotonic() - began_s
        nodes_by_code = np.bincount(codes, minlength=len(REASONS)).tolist()
        rejected = {
            reason: nodes
            for reason, nodes in zip(REASONS, nodes_by_code, strict=True)
            if reason is not None and nodes
        }
        decision = Decision(
            pod=pod,
            decision_id=decision_id(metadata.uid, metadata.resource_version),
            at_s=state.clock.time(),
            generation=snap.generation,
            offered=len(codes),
            fits=nodes_by_code[0],
            rejected=rejected,
            sure=sure,
            took_s=took_s,
            asked=_asked(request),
            node=node,
            observed=observed,
            offered_nodes=self._node_sets.offered(snap.row_of, rows),
        )
        state.journal.record(decision)
        if not observed:
            for reason, nodes in rejected.items():
                state.telemetry.rejected_nodes.labels(reason.code).inc(nodes)
        elif rejected and not decision.fits:
            state.telemetry.would_reject.labels("filter", main_reason(rejected)).inc()
        log.info(
            "observed" if observed else "filtered",
            decision_id=decision.decision_id,
            snapshot=decision.generation,
            namespace=metadata.namespace,
            pod=metadata.name,
            offered=decision.offered,
            fits=decision.fits,
            took_ms=round(1000 * took_s, 3),
        )


def _answer(offered: extender_v1.Offered, codes: Codes) -> bytes:
    return extender_v1.encode_filter(offered, np.flatnonzero(codes == 0), codes, SENTENCES)


def _codes_without_gpu(request: VramRequest | Unreadable, nodes: int) -> Codes:
    """Return the same code for all nodes, which is 0 for a pod without GPUs. For an unreadable
    request, it is the code of the reason."""
    reason = request.reason if isinstance(request, Unreadable) else None
    return np.full(nodes, CODE_OF[reason], np.int8)


def _asked(request: VramRequest | Unreadable) -> tuple[Asked, ...]:
    if isinstance(request, Unreadable):
        return ()
    return tuple(
        Asked(ask.name, ask.resource, ask.count, ask.amount_text, ask.source, ask.limit_text)
        for ask in request.containers
    )
