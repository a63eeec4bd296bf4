"""The cluster at one instant, in dense columns, never changed after it was made.

Rows are nodes, columns are slots: slot j of node i is the j-th device that the node reports.
Every array is read-only; a slot that a node does not have holds -1. Made by
``placement.table``, which is the only place that fills them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from itertools import repeat
from math import inf
from operator import attrgetter

import msgspec
import numpy as np
from numpy.typing import NDArray

from contract.reasons import Reason
from extender.placement.device_accounting import DeviceTerms

Bytes2D = NDArray[np.int64]
Int2D = NDArray[np.int32]
Rows = NDArray[np.int64]

#: Code 0 is "fits"; every other code is an index into this tuple.
REASONS: tuple[Reason | None, ...] = (None, *Reason)
CODE_OF: Mapping[Reason | None, int] = {reason: code for code, reason in enumerate(REASONS)}
#: What no column exceeds, nor any need compared with one: differences of two stay in int64.
MOST_BYTES = 1 << 61
SHARING = ("none", "time-slicing", "mps")


class NodeTerms(msgspec.Struct, frozen=True, gc=False):
    """One node weighed: what explanations quote and what the columns are filled from."""

    name: str
    #: Why the node as a whole takes nothing; None when its devices decide.
    reason: Reason | None
    #: Until when its report counts as fresh, in seconds of the receiver's monotonic clock.
    fresh_until_s: float
    devices: tuple[DeviceTerms, ...] = ()
    #: From when on that report is late, in seconds of the same clock.
    ageing_from_s: float = inf
    #: Whether some of what its agent looks at is missing in the report.
    degraded: bool = False
    #: Where its capacity was learned, if no agent measured it; else empty.
    unmeasured: str = ""
    #: Whether a pod's own NVIDIA_VISIBLE_DEVICES may decide which devices it sees.
    obeys_environment: bool = True
    #: Whether it is pinned: a pod whose variable follows its placement gets the device we choose.
    pins: bool = False
    #: Whether it is for gated pods only.
    gated: bool = False
    #: The particulars of ``reason``, where there is more to say than its sentence.
    detail: str = ""
    #: Whether it has GPUs, even if nobody told anything of them.
    equipped: bool = True


def clamped(count_bytes: int) -> int:
    """An absurd promise is very large, never small again."""
    return max(-MOST_BYTES, min(count_bytes, MOST_BYTES))


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """The numbers of every (node, slot)."""

    memory_bytes: Bytes2D
    allocatable_bytes: Bytes2D
    #: What is left here for a pod that asks for one replica, if it lands here; for one that asks
    #: for more.
    free_bytes: Bytes2D
    several_free_bytes: Bytes2D
    #: What is left if those that are on their way do their worst.
    headroom_bytes: Bytes2D
    replicas: Int2D
    #: Replicas that no observed pod holds.
    replicas_free: Int2D
    #: Replicas of the slot's resource promised to pods not observed yet, on the whole node.
    replicas_unconfirmed: Int2D
    #: The fewest replicas that a pod must ask for to be possibly given one of this device; more
    #: than anybody asks for where it never is.
    reach: Int2D
    #: 1 where the agent makes the kubelet take the device that the ledger chooses.
    steered: Int2D
    #: 1 where a container that asks for more than one replica is refused after it was bound.
    single: Int2D
    #: Index into ``Snapshot.resources``.
    resource: Int2D
    #: Devices that share the slot's memory, itself included.
    sharers: Int2D
    #: Index into ``SHARING``.
    sharing: Int2D
    #: Code of the reason that fences the device; 0 for none.
    health_issue: Int2D
    #: SM activity in parts per million; -1 where it is not known.
    sm_ppm: Int2D
    #: What its pods use beyond their requests, in parts per million of what can be promised.
    exceeded_ppm: Int2D


_columns = attrgetter(*(f.name for f in fields(Columns)))


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    #: Grows with every snapshot of one process.
    generation: int
    #: Node name -> row.
    row_of: Mapping[str, int]
    nodes: tuple[NodeTerms, ...]
    resources: Mapping[str, int]
    columns: Columns
    #: (rows,) code of the reason why a node as a whole takes nothing; 0 for none.
    node_reason: Int2D
    #: (rows,) whether the node is for gated pods only.
    gated: NDArray[np.bool_]
    #: (rows,) seconds of the receiver's monotonic clock.
    fresh_until_s: NDArray[np.float64]
    ageing_from_s: NDArray[np.float64]
    #: (rows,) whether part of the report is missing, or all of it as labels stand in for it.
    degraded: NDArray[np.bool_]
    #: (rows,) place of the node's name in the order of names: the last tie-break.
    name_rank: Int2D
    #: (rows,) generation of the first snapshot that has the node as it is.
    changed_in: Rows
    #: (rows,) headroom of all devices of the node; overcommitted ones count as full.
    node_headroom_bytes: Rows
    #: (rows,) what a pod without a GPU is kept away from (``placement.aside``).
    spare_bytes: Rows
    #: The memory of the largest device, and of all devices of the node that has most; never 0.
    largest_device_bytes: int
    largest_node_bytes: int

    def part(self, rows: Rows) -> "Snapshot":
        """Some of the nodes, in this order; what is the largest remains that of all."""
        nodes = tuple(self.nodes[row] for row in rows.tolist())
        # Not take(): it copies the whole of an array that lies slot by slot.
        columns = [column[rows] for column in _columns(self.columns)]
        return replace(
            self,
            row_of={node.name: row for row, node in enumerate(nodes)},
            nodes=nodes,
            columns=Columns(*columns),
            node_reason=self.node_reason[rows],
            gated=self.gated[rows],
            fresh_until_s=self.fresh_until_s[rows],
            ageing_from_s=self.ageing_from_s[rows],
            degraded=self.degraded[rows],
            name_rank=self.name_rank[rows],
            changed_in=self.changed_in[rows],
            node_headroom_bytes=self.node_headroom_bytes[rows],
            spare_bytes=self.spare_bytes[rows],
        )

    def rows(self, names: Sequence[str]) -> Rows:
        """Row of each name, in the order given; -1 where it is not known."""
        return np.fromiter(map(self.row_of.get, names, repeat(-1)), np.int64, len(names))
