"""Encodes an extender's journal as lines of JSON, for the processes that show it.

Each line is complete, so it replaces the earlier line about the same decision, or about all holds.
The writer needs only a cursor for each reader, not a queue, and a reader that is slow or was
disconnected misses only intermediate states.
"""

from collections import deque
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Annotated, NamedTuple

import msgspec
from msgspec import Meta

from headroom.bounded_dict import Bounded
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.holds import HeldFor
from headroom.core.journal.decision_records import (
    Asked,
    BindTried,
    Candidates,
    Filtered,
    Part,
    Preempted,
    Ranked,
    Record,
)
from headroom.core.journal.journal import (
    MAX_NODE_SETS,
    Decision,
    Journal,
    NodeSet,
    NodeSets,
    OfferedNodes,
)
from headroom.core.placement.snapshot import CODE_OF, REASONS

#: A cursor remembers the filter calls that it has sent for at most this number of decisions.
MAX_SHOWN = 1_000
#: Maximum number of holds in one line. Other holds are omitted.
MAX_HOLDS = 1_000
_KINDS: tuple[type[Part], ...] = (Filtered, Ranked, Candidates, Preempted, BindTried)


class BadLine(ValueError):
    """The line cannot be read, perhaps because the extender has another version."""


class StateLine(msgspec.Struct, frozen=True, tag_field="type", tag="state"):
    """The state of the extender. It is the first line, and is repeated every few seconds."""

    replica: str
    version: str
    #: Unix time in seconds.
    at_s: float
    generation: int
    #: A sentence that states why the extender is not ready. Empty if it is ready.
    not_ready_because: str
    mode: str
    #: The schedulers that have called the extender.
    schedulers: tuple[str, ...] = ()


class NodesLine(msgspec.Struct, frozen=True, tag_field="type", tag="nodes"):
    """The names of all nodes, in the order of the bits of ``Offered``.

    Lines about decisions refer to this line by its number. Only the last ``MAX_NODE_SETS`` lines
    are kept.
    """

    number: int
    names: tuple[str, ...]


class Offered(msgspec.Struct, frozen=True):
    """The nodes that kube-scheduler offered in a filter call, as one bit for each name of a
    ``NodesLine``."""

    nodes: int
    bits: bytes


class Shown(msgspec.Struct, frozen=True):
    """The last filter call about a pod: the pod as kube-scheduler sent it, and the result.

    ``core.journal.journal.Decision`` describes the fields.
    """

    pod: Pod
    at_s: float
    generation: int
    offered: int
    fits: int
    #: Number of rejected nodes by the code of the reason.
    rejected: dict[int, int]
    sure: bool
    took_s: float
    asked: tuple[Asked, ...]
    node: str
    observed: bool
    offered_nodes: Offered | None


#: The fields that ``Shown`` and ``Decision`` have in common.
_SAME = [name for name in Shown.__struct_fields__ if name not in ("rejected", "offered_nodes")]


class DecisionLine(msgspec.Struct, frozen=True, tag_field="type", tag="decision"):
    """The current state of one attempt to place a pod."""

    decision_id: str
    namespace: str
    name: str
    first_at_s: float
    at_s: float
    node: str
    version: int
    #: Number of calls of each verb, in the order of the fields below.
    times: tuple[int, ...]
    filtered: Filtered | None = None
    ranked: Ranked | None = None
    candidates: Candidates | None = None
    preempted: Preempted | None = None
    bind: BindTried | None = None
    #: The pod's last filter call. None if it was sent before, or is no longer kept.
    shown: Shown | None = None
    #: Whether the extender has dropped the pod's last filter call.
    dropped: bool = False


class HoldsLine(msgspec.Struct, frozen=True, tag_field="type", tag="holds"):
    """All memory that the extender holds for pods. This line replaces the previous line about
    holds."""

    holds: Annotated[tuple[HeldFor, ...], Meta(max_length=MAX_HOLDS)] = ()


def holds_line(cluster: Cluster, now_s: float) -> HoldsLine:
    """Return the extender's holds, at most ``MAX_HOLDS``. Expired holds of nominees come last."""
    return HoldsLine(tuple(islice(cluster.holds.all(now_s), MAX_HOLDS)))


Line = StateLine | NodesLine | DecisionLine | HoldsLine
_decoder = msgspec.json.Decoder(Line)
_encode = msgspec.json.encode


def encode(line: Line) -> bytes:
    return _encode(line) + b"\n"


class _Sent(NamedTuple):
    """The last filter call that was sent about a pod."""

    decision_id: str
    #: Time of the filter call.
    at_s: float
    size_bytes: int
    #: The number of lines sent before the last line about this pod, and the memory of their pods.
    lines: int = 0
    pod_bytes: int = 0


class Cursor:
    """The position of one reader in the journal.

    ``after`` is the version of the newest record that the reader has. ``holds`` returns the current
    line about holds.
    """

    def __init__(
        self, journal: Journal, after: int = 0, holds: Callable[[], HoldsLine] = HoldsLine
    ) -> None:
        self._journal = journal
        self._version = after
        self._holds = holds
        #: The last line about holds that was sent. None before the first line, because the reader
        #: may have a line of an earlier stream.
        self._holds_sent: HoldsLine | None = None
        self._sets: deque[tuple[int, NodeSet]] = deque(maxlen=MAX_NODE_SETS)
        self._next_set = 1
        #: The last filter call that was sent about each pod, by uid.
        self._shown: Bounded[str, _Sent] = Bounded(MAX_SHOWN)
        #: Number of lines about decisions sent so far, and the memory of their pods.
        self._lines = self._pod_bytes = 0

    def lines(self) -> Iterator[Line]:
        """Yield all new lines, oldest first. The next call yields changes that happen in the
        meantime."""
        records = self._journal.records
        if (until := records.version) != self._version:
            for record in records.newer_than(self._version):
                yield from self._lines_of(record)
            self._version = until
        if (holds := self._holds()) != self._holds_sent:
            self._holds_sent = holds
            yield holds

    def _lines_of(self, record: Record) -> Iterator[Line]:
        shown, (decision, size_bytes) = None, self._journal.kept(record.uid)
        sent = self._shown.get(record.uid)
        if (
            decision is not None
            and decision.decision_id == record.decision_id
            and not self._is_kept(decision, sent)
        ):
            sent = _Sent(decision.decision_id, decision.at_s, size_bytes)
            offered, named = decision.offered_nodes, None
            if offered is not None and offered.nodes.row_of is not None:
                number = self._number_of(offered.nodes)
                if number is None:
                    number = self._next_set
                    self._next_set += 1
                    self._sets.append((number, offered.nodes))
                    yield NodesLine(number, tuple(offered.nodes.row_of))
                named = Offered(number, offered.bits)
            shown = _shown(decision, named)
        if sent is not None:
            self._shown[record.uid] = sent._replace(lines=self._lines, pod_bytes=self._pod_bytes)
            self._pod_bytes += sent.size_bytes
        self._lines += 1
        yield DecisionLine(
            record.decision_id,
            record.namespace,
            record.name,
            record.first_at_s,
            record.at_s,
            record.node,
            record.version,
            tuple(record.times(kind) for kind in _KINDS),
            record.part(Filtered),
            record.part(Ranked),
            record.part(Candidates),
            record.part(Preempted),
            record.part(BindTried),
            shown,
            decision is None,
        )

    def _is_kept(self, decision: Decision, sent: _Sent | None) -> bool:
        """Return whether it is certain that the reader still has this filter call.

        The reader may have dropped the call if many lines about other pods were sent after it, even
        if the journal itself still has the call. Both have the same limits, but the journal counts
        every call. The reader counts only received calls, and calls that are sent together as
        one."""
        return (
            sent is not None
            and (sent.decision_id, sent.at_s) == (decision.decision_id, decision.at_s)
            and self._lines - sent.lines < self._journal.records.bounds.decisions
            and self._pod_bytes - sent.pod_bytes <= self._journal.max_shown_bytes
        )

    def _number_of(self, nodes: NodeSet) -> int | None:
        return next((number for number, known in self._sets if known is nodes), None)


def _shown(decision: Decision, offered: Offered | None) -> Shown:
    rejected = {CODE_OF[reason]: nodes for reason, nodes in decision.rejected.items()}
    same = {name: getattr(decision, name) for name in _SAME}
    return Shown(rejected=rejected, offered_nodes=offered, **same)


class Copy:
    """A journal rebuilt from the lines of one extender.

    Only one thread may call ``take``. Other threads may read ``journal``, ``state`` and ``holds``
    at any time.
    """

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.state: StateLine | None = None
        self.holds: HoldsLine | None = None
        self._node_sets = NodeSets()
        self._sets: Bounded[int, NodeSet] = Bounded(MAX_NODE_SETS)
        #: The version of the last record, from which the next stream continues.
        self.version = 0

    def take(self, raw: bytes) -> None:
        """Apply one line. Raises ``BadLine``."""
        try:
            line = _decoder.decode(raw)
        except (ValueError, RecursionError) as err:
            raise BadLine(f"a line of the journal cannot be read: {err}") from err
        match line:
            case StateLine():
                self.state = line
                self.journal.asked_by(line.schedulers)
            case NodesLine(number, names):
                row_of = {name: row for row, name in enumerate(names)}
                self._sets[number] = self._node_sets.add(row_of)
            case DecisionLine():
                self._put(line)
            case HoldsLine():
                self.holds = line

    def _put(self, line: DecisionLine) -> None:
        parts = (line.filtered, line.ranked, line.candidates, line.preempted, line.bind)
        if len(line.times) != len(_KINDS):
            raise BadLine(
                f"decision {line.decision_id} has {len(line.times)} call counts instead of "
                f"{len(_KINDS)}"
            )
        record = Record(
            line.decision_id, line.namespace, line.name, line.first_at_s, line.at_s, line.node
        )
        for part, times in zip(parts, line.times, strict=True):
            if part is not None:
                record.put(part, times)
        shown = line.shown
        decision = None if shown is None else self._decision(line.decision_id, shown)
        self.journal.adopt(record, decision, line.dropped)
        self.version = line.version

    def _decision(self, decision_id: str, shown: Shown) -> Decision:
        rejected: dict[Reason, int] = {}
        for code, nodes in shown.rejected.items():
            if 0 < code < len(REASONS) and (reason := REASONS[code]):
                rejected[reason] = nodes
        named, offered = shown.offered_nodes, None
        if named is not None and (known := self._sets.get(named.nodes)) is not None:
            offered = OfferedNodes(known, named.bits)
        same = {name: getattr(shown, name) for name in _SAME}
        return Decision(decision_id=decision_id, rejected=rejected, offered_nodes=offered, **same)
