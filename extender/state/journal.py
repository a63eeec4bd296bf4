"""What was decided lately: the last decision about each pod, which bind and waking remind
themselves of, and the records of attempts, which the debug API reads.

kube-scheduler's bind call names the pod and nothing else; the pod itself, with the
resourceVersion that makes the Binding conditional, was in the filter call before it.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import islice

import msgspec
import numpy as np

from contract.decision import decision_id
from contract.kube import Pod
from contract.reasons import Reason
from extender.bounded import Bounded
from extender.placement.snapshot import CODE_OF, Rows
from extender.state.decision_records import (
    DEFAULT_BOUNDS,
    Asked,
    Bounds,
    Filtered,
    Part,
    Preempted,
    Records,
)

#: Pods for which others were to leave, of which it is remembered who.
MOST_PREEMPTING = 256
#: Memory for pods as kube-scheduler showed them last.
MAX_SHOWN_BYTES = 64 << 20
#: Names of schedulers that asked about pods.
MAX_SCHEDULERS = 64
#: Changes of the set of nodes after which it is forgotten which nodes a filter call named.
MAX_NODE_SETS = 4
_encode = msgspec.msgpack.encode


class NodeSet:
    """The names of all nodes at some time, by row; None once there were too many other sets."""

    def __init__(self, row_of: Mapping[str, int]) -> None:
        self.row_of: Mapping[str, int] | None = row_of


class NodeSets:
    """The last sets of nodes: a decision keeps one bit for each node, and not the names."""

    def __init__(self) -> None:
        self._last: deque[NodeSet] = deque()

    def offered(self, row_of: Mapping[str, int], rows: Rows) -> "OfferedNodes":
        """``rows``: (n,) rows of the nodes that a filter call named, -1 for an unknown node."""
        if not self._last or self._last[-1].row_of is not row_of:
            self._last.append(NodeSet(row_of))
            if len(self._last) > MAX_NODE_SETS:
                self._last.popleft().row_of = None
        named = np.zeros(len(row_of), np.bool_)
        named[rows[rows >= 0]] = True
        return OfferedNodes(self._last[-1], np.packbits(named).tobytes())


@dataclass(frozen=True, slots=True, eq=False)
class OfferedNodes:
    """The nodes that one filter call named: those that passed kube-scheduler's own filters."""

    nodes: NodeSet
    bits: bytes

    def names(self) -> list[str] | None:
        """None when they are not known any more."""
        row_of = self.nodes.row_of
        if row_of is None:
            return None
        named = np.unpackbits(np.frombuffer(self.bits, np.uint8), count=len(row_of))
        return [name for name, row in row_of.items() if named[row]]


@dataclass(frozen=True, slots=True)
class Decision:
    """One filter call, in numbers."""

    pod: Pod
    decision_id: str
    #: Unix time, seconds.
    at_s: float
    #: The snapshot it was made on.
    generation: int
    offered: int
    fits: int
    #: Reason -> nodes refused for it.
    rejected: Mapping[Reason, int]
    #: False: nodes were refused for pods that had not come yet, and may never come.
    sure: bool = True
    took_s: float = 0.0
    asked: tuple[Asked, ...] = ()
    #: The node, where one alone fits.
    only: str = ""
    #: All nodes were let pass: the mode was observe.
    observed: bool = False
    offered_nodes: OfferedNodes | None = None


class Journal:
    """Bounded in number and bytes: the pod decided about longest ago is forgotten first."""

    def __init__(self, bounds: Bounds = DEFAULT_BOUNDS, max_shown_bytes: int | None = None) -> None:
        """``max_shown_bytes``: memory for pods; ``MAX_SHOWN_BYTES`` if not given."""
        self.records = Records(bounds)
        self._max_shown_bytes = MAX_SHOWN_BYTES if max_shown_bytes is None else max_shown_bytes
        #: Uid -> decision, and the memory that it takes.
        self._by_uid: dict[str, tuple[Decision, int]] = OrderedDict()
        self.shown_bytes = 0
        self._uid_of: dict[tuple[str, str], str] = {}
        #: The schedulers that asked about pods, by the name in spec.schedulerName.
        self._schedulers: Bounded[str, None] = Bounded(MAX_SCHEDULERS)
        #: Uid -> decision, of pods for which others were to leave.
        self._preempted: Bounded[str, tuple[str, Preempted]] = Bounded(MOST_PREEMPTING)

    def record(self, decision: Decision) -> None:
        """Keep a filter call, and put it on record."""
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
        self.note(decision.pod, part, decision.at_s, decision.only)

    def keep(self, decision: Decision) -> None:
        """Keep the last filter call about a pod, in the place of the one before."""
        metadata = decision.pod.metadata
        self._forget(metadata.uid)
        size_bytes = pod_bytes(decision.pod)
        if decision.offered_nodes is not None:
            size_bytes += len(decision.offered_nodes.bits)
        self._by_uid[metadata.uid] = decision, size_bytes
        self._schedulers[scheduler_of(decision.pod)] = None
        self._uid_of[metadata.namespace, metadata.name] = metadata.uid
        self.shown_bytes += size_bytes
        most = self.records.bounds.decisions
        while len(self._by_uid) > most or self.shown_bytes > self._max_shown_bytes:
            self._forget(next(iter(self._by_uid)))

    def asked_by(self, schedulers: Iterable[str]) -> None:
        """Schedulers that asked another process about pods."""
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
        """Put on record what a verb made of this very version of the pod."""
        metadata = pod.metadata
        which = decision_id(metadata.uid, metadata.resource_version)
        self.records.note(which, metadata.namespace, metadata.name, part, at_s, node)
        if isinstance(part, Preempted) and part.node:
            self._preempted[metadata.uid] = which, part

    def preempted_for(self, uid: str) -> tuple[str, Preempted] | None:
        """The last decision that others leave for this pod, and what it says."""
        return self._preempted.get(uid)

    def latest(self, most: int) -> list[Decision]:
        """The last about each pod, at most so many, the newest first."""
        newest = reversed(list(self._by_uid.values()))
        return [decision for decision, _ in islice(newest, most)]

    @property
    def schedulers(self) -> list[str]:
        """The last schedulers that asked, by the names that pods gave them."""
        return list(self._schedulers)

    @property
    def shown(self) -> int:
        """Pods that are kept as kube-scheduler showed them last."""
        return len(self._by_uid)

    def of_uid(self, uid: str) -> Decision | None:
        decision, _ = self._by_uid.get(uid, (None, 0))
        return decision

    def of_pod(self, namespace: str, name: str) -> Decision | None:
        return self.of_uid(self._uid_of.get((namespace, name), ""))


def scheduler_of(pod: Pod) -> str:
    """Its name, as far as Kubernetes allows names to be long."""
    return (pod.spec.scheduler_name or "default-scheduler")[:253]


def pod_bytes(pod: Pod) -> int:
    """Memory that a pod takes at most, estimated from its length as MessagePack: the many small
    objects of a spec take ten times their length."""
    return 1024 + 2 * len(_encode(pod)) + 10 * len(_encode(pod.spec))


def micros(seconds: float) -> int:
    return round(seconds * 1_000_000)
