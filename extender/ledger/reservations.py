"""Writes reservations into GPUNodes by compare-and-swap. Only this module removes reservations."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Protocol

import msgspec

from extender.ledger.store import Store
from headroom.contract.gpunode import (
    EVICTED,
    RUNNING,
    GPUNode,
    GPUNodeSpec,
    OveruseEviction,
    Reservation,
)
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.errors import StoreConflict, StoreError, StoreNotFound

#: Number of attempts for a step whose writes conflict with other clients' writes. After that, the
#: pod waits for kube-scheduler's next attempt.
ATTEMPTS = 8
#: The resolution of the field ``since`` of a reservation.
_TICK = timedelta(milliseconds=1)


class Adopt(Protocol):
    """Returns the reservation to write for a pod that was bound without a reservation, or None if
    the pod needs none."""

    def __call__(self, pod: Pod, gpunode: GPUNode) -> Reservation | None: ...


def has_devices(gpunode: GPUNode) -> bool:
    """Return whether the agent has reported devices."""
    return bool(gpunode.status and gpunode.status.devices)


@dataclass(frozen=True, slots=True)
class Reservations:
    """Writes, adds, marks and removes reservations. Concurrent calls are safe."""

    store: Store
    adopt: Adopt
    #: A callback that receives each written GPUNode, so that the next decision is based on it.
    written: Callable[[GPUNode], None]
    #: A function that returns the current time in Unix seconds.
    wall_s: Callable[[], float]
    new_id: Callable[[], str]
    #: A function that returns whether the node's devices are known, so that its pods can be
    #: charged.
    known: Callable[[GPUNode], bool] = has_devices

    def stamped(self, reservation: Reservation, gpunode: GPUNode) -> Reservation:
        """Return a copy with a new attempt id, and the current time as ``since``.

        The reservation is written to ``gpunode``. Pods that start alone start in the order of
        ``since``, so the new ``since`` is later than the ``since`` of each other starting pod
        there, even if the clocks of the replicas differ.
        """
        at = datetime.fromtimestamp(self.wall_s(), UTC)
        if reservation.is_starting:
            at = max([at, *(last + _TICK for last in _starts(gpunode))])
        since = at.isoformat(timespec="milliseconds")
        return msgspec.structs.replace(reservation, attempt=self.new_id(), since=since)

    async def write(self, before: GPUNode, spec: GPUNodeSpec) -> GPUNode:
        """Replace the spec of ``before`` by ``spec``, and set the sum ``reserved`` in it.

        Return the written GPUNode. Raise store errors, such as ``StoreConflict`` if ``before`` is
        not the newest version.
        """
        reserved = sum(
            charge.total_bytes
            for reservation in spec.reservations.values()
            for charge in reservation.charges
        )
        spec = msgspec.structs.replace(spec, reserved=gib(reserved))
        after = await self.store.write_spec(before, spec)
        self.written(after)
        return after

    async def remove(self, node: str, uid: str, left: bool = False) -> bool:
        """Remove a reservation unless its pod may run on the node. No other function removes
        reservations.

        * If the pod exists, the reservation is removed if the pod has ended, is unbound, or is
          bound to another node.
        * If the pod is deleted, its containers may still run. The reservation is removed only with
          ``left``, which means that the caller has proof that they do not run on the node, such as
          a sample that was taken after the deletion (``departed_by``). A report that shows the pod
          overrides this proof.

        Return True if the GPUNode no longer has the reservation. Return False if the reservation
        stays, or may stay after a store error or ``ATTEMPTS`` lost races, which is safe.
        """
        for _ in range(ATTEMPTS):
            try:
                gpunode = await self.store.read_gpunode(node)
                if gpunode is None or uid not in gpunode.spec.reservations:
                    return True
                reservation = gpunode.spec.reservations[uid]
                # Read from the store, because a cache could still show the pod unbound.
                pod = await self.store.read_pod(reservation.namespace, reservation.name)
                if pod is not None and pod.metadata.uid == uid:
                    if pod.node == node and not pod.ended:
                        return False
                    if not pod.node:
                        # Bindings in flight require the old resourceVersion, so they fail now.
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
        """Write the reservation of a pod that is bound to the node without a reservation, even if
        that overcommits a device.

        Return True if the reservation is written or not needed. It is not needed if the pod has
        ended, is on another node or requests no GPU, or if the node is not initialised yet, because
        the initialisation charges all its pods. Return False if the node's devices are not known,
        and after a store error or ``ATTEMPTS`` lost races.
        """
        metadata = unreserved_pod.metadata
        for _ in range(ATTEMPTS):
            try:
                gpunode = await self.store.read_gpunode(node)
                if gpunode is None or metadata.uid in gpunode.spec.reservations:
                    return True
                # Read the pod after the GPUNode. So if the pod is on the node now, it was bound
                # without the ledger, or its reservation was removed because the pod had ended.
                pod = await self.store.read_pod(metadata.namespace, metadata.name)
                if pod is None or pod.metadata.uid != metadata.uid:
                    return True
                if pod.node != node or pod.ended or not gpunode.spec.initialised:
                    return True
                if not self.known(gpunode):
                    return False  # the reservation must list the devices, which are not known yet
                if (reservation := self.adopt(pod, gpunode)) is None:
                    return True
                stamped = self.stamped(reservation, gpunode)
                reservations = {**gpunode.spec.reservations, metadata.uid: stamped}
                spec = msgspec.structs.replace(gpunode.spec, reservations=reservations)
                await self.write(gpunode, spec)
                return True
            except (StoreConflict, StoreNotFound):
                continue
            except StoreError:
                return False
        return False

    async def mark(self, gpunode: GPUNode, leave: Collection[str]) -> GPUNode:
        """Set the flag ``EVICTED`` on the reservations of the pods in ``leave`` (uids), and clear
        it on all other reservations.

        Return the GPUNode that was written, or ``gpunode`` if no flag changes. Raise store errors.
        """
        reservations = {
            uid: _marked(reservation, uid in leave)
            for uid, reservation in gpunode.spec.reservations.items()
        }
        if reservations == gpunode.spec.reservations:
            return gpunode
        return await self.write(
            gpunode, msgspec.structs.replace(gpunode.spec, reservations=reservations)
        )

    async def end_starts(
        self, node: str, ended: Callable[[GPUNode], Collection[str]]
    ) -> Collection[str]:
        """Set the phase of pods whose start has ended from starting to running.

        ``ended`` returns the uids of these pods for one version of the GPUNode. Return the uids
        whose phase this call has set. Raise store errors. After ``ATTEMPTS`` conflicts, return no
        uids.
        """
        for _ in range(ATTEMPTS):
            gpunode = await self.store.read_gpunode(node)
            uids = ended(gpunode) if gpunode is not None else ()
            if gpunode is None or not uids:
                return ()
            running = {
                uid: msgspec.structs.replace(gpunode.spec.reservations[uid], phase=RUNNING)
                for uid in uids
            }
            reservations = {**gpunode.spec.reservations, **running}
            started = msgspec.structs.replace(gpunode.spec, reservations=reservations)
            with suppress(StoreConflict, StoreNotFound):
                await self.write(gpunode, started)
                return uids
        return ()

    async def decide_overuse(
        self, gpunode: GPUNode, decided: Mapping[str, OveruseEviction], withdrawn: Collection[str]
    ) -> GPUNode:
        """Set ``overuse`` on the reservations of the pods in ``decided`` (uids), and remove it from
        the reservations in ``withdrawn``.

        Return the GPUNode that was written, or ``gpunode`` if nothing changes. Raise store errors.
        """
        reservations = {
            uid: _with_overuse(reservation, msgspec.UNSET if uid in withdrawn else decided.get(uid))
            for uid, reservation in gpunode.spec.reservations.items()
        }
        if reservations == gpunode.spec.reservations:
            return gpunode
        return await self.write(
            gpunode, msgspec.structs.replace(gpunode.spec, reservations=reservations)
        )

    async def reject_overuse(self, node: str, uid: str) -> None:
        """Record that the eviction of the pod has just been rejected. Raise store errors.

        Nothing is written if the pod no longer has to be evicted.
        """
        gpunode = await self.store.read_gpunode(node)
        reservation = gpunode.spec.reservations.get(uid) if gpunode else None
        if gpunode is None or reservation is None or not reservation.overuse:
            return
        rejected_at = datetime.fromtimestamp(self.wall_s(), UTC).isoformat()
        decision = msgspec.structs.replace(reservation.overuse, rejected_at=rejected_at)
        await self.decide_overuse(gpunode, {uid: decision}, ())

    async def departed_by(self, node: str, uid: str, reservation: Reservation) -> str | None:
        """Return the version of the agent's Lease, read after the pod was found to be deleted.

        Each later version of the Lease was written after the deletion. So if the agent takes a
        sample after it has read a later version, the sample was taken after the deletion. Return an
        empty string if the agent has no Lease. Return None if the pod still exists, or after a
        store error.
        """
        try:
            gone = await self.store.read_pod(reservation.namespace, reservation.name)
            if gone is not None and gone.metadata.uid == uid:
                return None
            # Read the Lease after the pod, and from the store because a watch may be late.
            return await self.store.read_heartbeat_version(node)
        except StoreError:
            return None


def _starts(gpunode: GPUNode) -> Iterator[datetime]:
    """Yield ``since`` of each starting pod, except for times that cannot be read."""
    for reservation in gpunode.spec.reservations.values():
        if reservation.is_starting:
            with suppress(ValueError, OverflowError):
                yield datetime.fromisoformat(reservation.since).astimezone(UTC)


def _shown(gpunode: GPUNode, uid: str) -> bool:
    return gpunode.status is not None and any(use.uid == uid for use in gpunode.status.pods)


def _with_overuse(
    reservation: Reservation, decided: OveruseEviction | msgspec.UnsetType | None
) -> Reservation:
    if decided is None or reservation.overuse == decided:
        return reservation
    return msgspec.structs.replace(reservation, overuse=decided)


def _marked(reservation: Reservation, is_evicted: bool) -> Reservation:
    if is_evicted == (EVICTED in reservation.flags):
        return reservation
    flags = [flag for flag in reservation.flags if flag != EVICTED] + [EVICTED] * is_evicted
    return msgspec.structs.replace(reservation, flags=flags)
