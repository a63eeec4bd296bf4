"""Answers bind: the ledger reserves the pod's memory and binds the pod."""

from typing import Protocol

import structlog

from contract.gpunode import GPUNode
from contract.kube import Pod
from extender.ledger.bind import BindRequest, Bound, Declined, Outcome
from extender.observability.recorder import record_bind
from extender.placement.placement_record import Placement
from extender.scheduler import extender_v1
from extender.scheduler.scheduling_state import SchedulingState
from extender.state.changes import BindBegun, BindEnded

log = structlog.get_logger()


class Binder(Protocol):
    """The part of the ledger that bind needs."""

    async def bind(self, ask: BindRequest) -> Outcome: ...


class Bind:
    def __init__(self, state: SchedulingState, ledger: Binder, deadline_s: float) -> None:
        """``deadline_s``: seconds after which kube-scheduler gives up a bind call."""
        self._state = state
        self._ledger = ledger
        self._deadline_s = deadline_s

    async def __call__(self, body: bytes) -> bytes:
        """Reserve and bind; after an Error kube-scheduler retries the pod, with back-off."""
        state = self._state
        if (unready := state.replica.unready()) and not state.replica.observes:
            return self.error(unready)
        try:
            args = extender_v1.decode_bind(body)
        except extender_v1.MalformedBody as err:
            return self.error(str(err))
        state.assumed.bind_received(args.pod_uid)
        began_s = state.clock.monotonic()
        pod, gpunode = self._known(args.pod_uid), state.cluster.gpunode(args.node)
        ask = BindRequest(
            args.pod_namespace,
            args.pod_name,
            args.pod_uid,
            args.node,
            pod,
            gpunode,
            self._foreseen(pod, gpunode, began_s),
            until_s=began_s + self._deadline_s,
        )
        if pod is not None:
            state.replica.deliver([BindBegun(pod, ask.node, ask.placement)])
        try:
            outcome = await self._ledger.bind(ask)
        finally:
            state.replica.deliver([BindEnded(ask.uid, ask.node)])
        took_s = state.clock.monotonic() - began_s
        record_bind(state.journal, state.telemetry, ask, outcome, took_s, state.clock.time())
        if isinstance(outcome, Bound):
            return extender_v1.encode_bind("")
        return self.error(
            outcome.reason.sentence if isinstance(outcome, Declined) else outcome.message
        )

    def error(self, message: str) -> bytes:
        """Return an Error: kube-scheduler shows it on the pod and backs off."""
        self._state.telemetry.verb_errors.labels("bind").inc()
        log.warning("bind_error", message=message)
        return extender_v1.encode_bind(message)

    def _known(self, uid: str) -> Pod | None:
        """Return the pod of the last filter call, or the watched pod if it has the same version.

        If clients other than kube-scheduler can reach the port, a filter call is not trustworthy:
        it could show the right version with a smaller request.
        """
        seen, decision = self._state.cluster.pod(uid), self._state.journal.of_uid(uid)
        if decision is None:
            return seen
        shown = decision.pod
        same = seen and seen.metadata.resource_version == shown.metadata.resource_version
        return seen if same else shown

    def _foreseen(self, pod: Pod | None, gpunode: GPUNode | None, now_s: float) -> Placement | None:
        """Return the placement that the ledger would compute, if it can be derived from cached
        results."""
        cluster = self._state.cluster
        if pod is None or gpunode is None or gpunode.name in cluster.held_for(pod, now_s):
            return None
        return cluster.judge_as_weighed(pod, gpunode, now_s)
