"""Records binds, prediction outcomes and write conflicts.

Binds are recorded in the journal, the metrics and the log. Prediction outcomes are recorded in the
metrics, and misses also in the log and the feed. Write conflicts are recorded in the metrics.
"""

import structlog

from extender.ledger.bind_call import BindRequest, Bound, Declined, Failed
from extender.ledger.bind_call import Outcome as BindOutcome
from extender.metrics import Telemetry
from headroom.contract.decision import decision_id, decision_of
from headroom.contract.kube import Pod
from headroom.core.cluster.trackers.prediction_tracker import Outcome
from headroom.core.journal.decision_records import BindTried
from headroom.core.journal.journal import Journal, micros
from headroom.core.placement.prediction_outcome import Result
from headroom.core.placement.snapshot import CODE_OF

log = structlog.get_logger()

#: Maximum length of a recorded error message.
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

    ``at_s`` is the Unix time of the outcome, and ``took_s`` is the duration of the bind in seconds.
    If the pod's version is unknown, nothing is recorded in the journal, because the version is part
    of the decision id.
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
    """Record the outcome of a prediction of this process in the metrics. Also log a miss."""
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
