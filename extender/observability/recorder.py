"""Records binds and predictions in the journal, the metrics, the log and the feed."""

import time

import structlog

from contract.decision import decision_id, decision_of
from contract.kube import Pod
from extender.ledger.bind import BindRequest, Bound, Declined, Failed
from extender.ledger.bind import Outcome as BindOutcome
from extender.observability.feed import Feed
from extender.observability.metrics import Telemetry
from extender.placement.prediction_outcome import Result
from extender.placement.snapshot import CODE_OF
from extender.state.decision_records import BindTried
from extender.state.journal import Journal, micros
from extender.state.prediction_tracker import Outcome

log = structlog.get_logger()

#: Length limit of a recorded error message.
MOST_QUOTED = 200


def record_bind(
    journal: Journal, telemetry: Telemetry, ask: BindRequest, outcome: BindOutcome, took_s: float
) -> None:
    """Record the outcome of a bind, under the version of the pod that was decided about."""
    outcome_name = type(outcome).__name__.lower()
    reason = outcome.reason if isinstance(outcome, Declined) else None
    if isinstance(outcome, Bound) and outcome.despite is not None:
        reason = outcome.despite
        telemetry.would_reject.labels("bind", reason.code).inc()
    message = outcome.message if isinstance(outcome, Failed) else ""
    version = outcome.version or (ask.pod.metadata.resource_version if ask.pod else "")
    which = decision_id(ask.uid, version) if version else ""
    if which:
        at_s, node = time.time(), ask.node if isinstance(outcome, Bound) else ""
        part = BindTried(
            at_s, micros(took_s), ask.node, outcome_name, CODE_OF[reason], message[:MOST_QUOTED]
        )
        journal.records.note(which, ask.namespace, ask.name, part, at_s, node)
    telemetry.binds.labels(outcome_name).inc()
    log.info(
        "bind",
        decision_id=which,
        pod=f"{ask.namespace}/{ask.name}",
        pod_uid=ask.uid,
        node=ask.node,
        outcome=outcome_name,
        reason=reason.code if reason else None,
        took_ms=round(1000 * took_s, 3),
    )


def publish_miss(feed: Feed, outcome: Outcome, pod: Pod | None) -> None:
    """Publish a prediction that missed, whichever extender made it."""
    if outcome.surprise is None:
        return
    feed.publish(
        "prediction_missed",
        node=outcome.node,
        device=",".join(outcome.observed),
        namespace=outcome.reservation.namespace,
        name=outcome.reservation.name,
        uid=outcome.uid,
        decision_id=decision_of(pod) if pod else "",
        cause=outcome.surprise.value,
        message=outcome.surprise.sentence,
    )


def record_prediction(telemetry: Telemetry, outcome: Outcome, pod: Pod | None) -> None:
    """Record how this process's prediction for a pod turned out, and why it missed."""
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
