"""Builds immutable snapshots from a mutable table of nodes. The table has a single owner."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headroom.contract.gpunode import Device
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.device_plugin_model import may_have_free_replica
from headroom.core.placement.snapshot import (
    CODE_OF,
    MOST_BYTES,
    NO_DEVICE,
    NUMA_NODES,
    PER_NODE,
    SHARING,
    Columns,
    NodeTerms,
    Snapshot,
    clamped,
)

#: Limits on the numbers of NUMA nodes and of NVLink groups. Larger numbers count as unknown,
#: because the time to choose several devices grows with them. The largest machines with GPUs have
#: fewer.
MAX_NUMA_NODES = 16
MAX_NVLINK_GROUPS = 16
#: Limit on replica counts in columns, which is above the number that any plugin advertises.
MANY = 1 << 20
_SHARING = {sharing: index for index, sharing in enumerate(SHARING)}
_COLUMNS = tuple(
    (f.name, np.int64 if f.name.endswith("_bytes") else np.int32) for f in fields(Columns)
)


class Table:
    """A mutable table of nodes. Each node has a row in every column.

    A snapshot copies the columns that have changed since the previous snapshot, and shares the
    other columns with it. The table grows beyond the given ``rows`` and ``slots`` if needed.
    """

    def __init__(self, rows: int = 0, slots: int = 0) -> None:
        self._nodes: list[NodeTerms] = []
        self._row_of: dict[str, int] = {}
        self._resources: dict[str, int] = {}
        self._columns = _absent(rows, slots)
        self._per_node = _absent_nodes(rows)
        #: Read-only copies in the last snapshot of columns that have not changed since then.
        self._columns_shown: dict[str, NDArray[Any]] = {}
        self._per_node_shown: dict[str, NDArray[Any]] = {}
        self._names: tuple[str, ...] = ()
        self._names_hash = hash(frozenset[str]())
        self._name_rank = np.empty(0, np.int32)
        self._members_changed = False
        self._latest: Snapshot | None = None
        #: Whether a node was updated since the last snapshot in a way that changes no value of a
        #: snapshot.
        self._is_updated = False
        self._generation = 0

    @classmethod
    def after(cls, snap: Snapshot) -> "Table":
        """Return a new table with the contents of the snapshot."""
        table = cls()
        table._nodes, table._row_of = list(snap.nodes), dict(snap.row_of)
        table._resources = dict(snap.resources)
        table._columns = {name: getattr(snap.columns, name).copy(order="K") for name, _ in _COLUMNS}
        table._per_node = {name: getattr(snap, name).copy() for name in PER_NODE}
        table._names, table._names_hash = snap.names, snap.names_hash
        table._name_rank = snap.name_rank
        table._generation = snap.generation
        return table

    @property
    def next_generation(self) -> int:
        """The generation of the next snapshot."""
        return self._generation + 1

    @property
    def shown_generation(self) -> int:
        """The generation that the snapshot of ``shown`` would have. Does not create the
        snapshot."""
        return self._generation + (self._latest is None or self._is_updated)

    def put(self, node: NodeTerms) -> None:
        """Add or replace a node."""
        row = self._row_of.get(node.name)
        if row is None:
            row = len(self._nodes)
            self._nodes.append(node)
            # Earlier snapshots share the map, so copy it once per snapshot.
            if not self._members_changed:
                self._row_of = dict(self._row_of)
                self._members_changed = True
            self._row_of[node.name] = row
        self._nodes[row] = node
        self._grow(len(self._nodes), len(node.devices))
        self._write_row(row, node)
        self._latest = None

    def put_measured(self, node: NodeTerms) -> None:
        """Replace a node whose changes affect only the columns of report times and SM activity.

        Other columns are not updated.
        """
        row = self._row_of[node.name]
        before, self._nodes[row] = self._nodes[row], node
        self._latest = None
        self._write_value(row, "fresh_until_s", node.fresh_until_s)
        self._write_value(row, "ageing_from_s", node.ageing_from_s)
        if before.devices is node.devices:
            return  # a heartbeat
        column, sm_ppm = self._columns["sm_ppm"], [_sm_ppm(terms) for terms in node.devices]
        if column[row, : len(sm_ppm)].tolist() != sm_ppm:
            column[row, : len(sm_ppm)] = sm_ppm
            self._columns_shown.pop("sm_ppm", None)
            self._write_value(row, "changed_in", self.next_generation)

    def updated(self, name: str) -> None:
        """Record that the node's devices, GPUNode or pods were replaced.

        Only ``shown`` creates a new snapshot for this reason, because decisions do not depend on
        it.
        """
        row = self._row_of.get(name)
        if row is not None:
            self._write_value(row, "updated_in", self.next_generation)
            self._is_updated = True

    def get(self, name: str) -> NodeTerms | None:
        """Return the node with this name, or None if there is none."""
        row = self._row_of.get(name)
        return None if row is None else self._nodes[row]

    def drop(self, name: str) -> None:
        """Remove a node, if it exists. The last node moves to its row."""
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

    def shown(self) -> Snapshot:
        """Return a snapshot that also contains the newest ``updated_in``, for views."""
        if self._is_updated:
            self._latest = None
        return self.snapshot()

    def snapshot(self) -> Snapshot:
        """Return a snapshot of the table, which is the same object until the table changes."""
        if self._latest is None:
            if self._members_changed:
                self._names = tuple(node.name for node in self._nodes)
                self._names_hash = hash(frozenset(self._names))
                self._name_rank = _ranks(self._names)
                self._members_changed = False
            self._is_updated = False
            self._generation += 1
            of_node = self._frozen(self._per_node, self._per_node_shown)
            self._latest = Snapshot(
                generation=self._generation,
                row_of=self._row_of,
                names=self._names,
                names_hash=self._names_hash,
                nodes=tuple(self._nodes),
                resources=dict(self._resources),
                columns=Columns(**self._frozen(self._columns, self._columns_shown)),
                name_rank=self._name_rank,
                held={},
                **{name: of_node[name] for name in PER_NODE},
            )
        return self._latest

    def _frozen(
        self, arrays: Mapping[str, NDArray[Any]], frozen: dict[str, NDArray[Any]]
    ) -> dict[str, NDArray[Any]]:
        """Add read-only copies of the arrays that are missing in ``frozen``, and return a copy of
        ``frozen``."""
        for name, array in arrays.items():
            now = array[: len(self._nodes)]
            if name not in frozen or frozen[name].shape != now.shape:
                frozen[name] = now.copy(order="K")
                frozen[name].flags.writeable = False
        return dict(frozen)

    def _grow(self, rows: int, slots: int) -> None:
        """Enlarge the arrays to at least this many rows and slots. New elements are absent."""
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
        """Write the values of a node. Only columns in which a value changes are copied again."""
        values = [self._values(terms) for terms in node.devices]
        by_column = zip(*values, strict=True) if values else [()] * len(_COLUMNS)
        for (name, _), column_values in zip(_COLUMNS, by_column, strict=True):
            column = self._columns[name]
            absent = column.shape[1] - len(column_values)
            padded = [*column_values, *[-1] * absent]
            if column[row].tolist() != padded:
                column[row] = padded
                self._columns_shown.pop(name, None)
        headroom_bytes = [clamped(terms.headroom_bytes) for terms in node.devices]
        believed_bytes = [terms.device.memory_bytes for terms in node.devices if terms.believed]
        per_node = {
            "node_reason": CODE_OF[node.reason],
            "gated": node.gated,
            "fresh_until_s": node.fresh_until_s,
            "ageing_from_s": node.ageing_from_s,
            "degraded": node.degraded or bool(node.unmeasured),
            "changed_in": self.next_generation,
            "updated_in": self.next_generation,
            "node_headroom_bytes": sum(
                [
                    max(each, 0) // max(terms.sharers, 1)
                    for terms, each in zip(node.devices, headroom_bytes, strict=True)
                ]
            ),
            "spare_bytes": _spare_bytes(node, headroom_bytes),
            "node_memory_bytes": sum(
                [t.device.memory_bytes // max(t.sharers, 1) for t in node.devices if t.believed]
            ),
            "node_largest_device_bytes": max(believed_bytes, default=0),
            "node_devices": len(node.devices),
        }
        for name, value in per_node.items():
            self._write_value(row, name, value)

    def _write_value(self, row: int, name: str, value: float) -> None:
        array = self._per_node[name]
        if array[row] != value:
            array[row] = value
            self._per_node_shown.pop(name, None)

    def _values(self, terms: DeviceTerms) -> tuple[int, ...]:
        """Return the values of one device in the order of ``Columns``."""
        device = terms.device
        # Implausible values could overflow a column, so they are replaced. The device accepts no
        # pods anyway, because of its health issue.
        believed = terms.believed
        replicas = device.replicas
        # Even if the reported numbers are implausible, the plugin may have a free replica.
        free_replicas = max(replicas.free, int(may_have_free_replica(device)))
        return (
            device.memory_bytes if believed else 0,
            terms.allocatable_bytes,
            clamped(terms.free_bytes),
            clamped(terms.several_free_bytes),
            clamped(terms.headroom_bytes),
            replicas.total if believed else 1,
            min(free_replicas, MANY),
            min(terms.unconfirmed_replicas, MANY),
            reach(terms),
            (terms.policy == "steered") * (1 + terms.set_size),
            terms.several,
            _locality(device),
            self._resources.setdefault(device.resource, len(self._resources)),
            terms.sharers,
            _SHARING[device.sharing],
            CODE_OF[terms.health_issue],
            _sm_ppm(terms),
            _exceeded_ppm(terms),
            terms.starting,
        )


def _sm_ppm(terms: DeviceTerms) -> int:
    return -1 if terms.activity is None else round(terms.activity.ratio * 1_000_000)


def _locality(device: Device) -> int:
    """Return the value of column ``locality``."""
    numa_node, group = device.numa_node, device.nvlink_group
    if numa_node is None or not 0 <= numa_node < MAX_NUMA_NODES:
        numa_node = -1
    if group is None or not 0 <= group < MAX_NVLINK_GROUPS:
        group = -1
    return (group + 1) * NUMA_NODES + numa_node + 1


def reach(terms: DeviceTerms) -> int:
    """Return how many replicas the next pod must request at least to be able to get one of this
    device.

    Return ``MANY`` if no pod can get a replica of it.
    """
    if terms.first is None:
        return MANY
    return min(max(1, terms.first - terms.unconfirmed_replicas + 1), MANY)


def _exceeded_ppm(terms: DeviceTerms) -> int:
    """Return the use above requests, at most 1e6, in parts per million of the allocatable
    memory."""
    exceeded_bytes = 0
    for holder in terms.holders:
        measured_bytes = holder.measured_bytes
        if measured_bytes is not None and measured_bytes > holder.requested_bytes:
            exceeded_bytes += measured_bytes - holder.requested_bytes
    return min(1_000_000 * exceeded_bytes // max(terms.allocatable_bytes, 1), 1_000_000)


def _spare_bytes(node: NodeTerms, headroom_bytes: Sequence[int]) -> int:
    """Return the bytes that are free for reservation on the node, or ``NO_DEVICE`` if it has no
    devices.

    Unhealthy devices and devices without a free replica do not count. For a node with GPUs but
    without a report, return ``MOST_BYTES``.
    """
    if not node.devices:
        return MOST_BYTES if node.equipped else NO_DEVICE
    spare = 0
    for terms, device_bytes in zip(node.devices, headroom_bytes, strict=True):
        if terms.health_issue is None and terms.device.replicas.free:
            spare += max(device_bytes, 0) // max(terms.sharers, 1)
    return clamped(spare)


def build(nodes: Iterable[NodeTerms]) -> Snapshot:
    """Return a snapshot of these nodes, with one row each in the given order."""
    nodes = tuple(nodes)
    table = Table(len(nodes), max((len(node.devices) for node in nodes), default=0))
    for node in nodes:
        table.put(node)
    return table.snapshot()


def _absent(rows: int, slots: int) -> dict[str, NDArray[Any]]:
    # In Fortran order, numpy reduces over the slots of all nodes at once, which is faster.
    return {name: np.full((rows, slots), -1, dtype, order="F") for name, dtype in _COLUMNS}


def _absent_nodes(rows: int) -> dict[str, NDArray[Any]]:
    return {name: np.zeros(rows, dtype) for name, dtype in PER_NODE.items()}


def _ranks(names: Sequence[str]) -> NDArray[np.int32]:
    """Return the index of each name in the sorted names."""
    ranks = np.empty(len(names), np.int32)
    for rank, row in enumerate(sorted(range(len(names)), key=names.__getitem__)):
        ranks[row] = rank
    ranks.flags.writeable = False
    return ranks
