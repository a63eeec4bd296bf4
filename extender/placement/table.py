"""Fills the columns: a table of nodes that one owner changes, and immutable snapshots of it."""

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from extender.placement.chances import may_have_free_replica
from extender.placement.equation import DeviceTerms
from extender.placement.snapshot import CODE_OF, SHARING, Columns, NodeTerms, Snapshot, clamped

#: Replica counts are held below this; no plugin advertises as many.
MANY = 1 << 20
_COLUMNS = tuple(
    (f.name, np.int64 if f.name.endswith("_bytes") else np.int32) for f in fields(Columns)
)


class Table:
    """Nodes by name, each with its row of columns.

    Replacing a node costs that row; a snapshot costs one copy of each column in which a figure
    changed since the last one, and nothing when nothing changed.
    """

    def __init__(self) -> None:
        self._nodes: list[NodeTerms] = []
        self._row_of: dict[str, int] = {}
        self._resources: dict[str, int] = {}
        self._columns = _absent(0, 0)
        self._per_node = _absent_nodes(0)
        #: Columns as they were handed out last; those in which a figure changed since are gone.
        self._handed_out: dict[str, NDArray[Any]] = {}
        self._name_rank = np.empty(0, np.int32)
        self._members_changed = False
        self._latest: Snapshot | None = None
        self._generation = 0

    @property
    def next_generation(self) -> int:
        """Of the snapshot that shows what is put now."""
        return self._generation + 1

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
        self._write_row(row, node)
        self._latest = None

    def get(self, name: str) -> NodeTerms | None:
        """What was put last under the name."""
        row = self._row_of.get(name)
        return None if row is None else self._nodes[row]

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
            of_node = {name: array[:rows] for name, array in self._per_node.items()}
            self._latest = Snapshot(
                generation=self._generation,
                row_of=self._row_of,
                nodes=tuple(self._nodes),
                resources=dict(self._resources),
                columns=Columns(**{name: self._column(name, rows) for name, _ in _COLUMNS}),
                node_reason=_frozen(of_node["reason"]),
                gated=_frozen(of_node["gated"]),
                fresh_until_s=_frozen(of_node["fresh_until_s"]),
                name_rank=self._name_rank,
                changed_in=_frozen(of_node["changed_in"]),
                node_headroom_bytes=_frozen(of_node["headroom_bytes"]),
                largest_device_bytes=max(1, int(of_node["largest_device_bytes"].max(initial=0))),
                largest_node_bytes=max(1, int(of_node["allocatable_bytes"].max(initial=0))),
            )
        return self._latest

    def _column(self, name: str, rows: int) -> NDArray[Any]:
        """The column for a snapshot: the one handed out last as long as it is the same."""
        held = self._handed_out.get(name)
        now = self._columns[name]
        if held is None or held.shape != (rows, now.shape[1]):
            held = self._handed_out[name] = _frozen(now[:rows])
        return held

    def _make_room(self, rows: int, slots: int) -> None:
        old_rows, old_slots = self._columns["resource"].shape
        if rows <= old_rows and slots <= old_slots:
            return
        new_rows = max(old_rows, rows if rows <= old_rows else 2 * rows)
        larger = _absent(new_rows, max(old_slots, slots))
        for name, _ in _COLUMNS:
            larger[name][:old_rows, :old_slots] = self._columns[name]
        self._columns = larger
        nodes = _absent_nodes(new_rows)
        for name, array in self._per_node.items():
            nodes[name][:old_rows] = array
        self._per_node = nodes

    def _write_row(self, row: int, node: NodeTerms) -> None:
        values = [self._values(terms) for terms in node.devices]
        for name, dtype in _COLUMNS:
            column = self._columns[name]
            new = np.full(column.shape[1], -1, dtype)
            new[: len(values)] = [value[name] for value in values]
            if (column[row] != new).any():
                column[row] = new
                self._handed_out.pop(name, None)
        allocatable = [max(value["allocatable_bytes"], 0) for value in values]
        per_node = {
            "reason": CODE_OF[node.reason],
            "gated": node.gated,
            "fresh_until_s": node.fresh_until_s,
            "changed_in": self.next_generation,
            "headroom_bytes": sum(max(value["headroom_bytes"], 0) for value in values),
            "allocatable_bytes": sum(allocatable),
            "largest_device_bytes": max(allocatable, default=0),
        }
        for name, figure in per_node.items():
            self._per_node[name][row] = figure

    def _values(self, terms: DeviceTerms) -> dict[str, int]:
        device = terms.device
        # Figures that contradict each other could overflow a column; a fence stands for them.
        believed = terms.believed
        activity = device.sm_activity
        known = activity is not None and 0 <= activity.ratio <= 1
        return {
            "memory_bytes": device.memory_bytes if believed else 0,
            "allocatable_bytes": terms.allocatable_bytes,
            "room_bytes": clamped(terms.room_bytes),
            "several_room_bytes": clamped(terms.several_room_bytes),
            "headroom_bytes": clamped(terms.headroom_bytes),
            "replicas": device.replicas.total if believed else 1,
            # The plugin goes by its own count, whatever we think of the rest of the report.
            "replicas_free": min(
                max(device.replicas.free, int(may_have_free_replica(device))), MANY
            ),
            "replicas_awaited": min(terms.awaited_replicas, MANY),
            "reach": reach(terms),
            "steered": int(terms.policy == "steered"),
            "single": int(terms.single),
            "resource": self._resources.setdefault(device.resource, len(self._resources)),
            "sharers": terms.sharers,
            "sharing": SHARING.index(device.sharing),
            "fence": CODE_OF[terms.fence],
            "sm_ppm": round(activity.ratio * 1_000_000) if activity and known else -1,
        }


def reach(terms: DeviceTerms) -> int:
    """The fewest replicas of which one can be of this device, for the next pod to ask."""
    if terms.first is None:
        return MANY
    return min(max(1, terms.first - terms.awaited_replicas + 1), MANY)


def build(nodes: Iterable[NodeTerms]) -> Snapshot:
    """A snapshot of these nodes from nothing."""
    table = Table()
    for node in nodes:
        table.put(node)
    return table.snapshot()


def _absent(rows: int, slots: int) -> dict[str, NDArray[Any]]:
    # Slot by slot in memory: what is asked of a node's slots is then asked of all nodes at once.
    return {name: np.full((rows, slots), -1, dtype, order="F") for name, dtype in _COLUMNS}


def _absent_nodes(rows: int) -> dict[str, NDArray[Any]]:
    return {
        "reason": np.zeros(rows, np.int32),
        "gated": np.zeros(rows, np.bool_),
        "fresh_until_s": np.zeros(rows, np.float64),
        "changed_in": np.zeros(rows, np.int64),
        "headroom_bytes": np.zeros(rows, np.int64),
        "allocatable_bytes": np.zeros(rows, np.int64),
        "largest_device_bytes": np.zeros(rows, np.int64),
    }


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
