"""What of that which comes is news: an older version is none, and of pods only what their node
feels."""

from collections.abc import Mapping

from msgspec.structs import replace

from contract.gpunode import GPUNode, Reservation
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


def as_assumed(new: GPUNode, held: GPUNode, assumed: Mapping[str, Reservation]) -> bool:
    """Whether nothing is new but promises that count already: ``assumed`` is what binds under way
    were taken to promise."""
    version, was = new.metadata.resource_version, held.spec.reservations
    if (
        new.status is not held.status
        or replace(held.metadata, resource_version=version) != new.metadata
        or new.spec.initialised != held.spec.initialised
        or not new.spec.reservations.keys() > was.keys()
    ):
        return False
    changed = {uid: p for uid, p in new.spec.reservations.items() if was.get(uid) is not p}
    return all(
        uid not in was and uid in assumed and assumed[uid].charges == reservation.charges
        for uid, reservation in changed.items()
    )


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
