"""Writes reservations into one GPUNode, by compare-and-swap; shared by the parts of the ledger."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Protocol

import msgspec

from contract.gpunode import GPUNode, GPUNodeSpec, Reservation
from contract.kube import Pod
from contract.quantity import format_bytes
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
class ReservationWriter:
    """Writes reservations of a store."""

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
