"""What we tell Prometheus about ourselves; the registry is an argument, never a global."""

import threading

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    Info,
    generate_latest,
)

from contract.reasons import Reason
from extender.placement.prediction_outcome import Result, Surprise
from extender.placement.snapshot import Snapshot
from extender.version import own_version

#: From a tenth of a millisecond, a cheap "still no", to a second, where schedulers time out.
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

#: Nobody notices the first; a call should never wait for more than the third.
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)

#: From a kubelet that has nothing else to do to one that is kept waiting by the disk.
_WINDOW_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

#: Writes that can be refused because somebody else was faster.
CONFLICTING = ("spec", "pod", "binding", "finalizer", "create")


class ProcessTelemetry:
    """Metrics of every process. Counters with known labels start at 0: alerts need their series."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        build = Info("headroom_build", "Version of Headroom.", registry=registry)
        build.info({"version": own_version()})
        self.settings_reloads = Counter(
            "headroom_settings_reloads_total",
            "Changes of the file of settings by outcome: taken, refused (the old ones go on).",
            ["outcome"],
            registry=registry,
        )
        self.loop_failures = Counter(
            "headroom_loop_failures_total",
            "Rounds of the process's own loops that ended with an exception, by loop. Each is "
            "logged as loop_failed, and the loop goes on.",
            ["loop"],
            registry=registry,
        )
        for outcome in ("taken", "rejected"):
            self.settings_reloads.labels(outcome)


class WebhookTelemetry(ProcessTelemetry):
    """Metrics of the admission webhook."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.ready = Gauge(
            "headroom_webhook_ready",
            "1 while reviews can be answered, as /readyz tells.",
            registry=registry,
        )
        self.admission_seconds = Histogram(
            "headroom_admission_duration_seconds",
            "Time from the last byte of a call to the admission webhook to the first of its "
            "answer, by path: mutate or validate.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.admission_errors = Counter(
            "headroom_admission_errors_total",
            "Calls to the admission webhook that were not answered with a review: the API server "
            "goes by the failure policy.",
            ["path"],
            registry=registry,
        )

    def exposition(self, ready: bool) -> bytes:
        """Return the body of /metrics."""
        self.ready.set(ready)
        return generate_latest(self.registry)


class ViewTelemetry(ProcessTelemetry):
    """Metrics of a process that follows the cluster. ``ready`` names its gauge of readiness: with
    one name for all, the alert about one of them could not fire while another is ready."""

    def __init__(self, registry: CollectorRegistry, ready: str) -> None:
        super().__init__(registry)
        #: The snapshot of the scrape in progress; None between scrapes.
        self.scraped: Snapshot | None = None
        self._scraping = threading.Lock()
        self.ready = Gauge(ready, "1 while /readyz answers 200.", registry=registry)
        self.history_queries = Counter(
            "headroom_history_queries_total",
            "Queries to Prometheus for SM activity by outcome: answered or failed.",
            ["outcome"],
            registry=registry,
        )
        self.history_devices = Gauge(
            "headroom_history_devices",
            "Devices of which there is fresh history of SM activity.",
            registry=registry,
        )
        self.loop_lag_seconds = Histogram(
            "headroom_loop_lag_seconds",
            "How late the event loop woke up, sampled 20 times a second: what a scheduler call "
            "that comes at such a moment waits for, before anything is done for it.",
            buckets=_LAG_SECONDS,
            registry=registry,
        )
        self.generation = Gauge(
            "headroom_snapshot_generation",
            "Generation of the snapshot that decisions are made on.",
            registry=registry,
        )
        for outcome in ("answered", "failed"):
            self.history_queries.labels(outcome)

    def exposition(self, snap: Snapshot, ready: bool) -> bytes:
        """Return the body of /metrics, for one scrape at a time. The reference to the snapshot is
        dropped at the end: the next snapshots are copied while it is held."""
        with self._scraping:
            self.scraped = snap
            try:
                self.generation.set(snap.generation)
                self.ready.set(ready)
                return generate_latest(self.registry)
            finally:
                self.scraped = None


class Telemetry(ViewTelemetry):
    """Metrics of the extender."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "headroom_ready")
        self.verb_seconds = Histogram(
            "headroom_verb_duration_seconds",
            "Time from the last byte of a scheduler call to the first of its answer.",
            ["verb"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.verb_errors = Counter(
            "headroom_verb_errors_total",
            "Scheduler calls that were answered with an error.",
            ["verb"],
            registry=registry,
        )
        self.rejected_nodes = Counter(
            "headroom_rejected_nodes_total",
            "Nodes refused in filter calls, by the code of the reason.",
            ["reason"],
            registry=registry,
        )
        self.spread_retries = Counter(
            "headroom_retries_spread_total",
            "Filter calls for pods that were refused before and no node could take, answered with "
            "an Error, since too many such pods were tried in the same second.",
            registry=registry,
        )
        self.would_reject = Counter(
            "headroom_would_reject_total",
            "Calls that let a pod through because the mode is observe, by the code of the reason: "
            "filter, none of the nodes offered would have taken it (the reason of most nodes); "
            "bind, the node that it was bound to would not.",
            ["verb", "reason"],
            registry=registry,
        )
        self.observes = Gauge(
            "headroom_observe_only",
            "1 while the mode is observe, in which nothing is refused.",
            registry=registry,
        )
        self.binds = Counter(
            "headroom_binds_total",
            "Bind calls by outcome: bound, declined (no room any more) or failed.",
            ["outcome"],
            registry=registry,
        )
        self.predictions = Counter(
            "headroom_predictions_total",
            "Pods by how the device that they were given compares with the candidates at their "
            "binding: hit; shifted (to where pods bound by us later can push it, which had room); "
            "miss; unseen (no report showed the pod before it was gone). Each is counted by the "
            "replica that bound the pod and by no other, so that the sum over replicas is right; "
            "pods that were on their way when that replica stopped are not counted.",
            ["result"],
            registry=registry,
        )
        self.misses = Counter(
            "headroom_prediction_misses_total",
            "The misses among them, by what turned the prediction between binding and admission "
            "(released, health, bypass, configuration, several, unknown), and whether a device of "
            "the pod was overcommitted when it was seen there.",
            ["surprise", "overcommitted"],
            registry=registry,
        )
        self.window_seconds = Histogram(
            "headroom_prediction_window_seconds",
            "Time from the promise to a pod to the report that shows on which device it is.",
            buckets=_WINDOW_SECONDS,
            registry=registry,
        )
        self.evictions = Counter(
            "headroom_evictions_total",
            "Pods without room on their GPU, by what became of their eviction: evicted, refused.",
            ["outcome"],
            registry=registry,
        )
        self.preemptions = Counter(
            "headroom_preemptions_total",
            "Times that somebody was to leave for a pod, by whose choice it was: proposed by "
            "kube-scheduler and left so, corrected, added (a node that it did not propose), "
            "controller (it was not even asked), or nobody (no removal would have helped, or there "
            "is room soon anyway).",
            ["choice"],
            registry=registry,
        )
        self.ledger_conflicts = Counter(
            "headroom_ledger_conflicts_total",
            "Writes that the API server refused because somebody else wrote the object first, by "
            "what was written: spec, pod, binding, finalizer or a new object. Each was tried again "
            "on the newer object, or left.",
            ["write"],
            registry=registry,
        )
        self.requeues = Counter(
            "headroom_requeues_total",
            "Refused pods that kube-scheduler was made to try again because there is room for them "
            "now, by outcome: woken, overtaken (by another replica, or the pod changed), failed.",
            ["outcome"],
            registry=registry,
        )
        self.events = Counter(
            "headroom_events_total",
            "Kubernetes Events by outcome: told (or told already by another replica), failed (and "
            "tried again later).",
            ["reason", "outcome"],
            registry=registry,
        )
        for counter, outcomes in (
            (self.verb_errors, ("filter", "prioritize", "preempt", "bind")),
            (self.rejected_nodes, [reason.code for reason in Reason]),
            (self.binds, ("bound", "declined", "failed")),
            (self.predictions, [result.value for result in Result]),
            (self.evictions, ("evicted", "rejected")),
            (self.preemptions, ("proposed", "corrected", "added", "controller", "nobody")),
            (self.ledger_conflicts, CONFLICTING),
            (self.requeues, ("requeued", "overtaken", "failed")),
            (self.loop_failures, ("intake", "reservations", "nodes", "notices", "requeues")),
        ):
            for outcome in outcomes:
                counter.labels(outcome)

        for reason in Reason:
            for verb in ("filter", "bind"):
                self.would_reject.labels(verb, reason.code)
        for surprise in Surprise:
            for overcommitted in ("yes", "no"):
                self.misses.labels(surprise.value, overcommitted)
