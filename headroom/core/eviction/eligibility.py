"""Facts about a pod that decide whether it may be evicted."""

from headroom.contract.foreign_keys import MIRRORED
from headroom.contract.kube import Pod


def is_static(pod: Pod) -> bool:
    return pod.annotation(MIRRORED) is not None


def leaves_within(pod: Pod, most_grace_s: int | None) -> bool:
    """Return whether the pod is being deleted with at most this grace period (None for any)."""
    metadata = pod.metadata
    grace_s = metadata.deletion_grace_period_seconds or 0
    return bool(metadata.deletion_timestamp) and (most_grace_s is None or grace_s <= most_grace_s)
