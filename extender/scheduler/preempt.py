"""Handles the preempt call. The response contains the nodes on which the pod fits after evictions,
and their victims."""

import structlog

from extender.scheduler import extender_v1
from extender.scheduler.scheduling_state import SchedulingState
from headroom.contract.decision import decision_id
from headroom.contract.kube import Pod
from headroom.core.journal.journal import micros
from headroom.core.placement.request import VramRequest
from headroom.core.preemption.report import answered, recorded
from headroom.core.preemption.victim_search import Offer, preemption

log = structlog.get_logger()

#: Maximum number of seconds between the filter call and the preempt call for a pod. Between the
#: calls, kube-scheduler searches for victims itself.
PREEMPT_FOLLOWS_WITHIN_S = 5.0


class Preempt:
    def __init__(self, state: SchedulingState) -> None:
        self._state = state

    def __call__(self, body: bytes) -> bytes:
        """Return the nodes on which the pod fits after evictions, with the necessary victims.

        kube-scheduler proposes nodes and victims. Nodes on which no eviction helps are omitted. For
        a pod without GPUs, for a bound pod and in mode observe, the proposal is returned unchanged.
        A bound pod can lack only CPU or host memory, for a deferred resize. While the extender is
        not ready, the response is empty for all other pods. Raises ``extender_v1.MalformedBody``.
        """
        state, began_s = self._state, self._state.clock.monotonic()
        pod, offered = extender_v1.decode_preempt(body)
        proposed = {node: offer for node, offer in offered.items() if offer.uids}
        # These nodes passed kube-scheduler's own filters, like all nodes that filter rejected.
        without_victims = offered.keys() - proposed.keys()
        if without_victims:
            state.candidate_nodes.confirm()
        request = state.cluster.understand(pod)
        if pod.node or (isinstance(request, VramRequest) and not request.asks):
            return extender_v1.encode_preempt(offered)
        observes = state.replica.observes
        if state.replica.unready():  # do not evict pods on incomplete data
            return extender_v1.encode_preempt(offered if observes else {})
        rejected = without_victims | {*self._rejected_for_memory(pod, began_s)}
        if isinstance(request, VramRequest):
            rejected -= state.candidate_nodes.fruitless(pod, request, began_s)
        found = preemption(state.cluster, pod, proposed, rejected, began_s)
        if isinstance(request, VramRequest):
            state.candidate_nodes.searched(pod, request, found, began_s)
        answer = answered(found)
        if found.best is not None and not observes:
            state.calls.assumed.nominate(pod, found.best.node, began_s)
        took_us = micros(state.clock.monotonic() - began_s)
        part = recorded(found, state.clock.time(), took_us, len(offered), len(answer))
        state.journal.note(pod, part, part.at_s)
        if observes:
            return extender_v1.encode_preempt(offered)
        state.telemetry.preemptions.labels(part.source or "none").inc()
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

        These nodes passed kube-scheduler's own filters. The list is empty if the last filter call
        was for another version of the pod, or more than ``PREEMPT_FOLLOWS_WITHIN_S`` ago.
        """
        last = self._state.last_rejection(pod.metadata.uid)
        if last is None or last.version != pod.metadata.resource_version:
            return []
        return last.names() if now_s < last.at_s + PREEMPT_FOLLOWS_WITHIN_S else []
