"""Sums the memory terms of all devices over the fleet."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from contract.reasons import Reason
from extender.placement.device_accounting import DeviceTerms
from extender.placement.snapshot import REASONS, Snapshot
from extender.state.overuse import first_of_each_memory

#: State of a node that takes pods. The other states are codes of reasons.
OPEN = "open"
STALE, NO_REPORT = Reason.STALE_REPORT.code, Reason.NO_REPORT.code


@dataclass(slots=True)
class Totals:
    """Sums in bytes, and the number of devices.

    Devices that share one memory count once. A device whose figures are implausible is counted in
    ``devices`` only.
    """

    devices: int = 0
    capacity: int = 0
    allocatable: int = 0
    reserved: int = 0
    awaited: int = 0
    committed: int = 0
    used: int = 0
    unattributed: int = 0
    headroom: int = 0
    overcommitted: int = 0
    #: Measured use above the requests of pods.
    beyond: int = 0
    #: Requested memory that pods do not use.
    unused: int = 0
    #: Measured use of pods without a reservation.
    unreserved: int = 0

    def add(self, terms: DeviceTerms) -> None:
        self.devices += 1
        if not terms.believed:
            return
        headroom_bytes = terms.headroom_bytes
        self.capacity += terms.device.memory_bytes
        self.allocatable += terms.allocatable_bytes
        self.reserved += terms.reservation_bytes
        self.awaited += terms.unconfirmed_bytes
        self.committed += terms.committed_bytes
        self.used += terms.device.used_bytes
        self.unattributed += terms.unattributed_bytes
        self.headroom += max(0, headroom_bytes)
        self.overcommitted += max(0, -headroom_bytes)
        self.unreserved += terms.unobserved_pods_bytes
        for holder in terms.holders:
            if holder.measured_bytes is not None:
                beyond_bytes = holder.measured_bytes - holder.requested_bytes
                self.beyond += max(0, beyond_bytes)
                self.unused += max(0, -beyond_bytes)


def totals(snap: Snapshot) -> Totals:
    """Return the sums over all devices of the snapshot."""
    found = Totals()
    for node in snap.nodes:
        for terms in first_of_each_memory(node.devices):
            found.add(terms)
    return found


def nodes_by_state(snap: Snapshot, now_s: float) -> dict[str, int]:
    """Return the number of nodes by state: ``open``, or the code of the reason for taking no pods.

    ``open``, ``STALE`` and ``NO_REPORT`` are always included, even if they are 0.
    """
    closed = snap.node_reason > 0
    stale = ~closed & (snap.fresh_until_s < now_s)
    counts = np.bincount(snap.node_reason, minlength=len(REASONS)).tolist()
    found = {reason.code: n for reason, n in zip(REASONS, counts, strict=True) if reason and n}
    found[STALE] = found.get(STALE, 0) + int(stale.sum())
    return {OPEN: int((~closed & ~stale).sum()), NO_REPORT: 0, **found}


def report_ages_s(snap: Snapshot, stale_after_s: float, now_s: float) -> dict[str, float]:
    """Return the seconds since the last heartbeat of each agent that ever sent one, by node."""
    ages = now_s - (snap.fresh_until_s - stale_after_s)
    reported = np.flatnonzero(np.isfinite(ages))
    return {snap.nodes[row].name: float(ages[row]) for row in reported.tolist()}


def unhealthy(snap: Snapshot) -> dict[str, int]:
    """Return the number of devices on which nothing is placed, by the code of the reason."""
    codes = snap.columns.health_issue[snap.columns.health_issue > 0]
    counts = np.bincount(codes, minlength=len(REASONS)).tolist()
    return {reason.code: n for reason, n in zip(REASONS, counts, strict=True) if reason and n}


def some_devices(snap: Snapshot, max_devices: int) -> Iterator[tuple[str, DeviceTerms]]:
    """Yield at most ``max_devices`` pairs (node, device), in the order of node names.

    The devices stay the same as long as the nodes do.
    """
    left = max_devices
    for row in np.argsort(snap.name_rank).tolist():
        node = snap.nodes[row]
        for terms in first_of_each_memory(node.devices):
            if left == 0:
                return
            left -= 1
            yield node.name, terms
