"""The Prometheus metrics of Headroom's processes. The registry is an argument, never global.

``extender.observability.fleet_metrics`` has the metrics that are read from a snapshot.
"""

import asyncio
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from itertools import product
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from contract.printable import printable_lines
from contract.reasons import Reason
from extender.placement.prediction_outcome import Result, Surprise
from extender.placement.snapshot import Snapshot
from extender.version import own_version

# Else the library adds a gauge with the time of creation to each counter and histogram.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

#: From 0.1 ms, which a repeated rejection takes, to 1 s, the order of schedulers' timeouts.
_SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

#: From 1 ms, which delays no call noticeably, to 1 s.
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)

#: From 0.1 s, with an idle kubelet, to 300 s, with a kubelet that waits for its disk.
_WINDOW_SECONDS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)

#: From 10 s, with a model on the node's disk, to the longest timeout that is usual.
_START_SECONDS = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)

#: Seconds between two measurements of the event loop.
LAG_EVERY_S = 0.05

#: Kinds of writes that the API server rejects if another client wrote the object first.
CONFLICTING = ("spec", "pod", "binding", "finalizer", "create")


def _counter(registry: CollectorRegistry, name: str, text: str, **labels: Iterable[str]) -> Counter:
    """Create a counter. ``labels`` maps each label to its known values.

    Series with known values start at 0, because alerts need them.
    """
    counter = Counter(name, text, list(labels), registry=registry)
    for values in product(*labels.values()):
        if values:
            counter.labels(*values)
    return counter


class ProcessTelemetry:
    """Metrics of every process; ``loops`` are the names of loops whose failures count from 0."""

    loops: tuple[str, ...] = ()

    def __init__(self, registry: CollectorRegistry) -> None:
        self.registry = registry
        build = Info("headroom_build", "Version of Headroom.", registry=registry)
        build.info({"version": own_version()})
        self.settings_reloads = _counter(
            registry,
            "headroom_settings_reloads_total",
            "Changes of the settings file by outcome: taken, rejected (the old settings stay).",
            outcome=("taken", "rejected"),
        )
        self.loop_failures = _counter(
            registry,
            "headroom_loop_failures_total",
            "Rounds of the process's loops that ended with an exception, by loop. Each is logged "
            "as loop_failed, and the loop continues.",
            loop=self.loops,
        )


class WebhookTelemetry(ProcessTelemetry):
    """Metrics of the admission webhook."""

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.ready = Gauge(
            "headroom_webhook_ready",
            "1 while reviews can be answered, as reported by /readyz.",
            registry=registry,
        )
        self.admission_seconds = Histogram(
            "headroom_admission_duration_seconds",
            "Time from the last byte of an admission request to the first byte of its answer, by "
            "path: mutate or validate.",
            ["path"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.admission_errors = _counter(
            registry,
            "headroom_admission_errors_total",
            "Admission requests that were not answered with a review: the API server applies the "
            "failure policy.",
            path=(),
        )

    def exposition(self, ready: bool) -> bytes:
        """Return the body of /metrics."""
        self.ready.set(ready)
        return printable_lines(generate_latest(self.registry).decode()).encode()


class RecorderTelemetry(ProcessTelemetry):
    """Metrics of the recorder."""

    loops = ("election", "record", "history")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.ready = Gauge(
            "headroom_recorder_ready", "1 while /readyz answers 200.", registry=registry
        )
        self.leads = Gauge(
            "headroom_recorder_leads",
            "1 while this recorder holds the Lease and writes VRAMProfiles.",
            registry=registry,
        )
        self.lives = _counter(
            registry,
            "headroom_recorder_lives_total",
            "Lives of containers that ended, by ending: completed, failed, evicted, oom-killed or "
            "unknown.",
            ending=("completed", "failed", "evicted", "oom-killed", "unknown"),
        )
        self.writes = _counter(
            registry,
            "headroom_recorder_writes_total",
            "Writes of VRAMProfiles by outcome: written, conflict (another process wrote it "
            "first; it is written again) or failed.",
            outcome=("written", "conflict", "failed"),
        )
        self.profiles = Gauge(
            "headroom_recorder_profiles",
            "VRAMProfiles in memory; 0 while another recorder leads.",
            registry=registry,
        )
        self.waiting = Gauge(
            "headroom_recorder_lives_waiting",
            "Lives that ended and are not written yet.",
            registry=registry,
        )
        self.past_lives = Gauge(
            "headroom_recorder_past_lives",
            "Lives read from Prometheus that wait for a pod of their owner.",
            registry=registry,
        )

    def exposition(self, ready: bool) -> bytes:
        """Return the body of /metrics."""
        self.ready.set(ready)
        return printable_lines(generate_latest(self.registry).decode()).encode()


class ViewTelemetry(ProcessTelemetry):
    """Metrics of a process that follows the cluster.

    ``ready`` is the name of its readiness gauge. With one name for all processes, the alert about
    one of them could not fire while another one is ready.
    """

    def __init__(self, registry: CollectorRegistry, ready: str) -> None:
        super().__init__(registry)
        #: The snapshot of the scrape in progress; None between scrapes.
        self.scraped: Snapshot | None = None
        self._scraping = threading.Lock()
        self.ready = Gauge(ready, "1 while /readyz answers 200.", registry=registry)
        self.history_queries = _counter(
            registry,
            "headroom_history_queries_total",
            "Queries to Prometheus for SM activity by outcome: answered or failed.",
            outcome=("answered", "failed"),
        )
        self.history_devices = Gauge(
            "headroom_history_devices",
            "Devices with fresh history of SM activity.",
            registry=registry,
        )
        self.loop_lag_seconds = Histogram(
            "headroom_loop_lag_seconds",
            "How late the event loop runs, sampled 20 times a second. A scheduler call that "
            "arrives at that moment waits this long before it is processed.",
            buckets=_LAG_SECONDS,
            registry=registry,
        )
        self.generation = Gauge(
            "headroom_snapshot_generation",
            "Generation of the snapshot that decisions are made on.",
            registry=registry,
        )

    def exposition(self, snap: Snapshot, ready: bool) -> bytes:
        """Return the body of /metrics, for one scrape at a time.

        The reference to the snapshot is dropped at the end, because the next snapshot has to be
        copied while it is held.
        """
        with self._scraping:
            self.scraped = snap
            try:
                self.generation.set(snap.generation)
                self.ready.set(ready)
                return printable_lines(generate_latest(self.registry).decode()).encode()
            finally:
                self.scraped = None


class Telemetry(ViewTelemetry):
    """Metrics of the extender."""

    loops = ("event_queue", "reservations", "nodes", "notices", "requeues")

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry, "headroom_ready")
        counter = partial(_counter, registry)
        reasons = [reason.code for reason in Reason]
        self.verb_seconds = Histogram(
            "headroom_verb_duration_seconds",
            "Time from the last byte of a scheduler call to the first byte of its answer.",
            ["verb"],
            buckets=_SECONDS,
            registry=registry,
        )
        self.verb_cpu_seconds = counter(
            "headroom_verb_cpu_seconds_total",
            "CPU time of filter, prioritize and preempt, from the first byte of a call to the last "
            "of its answer; bind is not counted, because it waits.",
            verb=(),
        )
        self.verb_errors = counter(
            "headroom_verb_errors_total",
            "Scheduler calls that were answered with an error.",
            verb=("filter", "prioritize", "preempt", "bind"),
        )
        self.rejected_nodes = counter(
            "headroom_rejected_nodes_total",
            "Nodes rejected in filter calls, by the code of the reason.",
            reason=reasons,
        )
        self.spread_retries = counter(
            "headroom_retries_spread_total",
            "Filter calls for pods rejected before that again fit no node, answered with an Error "
            "because too many such pods were tried in the same second.",
        )
        self.would_reject = counter(
            "headroom_would_reject_total",
            "Calls that passed a pod only because the mode is observe, by the code of the reason. "
            "filter: no offered node fits (the reason of most nodes); bind: the node of the bind "
            "does not fit.",
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
        self.binds = counter(
            "headroom_binds_total",
            "Bind calls by outcome: bound, declined (the pod no longer fits) or failed.",
            outcome=("bound", "declined", "failed"),
        )
        self.predictions = counter(
            "headroom_predictions_total",
            "Pods by how their device compares with the candidates at binding: hit; shifted (to a "
            "device with enough free memory, because of pods that Headroom bound later); miss; "
            "unseen (no report showed the pod before it was gone). Only the replica "
            "that bound the pod counts it, so replicas can be summed. Pods that were unconfirmed "
            "when that replica stopped are not counted.",
            result=[result.value for result in Result],
        )
        self.misses = counter(
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
        self.evictions = counter(
            "headroom_evictions_total",
            "Evictions by outcome: evicted, rejected (by the API server).",
            outcome=("evicted", "rejected"),
        )
        self.overuse_evictions = counter(
            "headroom_overuse_evictions_total",
            "Evictions of pods that use more than they reserved: decided, withdrawn (the pressure "
            "ended), evicted, rejected (by the API server), would_evict (in mode observe).",
            outcome=("decided", "withdrawn", "evicted", "rejected", "would_evict"),
        )
        self.overuse_unresolved = Gauge(
            "headroom_overuse_unresolved_devices",
            "Devices on which pods lack memory that they reserved because of others' overuse, and "
            "no pod may be evicted, by settings, annotations or the API server.",
            registry=registry,
        )
        self.starts = Histogram(
            "headroom_start_duration_seconds",
            "Time from the bind of a pod that starts alone to the end of its start, by its end: "
            "ready, settled (its memory use), stuck (its containers cannot be started), timed_out.",
            ["end"],
            buckets=_START_SECONDS,
            registry=registry,
        )
        for end in ("ready", "settled", "stuck", "timed_out"):
            self.starts.labels(end)
        self.preemptions = counter(
            "headroom_preemptions_total",
            "Preemptions by how the victims were chosen: proposed (by kube-scheduler, unchanged), "
            "corrected, added (a node that it did not propose), controller (without a call of "
            "kube-scheduler), or none (no eviction helps, or enough memory is freed soon anyway).",
            choice=("proposed", "corrected", "added", "controller", "none"),
        )
        self.ledger_conflicts = counter(
            "headroom_ledger_conflicts_total",
            "Writes that the API server rejected because another client wrote the object first, by "
            "what was written: spec, pod, binding, finalizer or create. Each was retried with the "
            "newer object, or given up.",
            write=CONFLICTING,
        )
        self.requeues = counter(
            "headroom_requeues_total",
            "Rejected pods that were requeued in kube-scheduler because they fit now, by outcome: "
            "requeued, overtaken (by another replica, or because the pod changed), failed.",
            outcome=("requeued", "overtaken", "failed"),
        )
        self.events = counter(
            "headroom_events_total",
            "Kubernetes Events by outcome: written (or already written by another replica), failed "
            "(retried later).",
            reason=(),
            outcome=(),
        )


async def sample_lag(observe: Callable[[float], None], every_s: float = LAG_EVERY_S) -> None:
    """Pass to ``observe`` by how many seconds each of many short sleeps ends late.

    Whatever blocks the event loop, or holds the interpreter's lock, delays each call by that time.
    """
    while True:
        due_s = time.perf_counter() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, time.perf_counter() - due_s))


class CertificateCollector(Collector):
    """Reads the certificate files at each scrape.

    It exports nothing for a file that cannot be read. The server does not load such a file either:
    it keeps the previous certificate.
    """

    def __init__(self, served: Mapping[str, Path]) -> None:
        """Create a collector; ``served`` maps each port to the file of its certificate."""
        self._served = served

    def collect(self) -> Iterator[GaugeMetricFamily]:
        family = GaugeMetricFamily(
            "headroom_certificate_end_timestamp_seconds",
            "Expiry time of the certificate in the file of a port.",
            labels=["port"],
        )
        for port, path in self._served.items():
            try:
                # The package that reads certificates is an optional dependency.
                from extender.certs.pki import NotAPair, ends_at
            except ImportError:
                break
            try:
                family.add_metric([port], ends_at(path.read_bytes()).timestamp())
            except (OSError, NotAPair):
                continue
        yield family
