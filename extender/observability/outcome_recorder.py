"""Records binds, prediction outcomes and write conflicts.

Binds go to the journal, the metrics and the log; prediction outcomes to the metrics; misses also to
the log and the feed; write conflicts to the metrics.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import structlog

from contract.annotations import TOUCHED
from contract.decision import decision_id, decision_of
from contract.gpunode import GPUNode, GPUNodeSpec
from contract.kube import Pod
from extender.errors import StoreConflict
from extender.ledger.bind_call import BindRequest, Bound, Declined, Failed
from extender.ledger.bind_call import Outcome as BindOutcome
from extender.ledger.store import Binding, Store
from extender.observability.extender_metrics import Telemetry
from extender.placement.prediction_outcome import Result
from extender.placement.snapshot import CODE_OF
from extender.state.decision_records import BindTried
from extender.state.journal import Journal, micros
from extender.state.prediction_tracker import Outcome

log = structlog.get_logger()

#: Length limit of a recorded error message.
MAX_MESSAGE = 200


def record_bind(
    journal: Journal,
    telemetry: Telemetry,
    ask: BindRequest,
    outcome: BindOutcome,
    at_s: float,
    took_s: float,
) -> None:
    """Record the outcome of a bind in the journal, the metrics and the log.

    ``at_s`` is the Unix time of the outcome, ``took_s`` the duration of the bind. If the pod's
    version is not known, the journal gets no record: the version is part of the decision id.
    """
    outcome_name = type(outcome).__name__.lower()
    reason = outcome.reason if isinstance(outcome, Declined) else None
    if isinstance(outcome, Bound) and outcome.despite is not None:
        reason = outcome.despite
        telemetry.would_reject.labels("bind", reason.code).inc()
    message = outcome.message if isinstance(outcome, Failed) else ""
    version = outcome.version or (ask.pod.metadata.resource_version if ask.pod else "")
    bind_decision_id = decision_id(ask.uid, version) if version else ""
    if bind_decision_id:
        node = ask.node if isinstance(outcome, Bound) else ""
        part = BindTried(
            at_s, micros(took_s), ask.node, outcome_name, CODE_OF[reason], message[:MAX_MESSAGE]
        )
        journal.records.note(bind_decision_id, ask.namespace, ask.name, part, at_s, node)
    telemetry.binds.labels(outcome_name).inc()
    log.info(
        "bind",
        decision_id=bind_decision_id,
        pod=f"{ask.namespace}/{ask.name}",
        pod_uid=ask.uid,
        node=ask.node,
        outcome=outcome_name,
        reason=reason.code if reason else None,
        took_ms=round(1000 * took_s, 3),
    )


def record_prediction(telemetry: Telemetry, outcome: Outcome, pod: Pod | None) -> None:
    """Record the outcome of a prediction of this process: in the metrics, and misses in the log."""
    telemetry.predictions.labels(outcome.result.value).inc()
    if outcome.result is Result.UNSEEN:
        return
    telemetry.window_seconds.observe(outcome.window_s)
    if outcome.surprise is None:
        return
    overcommitted = "yes" if outcome.overcommitted_bytes else "no"
    telemetry.misses.labels(outcome.surprise.value, overcommitted).inc()
    log.warning(
        "prediction_missed",
        decision_id=decision_of(pod) if pod else "",
        pod=f"{outcome.reservation.namespace}/{outcome.reservation.name}",
        pod_uid=outcome.uid,
        node=outcome.node,
        devices=outcome.observed,
        predicted=outcome.predicted,
        surprise=outcome.surprise.value,
        overcommitted_bytes=outcome.overcommitted_bytes,
        window_s=round(outcome.window_s, 3),
    )


class ConflictCountingStore(Store):
    """Passes all calls to another store, and counts its write conflicts by kind."""

    def __init__(self, store: Store, telemetry: Telemetry) -> None:
        self._store = store
        self._conflicts = telemetry.ledger_conflicts

    async def read_gpunode(self, name: str) -> GPUNode | None:
        return await self._store.read_gpunode(name)

    async def create_gpunode(self, gpunode: GPUNode) -> GPUNode:
        with self._counted("create"):
            return await self._store.create_gpunode(gpunode)

    async def write_spec(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        with self._counted("spec"):
            return await self._store.write_spec(before, spec)

    async def remove_finalizer(self, gpunode: GPUNode) -> None:
        with self._counted("finalizer"):
            await self._store.remove_finalizer(gpunode)

    async def read_pod(self, namespace: str, name: str) -> Pod | None:
        return await self._store.read_pod(namespace, name)

    async def read_heartbeat_version(self, node: str) -> str:
        return await self._store.read_heartbeat_version(node)

    async def list_pods(self, node: str | None = None) -> list[Pod]:
        return await self._store.list_pods(node)

    async def bind(self, binding: Binding) -> None:
        with self._counted("binding"):
            await self._store.bind(binding)

    async def touch_pod(self, pod: Pod, value: str, key: str = TOUCHED) -> Pod:
        with self._counted("pod"):
            return await self._store.touch_pod(pod, value, key)

    @contextmanager
    def _counted(self, write: str) -> Iterator[None]:
        """Count a ``StoreConflict`` and raise it again."""
        try:
            yield
        except StoreConflict:
            self._conflicts.labels(write).inc()
            raise
