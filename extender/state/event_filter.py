"""Filters watch events that cannot change a decision: stale versions of a GPUNode, writes that are
counted already, and pod updates that do not affect the node."""

from collections.abc import Mapping

from msgspec.structs import replace

from contract.gpunode import GPUNode, Reservation
from contract.kube import Pod


def older(new: GPUNode, held: GPUNode) -> bool:
    """Whether ``new`` is an earlier version of the same object than ``held``.

    The result of our own write can arrive before the watch events of the writes before it.
    """
    if new.metadata.uid != held.metadata.uid:
        return False
    try:
        return int(new.metadata.resource_version) < int(held.metadata.resource_version)
    except ValueError:
        return False


def as_assumed(new: GPUNode, held: GPUNode, assumed: Mapping[str, Reservation]) -> bool:
    """Whether ``new`` differs from ``held`` only in reservations that count already.

    ``assumed``: pod uid -> reservation of an assumed bind.
    """
    version, reserved = new.metadata.resource_version, held.spec.reservations
    if (
        new.status is not held.status
        or replace(held.metadata, resource_version=version) != new.metadata
        or new.spec.initialised != held.spec.initialised
        or not new.spec.reservations.keys() > reserved.keys()
    ):
        return False
    changed = {uid: p for uid, p in new.spec.reservations.items() if reserved.get(uid) is not p}
    return all(
        uid not in reserved and uid in assumed and assumed[uid].charges == reservation.charges
        for uid, reservation in changed.items()
    )


def matters(pod: Pod, before: Pod | None, gpunode: GPUNode | None) -> bool:
    """Whether this version of a pod may change the free memory of its node.

    A pod with a reservation matters when it ends or is deleted, and when it is bound after a report
    has shown it. Most updates of pods are neither. Every update of a pod without one matters.
    ``before``: the last version, None if there was none; ``gpunode``: that of the pod's node.
    """
    uid = pod.metadata.uid
    if gpunode is None or uid not in gpunode.spec.reservations or _is_ending(pod):
        return True
    if before is None or not before.node:
        return gpunode.status is None or any(use.uid == uid for use in gpunode.status.pods)
    return before.node != pod.node or _is_ending(before)


def _is_ending(pod: Pod) -> bool:
    return pod.ended or pod.metadata.deletion_timestamp is not None
