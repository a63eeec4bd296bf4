"""Fills the columns: a table of nodes that one owner changes, and immutable snapshots of it."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.reasons import Reason
from extender.placement.equation import DeviceTerms, may_have_free_replica
from extender.placement.snapshot import CODE_OF, MOST_BYTES, SHARING, Columns, NodeTerms, Snapshot

#: Replica counts are held below this; no plugin advertises as many.
MANY = 1 << 20
_COLUMNS = tuple(
    (f.name, np.int64 if f.name.endswith("_bytes") else np.int32) for f in fields(Columns)
)


class Table:
    """Nodes by name, each with its row of columns.

    Replacing a node costs that row; a snapshot costs one copy of the arrays, and nothing when
    nothing changed since the last one.
    """

    def __init__(self) -> None:
        self._nodes: list[NodeTerms] = []
        self._row_of: dict[str, int] = {}
        self._resources: dict[str, int] = {}
        self._columns = _absent(0, 0)
        self._node_reason = np.empty(0, np.int32)
        self._fresh_until_s = np.empty(0, np.float64)
        self._name_rank = np.empty(0, np.int32)
        self._members_changed = False
        self._latest: Snapshot | None = None
        self._generation = 0

    def put(self, node: NodeTerms) -> None:
        """Add a node, or replace what was known of it."""
        row = self._row_of.get(node.name)
        if row is None:
            row = len(self._nodes)
            self._nodes.append(node)
            # The maps of earlier snapshots are theirs: add to a copy, once per snapshot.
            if not self._members_changed:
                self._row_of = dict(self._row_of)
                self._members_changed = True
            self._row_of[node.name] = row
        self._nodes[row] = node
        self._make_room(len(self._nodes), len(node.devices))
        self._node_reason[row] = CODE_OF[node.reason]
        self._fresh_until_s[row] = node.fresh_until_s
        self._write_row(row, node.devices)
        self._latest = None

    def drop(self, name: str) -> None:
        """Forget a node; the last one takes over its row."""
        if name not in self._row_of:
            return
        last = self._nodes[-1]
        row = self._row_of[name]
        self._row_of = {n: r for n, r in self._row_of.items() if n != name}
        self._members_changed = True
        self._nodes.pop()
        self._latest = None
        if last.name != name:
            self._row_of[last.name] = row
            self._nodes[row] = last
            self.put(last)

    def snapshot(self) -> Snapshot:
        """What the table holds now; the same object until it changes."""
        if self._latest is None:
            rows = len(self._nodes)
            if self._members_changed:
                self._name_rank = _ranks([node.name for node in self._nodes])
                self._members_changed = False
            self._generation += 1
            headroom = np.maximum(self._columns["headroom_bytes"][:rows], 0).sum(axis=1)
            allocatable = np.maximum(self._columns["allocatable_bytes"][:rows], 0)
            self._latest = Snapshot(
                generation=self._generation,
                row_of=self._row_of,
                nodes=tuple(self._nodes),
                resources=dict(self._resources),
                columns=Columns(
                    **{name: _frozen(self._columns[name][:rows]) for name, _ in _COLUMNS}
                ),
                node_reason=_frozen(self._node_reason[:rows]),
                fresh_until_s=_frozen(self._fresh_until_s[:rows]),
                name_rank=self._name_rank,
                node_headroom_bytes=_frozen(headroom),
                largest_device_bytes=max(1, int(allocatable.max(initial=0))),
                largest_node_bytes=max(1, int(allocatable.sum(axis=1).max(initial=0))),
            )
        return self._latest

    def _make_room(self, rows: int, slots: int) -> None:
        old_rows, old_slots = self._columns["resource"].shape
        if rows <= old_rows and slots <= old_slots:
            return
        new_rows = max(old_rows, rows if rows <= old_rows else 2 * rows)
        larger = _absent(new_rows, max(old_slots, slots))
        for name, _ in _COLUMNS:
            larger[name][:old_rows, :old_slots] = self._columns[name]
        self._columns = larger
        self._node_reason = np.resize(self._node_reason, new_rows)
        self._fresh_until_s = np.resize(self._fresh_until_s, new_rows)

    def _write_row(self, row: int, devices: Sequence[DeviceTerms]) -> None:
        for name, _ in _COLUMNS:
            self._columns[name][row, :] = -1
        for slot, terms in enumerate(devices):
            for name, value in self._values(terms).items():
                self._columns[name][row, slot] = value

    def _values(self, terms: DeviceTerms) -> dict[str, int]:
        device = terms.device
        # Figures that contradict each other could overflow a column; a fence stands for them.
        believed = terms.fence is not Reason.CONTRADICTORY_REPORT
        activity = device.sm_activity
        known = activity is not None and 0 <= activity.ratio <= 1
        return {
            "memory_bytes": device.memory_bytes if believed else 0,
            "allocatable_bytes": terms.allocatable_bytes,
            "room_bytes": _clamped(terms.headroom_bytes + terms.awaited_bytes),
            "headroom_bytes": _clamped(terms.headroom_bytes),
            "replicas": device.replicas.total if believed else 1,
            # The plugin goes by its own count, whatever we think of the rest of the report.
            "replicas_free": min(
                max(device.replicas.free, int(may_have_free_replica(device))), MANY
            ),
            "replicas_awaited": min(terms.awaited_replicas, MANY),
            "resource": self._resources.setdefault(device.resource, len(self._resources)),
            "sharers": terms.sharers,
            "sharing": SHARING.index(device.sharing),
            "fence": CODE_OF[terms.fence],
            "sm_ppm": round(activity.ratio * 1_000_000) if activity and known else -1,
        }


def build(nodes: Iterable[NodeTerms]) -> Snapshot:
    """A snapshot of these nodes from nothing."""
    table = Table()
    for node in nodes:
        table.put(node)
    return table.snapshot()


def _absent(rows: int, slots: int) -> dict[str, NDArray[Any]]:
    # Slot by slot in memory: what is asked of a node's slots is then asked of all nodes at once.
    return {name: np.full((rows, slots), -1, dtype, order="F") for name, dtype in _COLUMNS}


def _frozen(array: NDArray[Any]) -> NDArray[Any]:
    copy = array.copy(order="K")
    copy.flags.writeable = False
    return copy


def _ranks(names: Sequence[str]) -> NDArray[np.int32]:
    """Place of each name in the order of names."""
    ranks = np.empty(len(names), np.int32)
    for rank, row in enumerate(sorted(range(len(names)), key=names.__getitem__)):
        ranks[row] = rank
    ranks.flags.writeable = False
    return ranks


def _clamped(count_bytes: int) -> int:
    """An absurd promise is very large, never small again."""
    return max(-MOST_BYTES, min(count_bytes, MOST_BYTES))
