"""The Prometheus metrics of Headroom's processes. The registry is an argument, never global.

``console.metrics`` contains the metrics that are computed from a snapshot.
"""

import asyncio
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import product
from pathlib import Path

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, generate_latest
from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from headroom.contract.printable import printable_lines
from headroom.version import own_version

# Otherwise the library adds a gauge with the time of creation to each counter and histogram.
prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]

#: Buckets from 0.1 ms, which a repeated rejection takes, to 1 s, which is near the timeouts of
#: schedulers.
SECONDS = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)

#: Buckets from 1 ms, which delays no call noticeably, to 1 s.
_LAG_SECONDS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.3, 1.0)

#: Seconds between two measurements of the event loop.
LAG_EVERY_S = 0.05


def counter(registry: CollectorRegistry, name: str, text: str, **labels: Iterable[str]) -> Counter:
    """Create a counter. ``labels`` maps each label to its known values.

    Series with known values start at 0, because alerts need them.
    """
    counter = Counter(name, text, list(labels), registry=registry)
    for values in product(*labels.values()):
        if values:
            counter.labels(*values)
    return counter


class ProcessTelemetry:
    """Metrics that every process has.

    ``ready`` is the name of the process's readiness gauge. Each kind of process has its own name,
    because otherwise the alert about one process could not fire while another process is ready.
    """

    loops: tuple[str, ...] = ()

    def __init__(self, registry: CollectorRegistry, ready: str) -> None:
        self.registry = registry
        self.ready = Gauge(ready, "1 while /readyz answers 200.", registry=registry)
        build = Info("headroom_build", "Version of Headroom.", registry=registry)
        build.info({"version": own_version()})
        self.settings_reloads = counter(
            registry,
            "headroom_settings_reloads_total",
            "Changes of the settings file by outcome: taken, rejected (the old settings stay).",
            outcome=("taken", "rejected"),
        )
        self.loop_failures = counter(
            registry,
            "headroom_loop_failures_total",
            "Rounds of the process's loops that ended with an exception, by loop. Each is logged "
            "as loop_failed, and the loop continues.",
            loop=self.loops,
        )

    def exposition(self, ready: bool) -> bytes:
        """Return the body of /metrics."""
        self.ready.set(ready)
        return printable_lines(generate_latest(self.registry).decode()).encode()


class ViewTelemetry(ProcessTelemetry):
    """Metrics of a process that follows the cluster."""

    def __init__(self, registry: CollectorRegistry, ready: str) -> None:
        super().__init__(registry, ready)
        self.history_queries = counter(
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


async def sample_lag(observe: Callable[[float], None], every_s: float = LAG_EVERY_S) -> None:
    """Sleep for short times, and call ``observe`` with the number of seconds by which each sleep
    ends late.

    If the event loop is blocked or the interpreter's lock is held, each call is delayed by that
    time.
    """
    while True:
        due_s = time.perf_counter() + every_s
        await asyncio.sleep(every_s)
        observe(max(0.0, time.perf_counter() - due_s))


class CertificateCollector(Collector):
    """Reads the certificate files at each scrape.

    It exports nothing for a file that cannot be read. The server does not load such a file either,
    but keeps the previous certificate.
    """

    def __init__(self, served: Mapping[str, Path]) -> None:
        """Create a collector. ``served`` maps each port to its certificate file."""
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
                from cryptography import x509
            except ImportError:
                break
            try:
                end = x509.load_pem_x509_certificate(path.read_bytes()).not_valid_after_utc
                family.add_metric([port], end.timestamp())
            except (OSError, ValueError):
                continue
        yield family
