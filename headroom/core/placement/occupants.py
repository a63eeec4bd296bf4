"""Finds the pods with a reservation that use a memory of a node.

Either the report shows them there, or the pod's own NVIDIA_VISIBLE_DEVICES selects the devices.
"""

from collections.abc import Mapping, Sequence

import msgspec

from headroom.contract.gpunode import Charge, Device, Reservation
from headroom.core.placement.report_index import Memory, ReportIndex, Rows


class Occupant(msgspec.Struct, frozen=True, gc=False):
    """A pod with a reservation that the report shows in a memory, or that is certain to use it."""

    uid: str
    namespace: str
    name: str
    requested_bytes: int
    #: Rows of the report with the pod in this memory. Empty if the report does not show it there.
    rows: Rows
    #: Whether the pod's own NVIDIA_VISIBLE_DEVICES decides its devices. If so, not its replicas but
    #: its memory use shows which devices it uses.
    by_environment: bool
    #: Whether it starts alone, and its start has not ended.
    starting: bool = False


class EnvironmentPods:
    """Pods whose own NVIDIA_VISIBLE_DEVICES decides their devices, whichever replicas they hold."""

    def __init__(self, reservations: Mapping[str, Reservation]) -> None:
        #: Reserved bytes by uid and device.
        self.uids: dict[str, dict[str, int]] = {}
        #: Uids of the pods with a reservation on each device.
        self._on: dict[str, list[str]] = {}
        for uid, reservation in reservations.items():
            for charge in reservation.charges:
                if charge.by_environment:
                    reserved = self.uids.setdefault(uid, {})
                    for uuid, size in charge.candidates.items():
                        reserved[uuid] = reserved.get(uuid, 0) + size
                        self._on.setdefault(uuid, []).append(uid)

    def occupants(
        self,
        memory: Memory,
        devices: Sequence[Device],
        reservations: Mapping[str, Reservation],
        report: ReportIndex,
    ) -> list[Occupant]:
        """Return the pods that use this memory, may use it, or have a reservation there."""
        if not self.uids:
            return []
        uuids = [devices[slot].uuid for slot in memory]
        shown = [uid for slot in memory for uid in report.uids(slot) if uid in self.uids]
        reserved = [uid for uuid in uuids for uid in self._on.get(uuid, ())]
        found: list[Occupant] = []
        for uid in dict.fromkeys([*shown, *reserved]):
            rows = report.of(uid, memory)
            sizes = [self.uids[uid][uuid] for uuid in uuids if uuid in self.uids[uid]]
            if not sizes:
                if report.uses_nothing(rows):
                    continue  # holds a replica of the device, but does not use the device
                # It uses the device, or its use is unknown.
                sizes = list(self.uids[uid].values())
            reservation = reservations[uid]
            found.append(
                Occupant(
                    uid,
                    reservation.namespace,
                    reservation.name,
                    max(sizes, default=0),
                    rows,
                    by_environment=True,
                    starting=reservation.is_starting,
                )
            )
        return found


def occupants_of(
    memory: Memory,
    devices: Sequence[Device],
    reservations: Mapping[str, Reservation],
    report: ReportIndex,
    by_environment: EnvironmentPods,
) -> list[Occupant]:
    """Return the pods with a reservation that use this memory according to the report or their
    variable."""
    occupants = by_environment.occupants(memory, devices, reservations, report)
    for uid in dict.fromkeys([uid for slot in memory for uid in report.uids(slot)]):
        reservation = reservations.get(uid)
        if reservation is None or uid in by_environment.uids:
            continue
        asked_bytes = 0
        for slot in memory:
            device = devices[slot]
            if uid in report.uids(slot):
                matching = _charges_for(reservation, device)
            else:  # the pod may still get more replicas on this device of the memory
                charges = [charge for charge in reservation.charges if _may_be_on(charge, device)]
                matching = [charge for charge in charges if report.missing(uid, charge)]
            for charge in matching:
                # If several devices share the memory, all containers are assumed to use it.
                by_container = charge.containers and len(memory) == 1
                rows = report.rows_of(uid) if by_container else ()
                asked_bytes = max(asked_bytes, charge.bytes_on(device.uuid, rows))
        occupants.append(
            Occupant(
                uid,
                reservation.namespace,
                reservation.name,
                asked_bytes,
                report.of(uid, memory),
                by_environment=False,
                starting=reservation.is_starting,
            )
        )
    return occupants


def _charges_for(reservation: Reservation, device: Device) -> list[Charge]:
    """Return the charges that may explain why the report shows the pod on the device.

    A plugin that restarts with another configuration can rename the resource of a running pod. So
    if no charge matches, each charge may be the explanation.
    """
    charges = reservation.charges
    return [charge for charge in charges if _may_be_on(charge, device)] or charges


def _may_be_on(charge: Charge, device: Device) -> bool:
    return charge.resource == device.resource or device.uuid in charge.candidates
