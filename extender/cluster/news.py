"""What of that which comes is news: an older version is none, and of pods only what their node
feels."""

from contract.gpunode import GPUNode
from contract.kube import Pod


def older(new: GPUNode, held: GPUNode) -> bool:
    """Whether ``new`` is an earlier version of the same object than the one held.

    What our own write returned can arrive before the watch tells of the writes before it.
    """
    if new.metadata.uid != held.metadata.uid:
        return False
    try:
        return int(new.metadata.resource_version) < int(held.metadata.resource_version)
    except ValueError:
        return False


def matters(pod: Pod, before: Pod | None, gpunode: GPUNode | None) -> bool:
    """Whether what its node has left hangs on what the pod is now. Of one that has a promise
    there only on when it leaves, and on its coming where a report shows it already: most
    of what is told of pods is neither. ``before``: as it was held; ``gpunode``: its node's."""
    uid = pod.metadata.uid
    if gpunode is None or uid not in gpunode.spec.reservations or _leaves(pod):
        return True
    if before is None or not before.node:
        return gpunode.status is None or any(use.uid == uid for use in gpunode.status.pods)
    return before.node != pod.node or _leaves(before)


def _leaves(pod: Pod) -> bool:
    return pod.ended or pod.metadata.deletion_timestamp is not None
