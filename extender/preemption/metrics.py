"""The metric that counts preemptions, both by calls of kube-scheduler and by the controller."""

from prometheus_client import CollectorRegistry, Counter

from headroom.runtime.telemetry import counter


def preemptions(registry: CollectorRegistry) -> Counter:
    return counter(
        registry,
        "headroom_preemptions_total",
        "Preemptions by how the victims were chosen: proposed (by kube-scheduler, unchanged), "
        "corrected, added (a node that it did not propose), controller (without a call of "
        "kube-scheduler), or none (no eviction helps, or enough memory is freed soon anyway).",
        choice=("proposed", "corrected", "added", "controller", "none"),
    )
