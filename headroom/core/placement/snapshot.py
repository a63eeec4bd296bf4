"""An immutable snapshot of the cluster in dense arrays.

A *row* is a node and a *slot* is a device, so slot j of row i is the j-th device that node i
reports. All arrays are read-only. In a slot that a node does not have, all values are -1. Only
``placement.snapshot_builder`` builds snapshots.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import repeat
from math import inf
from operator import attrgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from headroom.contract.gpunode import Reservation
from headroom.contract.reasons import Reason
from headroom.core.placement.device_accounting import DeviceTerms

Bytes2D = NDArray[np.int64]
Int2D = NDArray[np.int32]
#: A one-dimensional array with indices of rows, or with a value for each row.
Rows = NDArray[np.int64]
Mask = NDArray[np.bool_]

#: Code 0 means "fits". Every other code is an index into this tuple.
REASONS: tuple[Reason | None, ...] = (None, *Reason)
CODE_OF: Mapping[Reason | None, int] = {reason: code for code, reason in enumerate(REASONS)}
#: Maximum absolute value in every column of bytes, and of every need that is compared with such a
#: column. With this limit, the difference of two values fits into int64.
MOST_BYTES = 1 << 61
#: Column ``locality`` contains the NVLink group times this number.
NUMA_NODES = 32
#: Column ``sharing`` contains indices into this tuple.
SHARING = ("none", "time-slicing", "mps")
#: ``Snapshot.spare_bytes`` of a node without devices. It is less than the value of any other node.
NO_DEVICE = -1


class NodeTerms(msgspec.Struct, frozen=True, gc=False):
    """The values of one node, from which the columns are filled and explanations are made."""

    name: str
    #: Why the node accepts no pod, or None if this depends on its devices.
    reason: Reason | None
    #: When its report becomes stale, in seconds of the extender's monotonic clock.
    fresh_until_s: float
    devices: tuple[DeviceTerms, ...] = ()
    #: When its report begins to age, in seconds of the same clock.
    ageing_from_s: float = inf
    #: Whether the report lacks the data of some probe.
    degraded: bool = False
    #: The source of the node's capacity, such as labels, if no agent measured it. Otherwise empty.
    unmeasured: str = ""
    #: Whether a pod's own NVIDIA_VISIBLE_DEVICES may decide which devices it sees.
    obeys_environment: bool = True
    #: Whether the node is for gated pods only.
    gated: bool = False
    #: Details of ``reason``, if its sentence is not enough.
    detail: str = ""
    #: Whether the node has GPUs, even if no agent reports them.
    equipped: bool = True
    #: Extended resources that kube-scheduler serves there by DRA.
    by_dra: frozenset[str] = frozenset()


def clamped(count_bytes: int) -> int:
    """Return the value, limited to ±``MOST_BYTES``, so that absurd amounts cannot overflow."""
    return max(-MOST_BYTES, min(count_bytes, MOST_BYTES))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The values of every (node, slot)."""

    memory_bytes: Bytes2D
    allocatable_bytes: Bytes2D
    #: Free memory for a new pod that gets the device. The first column is for a pod that requests
    #: one replica of the resource, and the second for a pod that requests several.
    free_bytes: Bytes2D
    several_free_bytes: Bytes2D
    #: Allocatable less committed memory, with the worst case of unconfirmed pods.
    headroom_bytes: Bytes2D
    replicas: Int2D
    #: Replicas that are neither allocated nor unhealthy, according to the report.
    replicas_free: Int2D
    #: Replicas of the slot's resource that are reserved for unconfirmed pods on the whole node.
    replicas_unconfirmed: Int2D
    #: Minimum number of replicas that the next pod must request so that it may get a replica of
    #: this device. It is larger than any request if no pod can get one.
    reach: Int2D
    #: 0 if the device plugin chooses the devices. Otherwise the agent makes the kubelet allocate
    #: the devices that the ledger chooses, and the value is ``DeviceTerms.set_size`` plus 1.
    steered: Int2D
    #: Whether a container that requests several replicas may be placed here
    #: (``device_accounting.Several``).
    several: Int2D
    #: Which devices are close to each other. Devices with equal values are in the same NUMA node
    #: and in the same NVLink group. The quotient by ``NUMA_NODES`` is the NVLink group plus 1, and
    #: the remainder is the NUMA node plus 1. Both are 0 if they are unknown.
    locality: Int2D
    #: Number of the resource in ``Snapshot.resources``.
    resource: Int2D
    #: Number of devices that share the slot's memory, including itself.
    sharers: Int2D
    #: Index into ``SHARING``.
    sharing: Int2D
    #: Code of the device's health issue, or 0 if there is none.
    health_issue: Int2D
    #: SM activity in parts per million, or -1 if unknown.
    sm_ppm: Int2D
    #: Use of its pods above their requests, in parts per million of the allocatable memory.
    exceeded_ppm: Int2D
    #: Which new pods could get the device although another pod is starting alone
    #: (``occupancy.Starting``).
    starting: Int2D


#: Fields of ``Snapshot`` with a value for every node, and the type of their arrays.
PER_NODE: Mapping[str, type[np.generic]] = {
    "node_reason": np.int32,
    "gated": np.bool_,
    "fresh_until_s": np.float64,
    "ageing_from_s": np.float64,
    "degraded": np.bool_,
    "changed_in": np.int64,
    "updated_in": np.int64,
    "node_headroom_bytes": np.int64,
    "node_largest_device_bytes": np.int64,
    "node_memory_bytes": np.int64,
    "node_devices": np.int64,
    "spare_bytes": np.int64,
}
_columns = attrgetter(*(f.name for f in fields(Columns)))


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    #: Increases with every snapshot of a process.
    generation: int
    #: Row of each node by name.
    row_of: Mapping[str, int]
    #: (rows,) the names of all nodes.
    names: tuple[str, ...]
    #: Hash of the set of all names.
    names_hash: int
    #: (rows,) the values from which the columns were filled.
    nodes: tuple[NodeTerms, ...]
    #: Value of column ``resource`` by resource name.
    resources: Mapping[str, int]
    columns: Columns
    #: (rows,) code of the reason why the node accepts no pod, or 0 if there is none.
    node_reason: Int2D
    #: (rows,) whether the node is for gated pods only.
    gated: NDArray[np.bool_]
    #: (rows,) when the report becomes stale and when it begins to age, in seconds of the extender's
    #: monotonic clock.
    fresh_until_s: NDArray[np.float64]
    ageing_from_s: NDArray[np.float64]
    #: (rows,) whether part of the report is missing, or labels replace it.
    degraded: NDArray[np.bool_]
    #: (rows,) index of the node's name in the sorted names, which is the last tie-breaker.
    name_rank: Int2D
    #: (rows,) generation of the first snapshot with the node's current values.
    changed_in: Rows
    #: (rows,) generation of the first snapshot since the node's devices, GPUNode or pods were
    #: replaced, even if no value in this snapshot differs. A heartbeat alone does not replace them.
    updated_in: Rows
    #: (rows,) headroom of all devices of the node. Overcommitted devices count as full, and each
    #: device that shares a memory counts with its part.
    node_headroom_bytes: Rows
    #: (rows,) memory of the node's largest device and of all its devices, or 0 if it has no
    #: devices.
    node_largest_device_bytes: Rows
    node_memory_bytes: Rows
    #: (rows,) number of the node's devices.
    node_devices: Rows
    #: (rows,) spare GPU memory, which pods without a GPU avoid (``placement.score``).
    spare_bytes: Rows
    #: Reservations of pods that are not bound yet but for which memory is held, by node and uid.
    #: They count in this snapshot (``whatif.held_memory``).
    held: Mapping[str, Mapping[str, Reservation]]

    def part(self, rows: Rows) -> "Snapshot":
        """Return a snapshot of only these rows."""
        nodes = tuple(self.nodes[row] for row in rows.tolist())
        names = tuple(node.name for node in nodes)
        # A slice is a view, which takes a tenth of the time of a copy. ``take`` would first copy
        # the whole array, because the array is in Fortran order.
        selected = slice(rows[0], rows[0] + 1) if len(rows) == 1 else rows
        columns = [column[selected] for column in _columns(self.columns)]
        return Snapshot(
            generation=self.generation,
            row_of={name: row for row, name in enumerate(names)},
            names=names,
            names_hash=hash(frozenset(names)),
            nodes=nodes,
            resources=self.resources,
            columns=Columns(*columns),
            name_rank=self.name_rank[selected],
            held=self.held,
            **{name: getattr(self, name)[selected] for name in PER_NODE},
        )

    def slots_of(self, resource: str) -> Mask:
        """Return the mask (nodes, slots) of devices that are advertised as ``resource``."""
        index = self.resources.get(resource)
        advertised = self.columns.resource
        return np.zeros(advertised.shape, bool) if index is None else advertised == index

    def sorted_by_row(self, names: Sequence[str]) -> tuple[Sequence[str], Rows]:
        """Return the names in any order, and the row of each name. The row is -1 for unknown names.

        kube-scheduler often offers all nodes. In this case the names are returned in the order of
        the rows. To detect the case, only hashes are compared, which takes a third of the time of
        looking up 5,000 names. Python hashes strings with a random key of 64 bits, so another set
        with the same number of names practically never has the same hash.
        """
        if len(names) == len(self.names) and hash(frozenset(names)) == self.names_hash:
            return self.names, np.arange(len(names))
        return names, self.rows(names)

    def rows(self, names: Sequence[str]) -> Rows:
        """Return the row of each name in the given order. The row is -1 for unknown names."""
        return np.fromiter(map(self.row_of.get, names, repeat(-1)), np.int64, len(names))
