"""Decides which nodes must be weighed again because a change may affect their free memory.

Stale versions of a GPUNode, reservations that are already counted and most updates of pods do not
affect free memory.
"""

from collections.abc import Iterable, Mapping

from msgspec.structs import replace

from headroom.contract.gpunode import GPUNode, Reservation
from headroom.contract.kube import Pod


class WeighingQueue:
    """Queues dirty nodes.

    ``unlisted`` contains the kinds that must be listed before any node is weighed, because each
    later list would mark all nodes as dirty again.
    """

    def __init__(self, unlisted: Iterable[type]) -> None:
        self.unlisted = set(unlisted)
        #: Whether all kinds in ``unlisted`` have been listed and all nodes have been weighed since
        #: then.
        self.begun = not self.unlisted
        self._dirty: dict[str, None] = {}
        #: Nodes whose weighing raised an exception.
        self._failed: dict[str, None] = {}

    def __contains__(self, name: str) -> bool:
        return name in self._dirty

    @property
    def is_due(self) -> bool:
        """Whether a node can be weighed now."""
        return bool(self._dirty) and not self.unlisted

    def add(self, *names: str) -> None:
        self._dirty.update(dict.fromkeys(names))

    def pop(self) -> str:
        """Remove and return the first node."""
        name = next(iter(self._dirty))
        del self._dirty[name]
        return name

    def set_aside(self) -> dict[str, None]:
        """Empty the queue and return its nodes, for ``put_back``.

        While a kind is not listed, the queue stays unchanged and no nodes are returned.
        """
        if self.unlisted:
            return {}
        aside, self._dirty = self._dirty, {}
        return aside

    def put_back(self, aside: dict[str, None]) -> None:
        """Queue these nodes before all nodes that were added since then."""
        aside.update(self._dirty)
        self._dirty = aside

    def listed(self, kind: type) -> None:
        self.unlisted.discard(kind)
        self.update_begun()  # in a cluster without nodes nothing is ever weighed

    def update_begun(self) -> None:
        self.begun = self.begun or not (self.unlisted or self._dirty)

    def fail(self, name: str) -> None:
        """Record that the weighing of this node raised an exception."""
        self._failed[name] = None

    def retry_failed(self) -> None:
        """Queue the nodes whose weighing raised an exception."""
        self._dirty.update(self._failed)
        self._failed.clear()


def older(new: GPUNode, held: GPUNode) -> bool:
    """Return whether ``new`` is an earlier version of the same object than ``held``.

    The response to a write of this process can arrive before the watch events of earlier writes.
    """
    if new.metadata.uid != held.metadata.uid:
        return False
    try:
        return int(new.metadata.resource_version) < int(held.metadata.resource_version)
    except ValueError:
        return False


def as_assumed(new: GPUNode, held: GPUNode, assumed: Mapping[str, Reservation]) -> bool:
    """Return whether ``new`` differs from ``held`` only in reservations that already count.

    ``assumed`` contains the reservations of assumed binds by pod uid.
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
        uid not in reserved
        and uid in assumed
        and assumed[uid].charges == reservation.charges
        and assumed[uid].is_starting == reservation.is_starting
        for uid, reservation in changed.items()
    )


def matters(pod: Pod, before: Pod | None, gpunode: GPUNode | None) -> bool:
    """Return whether this version of a pod may change the free memory of its node.

    Every update of a pod without a reservation matters. A pod with a reservation matters when it
    ends or is deleted, or when it is bound after a report has shown it. Other updates do not
    matter. ``before`` is the previous version of the pod, or None if there was none. ``gpunode`` is
    the GPUNode of the pod's node.
    """
    uid = pod.metadata.uid
    if gpunode is None or uid not in gpunode.spec.reservations or _is_ending(pod):
        return True
    if before is None or not before.node:
        return gpunode.status is None or any(use.uid == uid for use in gpunode.status.pods)
    return before.node != pod.node or _is_ending(before)


def _is_ending(pod: Pod) -> bool:
    return pod.ended or pod.metadata.deletion_timestamp is not None
