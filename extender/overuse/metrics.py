"""Metrics of evictions for overuse."""

from prometheus_client import CollectorRegistry, Gauge

from headroom.runtime.telemetry import counter


class OveruseMetrics:
    def __init__(self, registry: CollectorRegistry) -> None:
        self.evictions = counter(
            registry,
            "headroom_overuse_evictions_total",
            "Evictions of pods that use more than they reserved, or than their limit: decided, "
            "withdrawn (the pressure or the excess ended), evicted, rejected (by the API server), "
            "would_evict (in mode observe).",
            outcome=("decided", "withdrawn", "evicted", "rejected", "would_evict"),
        )
        self.unresolved = Gauge(
            "headroom_overuse_unresolved_devices",
            "Devices on which pods lack memory that they reserved because of others' overuse, and "
            "no pod may be evicted, by settings, annotations or the API server.",
            registry=registry,
        )
