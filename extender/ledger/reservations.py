"""Writes reservations into GPUNodes by compare-and-swap, and is the only way to remove one."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from contract.gpunode import EVICTED, GPUNode, GPUNodeSpec, Reservation
from contract.kube import Pod
from contract.quantity import format_bytes
from extender.errors import StoreConflict, StoreError, StoreNotFound
from extender.ledger.store import Store

#: Attempts of a step that loses races. After that the pod is left to kube-scheduler's next attempt.
ATTEMPTS = 8


class Adopt(Protocol):
    """Returns the reservation to write for a pod that was bound without one; None if the pod needs
    none."""

    def __call__(self, pod: Pod, gpunode: GPUNode) -> Reservation | None: ...


def has_devices(gpunode: GPUNode) -> bool:
    """Return whether the agent has reported devices."""
    return bool(gpunode.status and gpunode.status.devices)


@dataclass(frozen=True, slots=True)
class Reservations:
    """Writes, adds, marks and removes reservations. Any caller may use it at any time."""

    store: Store
    adopt: Adopt
    #: Called with each GPUNode that was written, so that the next decision sees it at once.
    written: Callable[[GPUNode], None]
    #: Unix seconds.
    wall_s: Callable[[], float]
    new_id: Callable[[], str]
    #: Whether the devices of the node's pods are known.
    known: Callable[[GPUNode], bool] = has_devices

    def stamped(self, reservation: Reservation) -> Reservation:
        """Return the reservation with a new id of its attempt, and the present time."""
        since = datetime.fromtimestamp(self.wall_s(), UTC).isoformat(timespec="milliseconds")
        return msgspec.structs.replace(reservation, attempt=self.new_id(), since=since)

    async def write(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        """Replace the spec of ``before`` if it is still the newest version; raise store errors."""
        reserved = sum(
            max(charge.candidates.values(), default=0) * charge.count
            for reservation in spec.reservations.values()
            for charge in reservation.charges
        )
        spec = msgspec.structs.replace(spec, reserved=format_bytes(reserved))
        after = await self.store.write_spec(before, spec)
        self.written(after)
        return after

    async def remove(self, node: str, uid: str, left: bool = False) -> bool:
        """Remove a reservation unless its pod may run on the node. This is the only way to remove
        one.

        A pod that is gone from the store may have run on the node, and its containers may still
        run. So its reservation stays unless the pod is known to have ended, never ran there, or has
        ``left`` since it was deleted (``departed_by``). A report that still shows the pod overrides
        ``left``.

        Return whether the reservation is gone. Return False also if the store does not answer; then
        it stays, which is safe.
        """
        for _ in range(ATTEMPTS):
            try:
                gpunode = await self.store.read_gpunode(node)
                if gpunode is None or uid not in gpunode.spec.reservations:
                    return True
                reservation = gpunode.spec.reservations[uid]
                # Read from the store: a cache could still show the pod unbound.
                pod = await self.store.read_pod(reservation.namespace, reservation.name)
                if pod is not None and pod.metadata.uid == uid:
                    if pod.node == node and not pod.ended:
                        return False
                    if not pod.node:
                        # Bindings in flight carry the old resourceVersion and now fail.
                        await self.store.touch_pod(pod, self.new_id())
                elif not left or _shown(gpunode, uid):
                    return False
                rest = {u: r for u, r in gpunode.spec.reservations.items() if u != uid}
                await self.write(gpunode, msgspec.structs.replace(gpunode.spec, reservations=rest))
                return True
            except (StoreConflict, StoreNotFound):
                continue
            except StoreError:
                return False
        return False

    async def charge(self, node: str, unreserved_pod: Pod) -> bool:
        """Write the reservation of a pod that is bound to the node without one, even if that
        overcommits a device. Any caller may use it at any time.

        Return whether the reservation is written or not needed. Return False also if the store does
        not answer.
        """
        metadata = unreserved_pod.metadata
        for _ in range(ATTEMPTS):
            try:
                gpunode = await self.store.read_gpunode(node)
                if gpunode is None or metadata.uid in gpunode.spec.reservations:
                    return True
                # Read after the GPUNode: a pod that is there now was bound without the ledger, or
                # its reservation was removed because the pod had ended.
                pod = await self.store.read_pod(metadata.namespace, metadata.name)
                if pod is None or pod.metadata.uid != metadata.uid:
                    return True
                if pod.node != node or pod.ended or not gpunode.spec.initialised:
                    return True
                if not self.known(gpunode):
                    return False  # the reservation lists the devices, which are not known yet
                if (reservation := self.adopt(pod, gpunode)) is None:
                    return True
                reservations = {
                    **gpunode.spec.reservations,
                    metadata.uid: self.stamped(reservation),
                }
                spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)
                await self.write(gpunode, spec)
                return True
            except (StoreConflict, StoreNotFound):
                continue
            except StoreError:
                return False
        return False

    async def mark(self, gpunode: GPUNode, leave: Collection[str]) -> GPUNode:
        """Mark exactly these pods to leave the node before they start, as far as ``gpunode`` has
        reservations for them. Return the GPUNode that was written; raise store errors."""
        reservations = {
            uid: _marked(reservation, uid in leave)
            for uid, reservation in gpunode.spec.reservations.items()
        }
        if reservations == gpunode.spec.reservations:
            return gpunode
        return await self.write(
            gpunode, msgspec.structs.replace(gpunode.spec, reservations=reservations)
        )

    async def departed_by(self, node: str, uid: str, reservation: Reservation) -> str | None:
        """Return a version of the agent's Lease that is newer than the removal of the pod.

        If the agent had seen a later Lease version when it took a sample, the pod was already gone.
        Return an empty string if the agent has no Lease; None if the pod still exists or the store
        does not answer.
        """
        try:
            gone = await self.store.read_pod(reservation.namespace, reservation.name)
            if gone is not None and gone.metadata.uid == uid:
                return None
            # Read after the pod, and from the store: a watch may be behind.
            return await self.store.read_heartbeat_version(node)
        except StoreError:
            return None


def _shown(gpunode: GPUNode, uid: str) -> bool:
    return gpunode.status is not None and any(use.uid == uid for use in gpunode.status.pods)


def _marked(reservation: Reservation, leaves: bool) -> Reservation:
    if leaves == (EVICTED in reservation.flags):
        return reservation
    flags = [flag for flag in reservation.flags if flag != EVICTED] + [EVICTED] * leaves
    return msgspec.structs.replace(reservation, flags=flags)
