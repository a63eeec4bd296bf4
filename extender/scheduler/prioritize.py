"""Handles the prioritize call. The response names the best of the nodes that passed filter."""

from extender.scheduler import extender_v1
from extender.scheduler.scheduling_state import SchedulingState, are_templates, rows_of
from headroom.core.placement.request import Unreadable
from headroom.core.placement.score import best_for_non_gpu_pod

#: The response that gives all nodes the same score, so that kube-scheduler decides as it would
#: without the extender.
NO_PREFERENCE = extender_v1.encode_priorities(None)


class Prioritize:
    def __init__(self, state: SchedulingState) -> None:
        self._state = state

    def __call__(self, body: bytes) -> bytes:
        """Return the score of the best of the nodes that passed filter.

        For a pod without GPUs, the nodes without GPUs are best. If there are no such nodes, the
        node with the least spare GPU memory is best. No node is preferred in mode observe, for node
        templates or for unreadable pods. Raises ``extender_v1.MalformedBody``.
        """
        state, began_s = self._state, self._state.clock.monotonic()
        observes = state.replica.observes
        offered = extender_v1.decode_offer(body)
        pod, snap = offered.pod, state.cluster.settled()
        if are_templates(offered, snap):
            return NO_PREFERENCE
        rows = rows_of(offered, snap)
        request = state.cluster.understand(pod)
        if isinstance(request, Unreadable):
            state.record_ranked(pod, began_s, snap, len(rows), None)
            return NO_PREFERENCE
        if not request.asks:  # not recorded, because Headroom does not manage the pod
            chosen = best_for_non_gpu_pod(snap, rows)
            return NO_PREFERENCE if observes else extender_v1.encode_alike(offered.names, chosen)
        best = state.best(request, rows[rows >= 0], snap, began_s)
        state.record_ranked(pod, began_s, snap, len(rows), best)
        if best is None or observes:
            return NO_PREFERENCE
        winner = best.node
        state.calls.assumed.assume(pod, request, winner, state.clock.monotonic())
        return extender_v1.encode_priorities(winner)
