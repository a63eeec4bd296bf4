"""Keeps recent decisions: the last filter call for each pod, and the records of all attempts.

Bind and requeueing use the last filter call. kube-scheduler's bind call identifies the pod only by
namespace, name and uid, but the filter call before it contained the whole pod, with the
resourceVersion that makes the Binding conditional. The debug API reads the records.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from headroom.bounded_dict import Bounded
from headroom.contract.decision import decision_id
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.journal.decision_records import (
    DEFAULT_BOUNDS,
    Asked,
    Bounds,
    Filtered,
    Part,
    Preempted,
    Record,
    Records,
)
from headroom.core.placement.snapshot import CODE_OF, Rows

#: Maximum number of preemptors whose last preemption is kept.
MAX_PREEMPTING = 256
#: Maximum size in bytes of the pods from the last filter calls.
MAX_SHOWN_BYTES = 64 << 20
#: Maximum number of scheduler names kept.
MAX_SCHEDULERS = 64
#: Maximum number of node sets. The nodes of a filter call are known only while their set is kept.
MAX_NODE_SETS = 4
_encode = msgspec.msgpack.encode


class NodeSet:
    """The rows of a snapshot by node name, or None when ``MAX_NODE_SETS`` newer sets exist."""

    def __init__(self, row_of: Mapping[str, int]) -> None:
        self.row_of: Mapping[str, int] | None = row_of


class NodeSets:
    """The last node sets. A decision stores one bit per node of a set instead of names."""

    def __init__(self) -> None:
        self._last: deque[NodeSet] = deque()

    def add(self, row_of: Mapping[str, int]) -> NodeSet:
        """Add a node set, and drop the names of the oldest set beyond ``MAX_NODE_SETS``."""
        added = NodeSet(row_of)
        self._last.append(added)
        if len(self._last) > MAX_NODE_SETS:
            self._last.popleft().row_of = None
        return added

    def offered(self, row_of: Mapping[str, int], rows: Rows) -> "OfferedNodes":
        """Return the nodes of a filter call. ``rows`` (n,) contains each of their rows once, or -1
        for unknown nodes."""
        if not self._last or self._last[-1].row_of is not row_of:
            self.add(row_of)
        if len(rows) == len(row_of) and rows.min(initial=0) >= 0:
            return OfferedNodes(self._last[-1], b"\xff" * -(-len(rows) // 8))
        named = np.zeros(len(row_of) + 1, np.bool_)
        named[rows] = True  # a row of -1 sets the additional last element
        return OfferedNodes(self._last[-1], np.packbits(named[:-1]).tobytes())


@dataclass(frozen=True, slots=True, eq=False)
class OfferedNodes:
    """The nodes in one filter call, which passed kube-scheduler's own filters."""

    nodes: NodeSet
    bits: bytes

    def names(self) -> list[str] | None:
        """Return the names of the nodes, or None if their node set has been dropped."""
        row_of = self.nodes.row_of
        if row_of is None:
            return None
        named = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=len(row_of))
        return [name for name, row in row_of.items() if named[row]]


@dataclass(frozen=True, slots=True)
class Decision:
    """The result of one filter call."""

    pod: Pod
    decision_id: str
    #: Unix time in seconds.
    at_s: float
    #: Generation of the snapshot that was used.
    generation: int
    offered: int
    fits: int
    #: Number of rejected nodes by reason.
    rejected: Mapping[Reason, int]
    #: False if nodes were rejected because of memory held for other pods, which may never be bound.
    sure: bool = True
    took_s: float = 0.0
    asked: tuple[Asked, ...] = ()
    #: The node that filter returned, if it returned only one. It is the only or the best fitting
    #: node.
    node: str = ""
    #: Whether the mode was observe, in which all nodes passed, including rejected nodes.
    observed: bool = False
    offered_nodes: OfferedNodes | None = None


class Journal:
    """The last filter call of each pod, limited in number and bytes, and the records.

    Beyond the limits, the filter call of the pod with the least recent call of any verb is dropped
    first. A copy of the journal receives records in the order of their last change, so it ends with
    equal records.
    """

    def __init__(self, bounds: Bounds = DEFAULT_BOUNDS, max_shown_bytes: int | None = None) -> None:
        """``max_shown_bytes`` is the memory limit for pods, by default ``MAX_SHOWN_BYTES``."""
        self.records = Records(bounds)
        self.max_shown_bytes = MAX_SHOWN_BYTES if max_shown_bytes is None else max_shown_bytes
        #: The decision and its estimated memory in bytes by pod uid, latest last.
        self._by_uid: OrderedDict[str, tuple[Decision, int]] = OrderedDict()
        self.shown_bytes = 0
        self._uid_of: dict[tuple[str, str], str] = {}
        #: Values of ``spec.schedulerName`` in filter calls.
        self._schedulers: Bounded[str, None] = Bounded(MAX_SCHEDULERS)
        #: Decision id and preemption by the uid of the preemptor.
        self._preempted: Bounded[str, tuple[str, Preempted]] = Bounded(MAX_PREEMPTING)

    def record(self, decision: Decision) -> None:
        """Keep a filter call as the pod's last call, and add it to the records."""
        self.keep(decision)
        part = Filtered(
            decision.at_s,
            micros(decision.took_s),
            decision.generation,
            decision.offered,
            decision.fits,
            {CODE_OF[reason]: nodes for reason, nodes in decision.rejected.items()},
            decision.asked,
            decision.observed,
        )
        self.note(decision.pod, part, decision.at_s, decision.node)

    def keep(self, decision: Decision) -> None:
        """Keep a filter call as the pod's last call. Replaces the previous call."""
        metadata = decision.pod.metadata
        self._forget(metadata.uid)
        size_bytes = pod_bytes(decision.pod)
        if decision.offered_nodes is not None:
            size_bytes += len(decision.offered_nodes.bits)
        self._by_uid[metadata.uid] = decision, size_bytes
        self._schedulers[scheduler_of(decision.pod)] = None
        self._uid_of[metadata.namespace, metadata.name] = metadata.uid
        self.shown_bytes += size_bytes
        max_pods = self.records.bounds.decisions
        while len(self._by_uid) > max_pods or self.shown_bytes > self.max_shown_bytes:
            self._forget(next(iter(self._by_uid)))

    def asked_by(self, schedulers: Iterable[str]) -> None:
        """Add the names of schedulers that made filter calls to another process."""
        for name in schedulers:
            self._schedulers[name] = None

    def _forget(self, uid: str) -> None:
        decision, size_bytes = self._by_uid.pop(uid, (None, 0))
        if decision is None:
            return
        self.shown_bytes -= size_bytes
        key = (decision.pod.metadata.namespace, decision.pod.metadata.name)
        if self._uid_of.get(key) == uid:
            del self._uid_of[key]

    def note(self, pod: Pod, part: Part, at_s: float, node: str = "") -> None:
        """Add the result of a verb to the record of this version of the pod."""
        metadata = pod.metadata
        record_id = decision_id(metadata.uid, metadata.resource_version)
        self.records.note(record_id, metadata.namespace, metadata.name, part, at_s, node)
        self._asked_about(metadata.uid)
        if isinstance(part, Preempted) and part.node:
            self._preempted[metadata.uid] = record_id, part

    def adopt(self, record: Record, decision: Decision | None, dropped: bool = False) -> None:
        """Keep a record of another journal. Replaces the record with the same id.

        ``decision`` is the pod's last filter call if it is new. ``dropped`` states whether the
        other journal has dropped the call.
        """
        self.records.adopt(record)
        if dropped:
            self._forget(record.uid)
        if decision is not None:
            self.keep(decision)
        self._asked_about(record.uid)

    def _asked_about(self, uid: str) -> None:
        if uid in self._by_uid:
            self._by_uid.move_to_end(uid)

    def preempted_for(self, uid: str) -> tuple[str, Preempted] | None:
        """Return the decision id and content of the last preemption for this pod, or None if there
        is none."""
        return self._preempted.get(uid)

    def latest(self, max_decisions: int) -> list[Decision]:
        """Return at most ``max_decisions`` of the pods' last filter calls, newest first."""
        newest = reversed(list(self._by_uid.values()))
        return [decision for decision, _ in islice(newest, max_decisions)]

    @property
    def schedulers(self) -> list[str]:
        """The scheduler names in recent filter calls."""
        return list(self._schedulers)

    @property
    def shown(self) -> int:
        """The number of pods whose last filter call is kept."""
        return len(self._by_uid)

    def of_uid(self, uid: str) -> Decision | None:
        return self.kept(uid)[0]

    def kept(self, uid: str) -> tuple[Decision | None, int]:
        """Return the pod's last filter call and its estimated size in bytes, or (None, 0) if there
        is none."""
        return self._by_uid.get(uid, (None, 0))

    def of_pod(self, namespace: str, name: str) -> Decision | None:
        return self.of_uid(self._uid_of.get((namespace, name), ""))


#: The API server's default for ``spec.schedulerName``.
STOCK_SCHEDULER = "default-scheduler"


def scheduler_of(pod: Pod) -> str:
    """Return the pod's scheduler name, truncated to the maximum length of names in Kubernetes."""
    return (pod.spec.scheduler_name or STOCK_SCHEDULER)[:253]


def pod_bytes(pod: Pod) -> int:
    """Return an upper estimate of a pod's size in memory, from its length as MessagePack.

    The many small objects of a spec take ten times their encoded length in memory.
    """
    return 1024 + 2 * len(_encode(pod)) + 10 * len(_encode(pod.spec))


def micros(seconds: float) -> int:
    return round(seconds * 1_000_000)
