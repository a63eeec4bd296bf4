"""The equation summed over the fleet."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from contract.reasons import Reason
from extender.placement.device_accounting import DeviceTerms
from extender.placement.snapshot import REASONS, Snapshot
from extender.state.overuse import first_of_each_memory

#: Of a node that takes pods, beside the codes of the reasons of those that do not.
OPEN = "open"
STALE, NO_REPORT = Reason.STALE_REPORT.code, Reason.NO_REPORT.code


@dataclass(slots=True)
class Totals:
    """Bytes, but for ``devices``; devices whose figures cannot be believed count as devices only.
    Devices that share one memory count as one."""

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
    #: Where ledger and measurement differ: used beyond what was asked for, asked for and not used,
    #: used by pods that were promised nothing.
    beyond: int = 0
    unused: int = 0
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
    """The sums over all devices of the snapshot."""
    found = Totals()
    for node in snap.nodes:
        for terms in first_of_each_memory(node.devices):
            found.add(terms)
    return found


def nodes_by_state(snap: Snapshot, now_s: float) -> dict[str, int]:
    """``open``, or the code of the reason why a node takes nothing -> number of nodes; that
    it does not report, or did long ago, and ``open`` are told in any case."""
    closed = snap.node_reason > 0
    stale = ~closed & (snap.fresh_until_s < now_s)
    counts = np.bincount(snap.node_reason, minlength=len(REASONS)).tolist()
    found = {reason.code: n for reason, n in zip(REASONS, counts, strict=True) if reason and n}
    found[STALE] = found.get(STALE, 0) + int(stale.sum())
    return {OPEN: int((~closed & ~stale).sum()), NO_REPORT: 0, **found}


def report_ages_s(snap: Snapshot, stale_after_s: float, now_s: float) -> dict[str, float]:
    """Node -> since when nothing was heard of its agent, where something ever was."""
    ages = now_s - (snap.fresh_until_s - stale_after_s)
    heard_of = np.flatnonzero(np.isfinite(ages))
    return {snap.nodes[row].name: float(ages[row]) for row in heard_of.tolist()}


def unhealthy(snap: Snapshot) -> dict[str, int]:
    """Code of the reason -> devices on which nothing is placed for it."""
    codes = snap.columns.health_issue[snap.columns.health_issue > 0]
    counts = np.bincount(codes, minlength=len(REASONS)).tolist()
    return {reason.code: n for reason, n in zip(REASONS, counts, strict=True) if reason and n}


def some_devices(snap: Snapshot, most: int) -> Iterator[tuple[str, DeviceTerms]]:
    """At most so many (node, device), by the names of nodes: the same as long as nodes stay."""
    left = most
    for row in np.argsort(snap.name_rank).tolist():
        node = snap.nodes[row]
        for terms in first_of_each_memory(node.devices):
            if left == 0:
                return
            left -= 1
            yield node.name, terms
