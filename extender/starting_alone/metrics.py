"""The metric that measures the duration of starts."""

from prometheus_client import CollectorRegistry, Histogram

#: Buckets from 10 s, in which a pod with a model on the node's disk starts, to the longest usual
#: timeout.
_SECONDS = (10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 3600.0)


def start_durations(registry: CollectorRegistry) -> Histogram:
    durations = Histogram(
        "headroom_start_duration_seconds",
        "Time from the bind of a pod that starts alone to the end of its start, by its end: "
        "ready, settled (its memory use), stuck (its containers cannot be started), timed_out.",
        ["end"],
        buckets=_SECONDS,
        registry=registry,
    )
    for end in ("ready", "settled", "stuck", "timed_out"):
        durations.labels(end)
    return durations
