"""The metric that counts the evictions of all controllers."""

from prometheus_client import CollectorRegistry, Counter

from headroom.runtime.telemetry import counter


def evictions(registry: CollectorRegistry) -> Counter:
    return counter(
        registry,
        "headroom_evictions_total",
        "Evictions by outcome: evicted, rejected (by the API server).",
        outcome=("evicted", "rejected"),
    )
