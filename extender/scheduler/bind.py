"""Handles the bind call. The ledger reserves the pod's memory and binds the pod."""

from typing import Protocol

import structlog

from extender.ledger.bind_call import BindRequest, Bound, Declined, Outcome
from extender.scheduler import extender_v1
from extender.scheduler.outcome_recorder import record_bind
from extender.scheduler.scheduling_state import SchedulingState
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.changes import BindBegun, BindEnded

log = structlog.get_logger()


class Binder(Protocol):
    """The part of the ledger that the bind call needs."""

    async def bind(self, ask: BindRequest) -> Outcome: ...


class Bind:
    def __init__(self, state: SchedulingState, ledger: Binder) -> None:
        self._state = state
        self._ledger = ledger

    async def __call__(self, body: bytes) -> bytes:
        """Reserve the pod's memory and bind the pod to the node.

        Return an Error if the extender is not ready, if the ledger declines the bind or if the bind
        fails. After an Error, kube-scheduler retries the pod with backoff. Raises
        ``extender_v1.MalformedBody``.
        """
        state = self._state
        if (unready := state.replica.unready()) and not state.replica.observes:
            return self.error(unready)
        args = extender_v1.decode_bind(body)
        began_s = state.clock.monotonic()
        pod, gpunode = self._known(args.pod_uid), state.cluster.gpunode(args.node)
        groups, deadline_s = state.group_binds, state.replica.settings.bind_deadline_s
        may_try = groups.call(args.pod_uid, pod)
        ask = BindRequest(
            args.pod_namespace,
            args.pod_name,
            args.pod_uid,
            args.node,
            pod,
            gpunode,
            until_s=began_s + deadline_s,
            may_bind=lambda: groups.may_bind(args.pod_uid, began_s + deadline_s / 2),
        )
        outcome: Outcome = Declined(Reason.GROUP_DECLINED)
        if may_try:
            if pod is not None:
                state.replica.deliver([BindBegun(pod, ask.node)])
            try:
                outcome = await self._ledger.bind(ask)
            finally:
                groups.end(ask.uid, bound=isinstance(outcome, Bound))
                # The write of a reservation has already ended the hold.
                if ask.uid in state.cluster.holds.binding_to(ask.node):
                    state.replica.deliver([BindEnded(ask.uid, ask.node)])
        took_s = state.clock.monotonic() - began_s
        record_bind(state.journal, state.telemetry, ask, outcome, state.clock.time(), took_s)
        if isinstance(outcome, Bound):
            return extender_v1.encode_bind("")
        return self.error(
            outcome.reason.sentence if isinstance(outcome, Declined) else outcome.message
        )

    def error(self, message: str) -> bytes:
        """Count, log and return an Error. kube-scheduler shows it on the pod and retries the pod
        with backoff."""
        self._state.telemetry.verb_errors.labels("bind").inc()
        log.warning("bind_error", message=message)
        return extender_v1.encode_bind(message)

    def _known(self, uid: str) -> Pod | None:
        """Return the version of the pod for which the last filter call decided.

        Without a recorded filter call, return the watched pod. If both copies have the same
        version, return the watched pod too. Otherwise, if clients other than kube-scheduler can
        reach the port, a filter call could contain this version with a smaller request.
        """
        watched, decision = self._state.cluster.pod(uid), self._state.journal.of_uid(uid)
        if decision is None:
            return watched
        filtered = decision.pod
        same = watched and watched.metadata.resource_version == filtered.metadata.resource_version
        return watched if same else filtered
