"""Metrics of the extender. The metrics of a controller are in its folder."""

from functools import partial

from prometheus_client import CollectorRegistry, Gauge, Histogram

from extender.eviction.metrics import evictions
from extender.overuse.metrics import OveruseMetrics
from extender.preemption.metrics import preemptions
from extender.requeue.metrics import requeues
from extender.starting_alone.metrics import start_durations
from headroom.contract.reasons import Reason
from headroom.core.placement.prediction_outcome import Result, Surprise
from headroom.runtime.telemetry import SECONDS, ViewTelemetry, counter

#: Buckets from 0.1 s, which an idle kubelet takes, to 300 s, which a kubelet may take that waits
#: for its disk.
_WINDOW_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

#: Kinds of writes that the API server rejects if another client wrote the object first.
CONFLICTING = ("spec", "pod", "binding", "finalizer", "create")


class Telemetry(ViewTelemetry):
    """Metrics of the extender. The metrics of a controller are in its folder."""

    loops = ("event_queue", "reservations", "nodes", "notices", "requeues")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "headroom_ready")
        new = partial(counter, registry)
        reasons = [reason.code for reason in Reason]
        self.verb_seconds = Histogram(
            "headroom_verb_duration_seconds",
            "Time from the last byte of a scheduler call to the first byte of its answer.",
            ["verb"],
            buckets=SECONDS,
            registry=registry,
        )
        self.verb_cpu_seconds = new(
            "headroom_verb_cpu_seconds_total",
            "CPU time of receiving and answering filter, prioritize and preempt; bind is not "
            "counted, because it waits.",
            verb=(),
        )
        self.verb_errors = new(
            "headroom_verb_errors_total",
            "Scheduler calls that were answered with an error.",
            verb=("filter", "prioritize", "preempt", "bind"),
        )
        self.rejected_nodes = new(
            "headroom_rejected_nodes_total",
            "Nodes rejected in filter calls, by the code of the reason.",
            reason=reasons,
        )
        self.spread_retries = new(
            "headroom_retries_spread_total",
            "Filter calls answered with an Error instead of another rejection, because too many "
            "rejected pods were tried again in the same second.",
        )
        self.would_reject = new(
            "headroom_would_reject_total",
            "Calls that passed a pod only because the mode is observe, by the code of the reason. "
            "In filter, no offered node fits, and the reason of most nodes is counted. In bind, "
            "the node of the bind does not fit.",
            verb=("filter", "bind"),
            reason=reasons,
        )
        self.observes = Gauge(
            "headroom_observe_only",
            "1 while the mode is observe, in which no pod is rejected.",
            registry=registry,
        )
        self.scheduler_certificate_end = Gauge(
            "headroom_scheduler_certificate_end_timestamp_seconds",
            "Expiry time of kube-scheduler's client certificate in the last call; 0 without one.",
            registry=registry,
        )
        self.binds = new(
            "headroom_binds_total",
            "Bind calls by outcome: bound, declined (the pod no longer fits) or failed.",
            outcome=("bound", "declined", "failed"),
        )
        self.predictions = new(
            "headroom_predictions_total",
            "Pods by whether they got one of the devices predicted at binding: hit; shifted (to a "
            "device with enough free memory, because of pods that Headroom bound later); miss; "
            "unseen (no report showed the pod before it was gone). Only the replica "
            "that bound the pod counts it, so replicas can be summed. Pods that were unconfirmed "
            "when that replica stopped are not counted.",
            result=[result.value for result in Result],
        )
        self.misses = new(
            "headroom_prediction_misses_total",
            "Missed predictions, by the cause between binding and admission (released, health, "
            "bypass, configuration, disobeyed, several, unknown), and whether a device of the pod "
            "was overcommitted when the pod was first reported there.",
            surprise=[surprise.value for surprise in Surprise],
            overcommitted=("yes", "no"),
        )
        self.window_seconds = Histogram(
            "headroom_prediction_window_seconds",
            "Time from the reservation of a pod to the report that shows its device.",
            buckets=_WINDOW_SECONDS,
            registry=registry,
        )
        self.evictions = evictions(registry)
        self.overuse = OveruseMetrics(registry)
        self.starts = start_durations(registry)
        self.preemptions = preemptions(registry)
        self.ledger_conflicts = new(
            "headroom_ledger_conflicts_total",
            "Writes that the API server rejected because another client wrote the object first, by "
            "what was written: spec, pod, binding, finalizer or create. Each was retried with the "
            "newer object, or given up.",
            write=CONFLICTING,
        )
        self.requeues = requeues(registry)
        self.events = new(
            "headroom_events_total",
            "Kubernetes Events by outcome: written (or already written by another replica), failed "
            "(retried later).",
            reason=(),
            outcome=(),
        )
