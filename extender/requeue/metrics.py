"""The metric that counts requeued pods."""

from prometheus_client import CollectorRegistry, Counter

from headroom.runtime.telemetry import counter


def requeues(registry: CollectorRegistry) -> Counter:
    return counter(
        registry,
        "headroom_requeues_total",
        "Rejected pods that were requeued in kube-scheduler because they fit now, by outcome: "
        "requeued, overtaken (by another replica, or because the pod changed), failed.",
        outcome=("requeued", "overtaken", "failed"),
    )
