"""The equation summed over the fleet."""

from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass

import numpy as np

from contract.reasons import Reason
from extender.cluster.overuses import first_of_each_memory
from extender.cluster.sums import RunningSums
from extender.placement.equation import DeviceTerms
from extender.placement.snapshot import REASONS, NodeTerms, Snapshot

#: Of a node that takes pods, beside the codes of the reasons of those that do not.
OPEN = "open"
_ALL = "all"
STALE, NO_REPORT = Reason.STALE_REPORT.code, Reason.NO_REPORT.code


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes, but for ``devices``; devices whose figures cannot be believed count as devices only.
    Devices that share one memory count as one."""

    devices: int = 0
    capacity: int = 0
    allocatable: int = 0
    promised: int = 0
    awaited: int = 0
    committed: int = 0
    used: int = 0
    unowned: int = 0
    headroom: int = 0
    overcommitted: int = 0
    #: Where ledger and measurement differ: used beyond what was asked for, asked for and not used,
    #: used by pods that were promised nothing.
    beyond: int = 0
    unused: int = 0
    unpromised: int = 0


class FleetTotals:
    """For one thread at a time. ``between`` is called before each node that changed is summed."""

    def __init__(self, between: Callable[[], None] = lambda: None) -> None:
        self._sums = RunningSums(lambda node: {_ALL: astuple(_sum(node))}, between)

    def of(self, snap: Snapshot) -> Totals:
        return Totals(*self._sums.of(snap.nodes).get(_ALL, ()))


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


def fenced(snap: Snapshot) -> dict[str, int]:
    """Code of the reason -> devices on which nothing is placed for it."""
    codes = snap.columns.fence[snap.columns.fence > 0]
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


def _sum(node: NodeTerms) -> Totals:
    found = [_of_device(terms) for terms in first_of_each_memory(node.devices)]
    return Totals(*(sum(column) for column in zip(*map(astuple, found), strict=True)))


def _of_device(terms: DeviceTerms) -> Totals:
    if not terms.believed:
        return Totals(devices=1)
    measured = [(h.measured_bytes, h.requested_bytes) for h in terms.holders]
    known = [(used, asked) for used, asked in measured if used is not None]
    return Totals(
        devices=1,
        capacity=terms.device.memory_bytes,
        allocatable=terms.allocatable_bytes,
        promised=terms.promised_bytes,
        awaited=terms.awaited_bytes,
        committed=terms.committed_bytes,
        used=terms.device.used_bytes,
        unowned=terms.unowned_bytes,
        headroom=max(0, terms.headroom_bytes),
        overcommitted=max(0, -terms.headroom_bytes),
        beyond=sum(max(0, used - asked) for used, asked in known),
        unused=sum(max(0, asked - used) for used, asked in known),
        unpromised=terms.strays_bytes,
    )
