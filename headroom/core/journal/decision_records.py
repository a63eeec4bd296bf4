"""Compact records of scheduling attempts, with the result of each extender call.

The decision id, which consists of the pod's uid and resourceVersion, identifies an attempt. A
record keeps one part per verb, encoded as MessagePack. Parts contain codes, numbers and names, and
sentences are built only when a record is read. If a verb is called again for the same version of a
pod, its part is replaced and a counter is incremented. So a storm of retries stays within one
record and displaces no others.

Only one thread writes. Other threads may read the records that they have at any time.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from headroom.core.placement.policy import Weights


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the records. If a limit is exceeded, the oldest records are dropped."""

    decisions: int = 10_000
    size_bytes: int = 16 << 20
    age_s: float = 86_400.0


DEFAULT_BOUNDS = Bounds()
#: Names of the terms of a score.
TERMS = tuple(each.name for each in fields(Weights))
_THOUSANDTHS = np.dtype("<u2")
_Ratios = NDArray[np.float64]


class Asked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The request of one container."""

    container: str
    resource: str
    count: int
    #: The amount of memory as the user wrote it.
    amount: str
    #: The origin of the amount, such as the pod's annotation or the namespace's default.
    source: str
    #: The limit as the user wrote it, or "" if there is none.
    limit: str = ""


class Filtered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of a filter call."""

    #: When filter was called, in Unix seconds as in all parts.
    at_s: float
    took_us: int
    generation: int
    offered: int
    fits: int
    #: Number of rejected nodes by the code of the reason.
    rejected: dict[int, int]
    asked: tuple[Asked, ...]
    #: Whether the mode was observe, in which all nodes passed, including rejected nodes.
    observed: bool = False


class Ranked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of a prioritize call, or of filter if it returns only the best node."""

    at_s: float
    took_us: int
    generation: int
    offered: int
    #: The node with the highest score. Empty if all nodes are equally good.
    winner: str
    #: Whether filter ranked the nodes and returned only the winner.
    by_filter: bool = False


@dataclass(frozen=True, slots=True)
class Candidate:
    """A node with its score and the terms of the score, all 0..1."""

    node: str
    score_ratio: float
    score_terms: Mapping[str, float]


class Candidates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The nodes with the highest scores, winner first. Numbers are rounded to thousandths."""

    nodes: tuple[str, ...]
    #: The score of each node, followed by its terms in the order of ``TERMS``: thousandths as
    #: unsigned 16-bit integers, least significant byte first.
    thousandths: bytes

    @classmethod
    def of(
        cls, nodes: tuple[str, ...], scores: _Ratios, terms: Mapping[str, _Ratios]
    ) -> "Candidates":
        """Return the record of these nodes. Scores and each term have an element for each node."""
        ratios = np.array([scores, *(terms[name] for name in TERMS)])
        return cls(nodes, np.rint(1000 * ratios).astype(_THOUSANDTHS).tobytes("F"))

    def first(self, most: int | None = None) -> list[Candidate]:
        """Return the first ``most`` nodes, or all nodes. A node without numbers is left out,
        because another process can send any record."""
        width = 1 + len(TERMS)
        whole = len(self.thousandths) // (width * _THOUSANDTHS.itemsize)
        ratios = np.frombuffer(self.thousandths, _THOUSANDTHS, whole * width) / 1000
        return [
            Candidate(node, score, dict(zip(TERMS, terms, strict=True)))
            for node, (score, *terms) in zip(
                self.nodes[:most], ratios.reshape(whole, width).tolist(), strict=False
            )
        ]


class Victim(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A pod to evict, or a pod that is already being deleted (``leaving``)."""

    namespace: str
    name: str
    uid: str
    priority: int
    leaving: bool


class Loser(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A node with possible victims that was not chosen."""

    node: str
    victims: int
    #: Why the chosen node is better, from ``preemption.report.LOST_BY``.
    lost_by: str


class Preempted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of a preempt call, or of the preemption controller."""

    at_s: float
    took_us: int
    #: Number of nodes that kube-scheduler proposed with victims.
    offered: int
    #: Number of nodes returned to kube-scheduler.
    kept: int
    #: The best node. Empty if no pod has to be evicted.
    node: str = ""
    victims: tuple[Victim, ...] = ()
    #: Number of victims without a GPU, which kube-scheduler needs for other resources.
    others: int = 0
    pdb_violations: int = 0
    #: How the victims were chosen: "proposed" if kube-scheduler's proposal was accepted,
    #: "corrected" if it was changed, "added" if kube-scheduler proposed none on this node, and
    #: "controller" if it made no preempt call.
    source: str = ""
    losers: tuple[Loser, ...] = ()
    #: Number of offered nodes on which no helpful eviction was found.
    helpless: int = 0
    #: Whether the pod will fit as soon as terminating pods have ended.
    soon: bool = False
    #: Whether the search reached its limits before it had examined every node completely.
    cut_short: bool = False


class BindTried(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The result of a bind call."""

    at_s: float
    took_us: int
    node: str
    #: The result of the bind: "bound", "declined" or "failed".
    outcome: str
    #: The code of the reason why the bind was declined, or 0 if it was not declined.
    reason: int
    #: The error, if the bind failed.
    message: str


Part = Filtered | Ranked | Candidates | Preempted | BindTried
_KINDS: tuple[type, ...] = (Filtered, Ranked, Candidates, Preempted, BindTried)
_INDEX_OF = {kind: index for index, kind in enumerate(_KINDS)}
P = TypeVar("P", Filtered, Ranked, Candidates, Preempted, BindTried)
MAX_NAME_CHARS = 1024
_encode = msgspec.msgpack.encode
#: Measured size in bytes of a record without parts and texts, and of a part without its content.
RECORD_BYTES, PART_BYTES = 540, 55


@dataclass(slots=True, eq=False)
class Record:
    """One scheduling attempt."""

    decision_id: str
    namespace: str
    name: str
    #: Unix time of the first call, in seconds.
    first_at_s: float
    #: Unix time of the last call, in seconds.
    at_s: float = 0.0
    #: The node to which the pod was bound, or otherwise the best node. Empty if there is none.
    node: str = ""
    #: ``Records.version`` when this record was last written.
    version: int = 0
    #: Estimated memory in bytes. A test compares it with the memory that Python allocates.
    size_bytes: int = field(init=False)
    #: The encoded part of each kind, and the number of calls of its verb.
    _parts: list[bytes] = field(default_factory=lambda: [b""] * len(_KINDS))
    _times: list[int] = field(default_factory=lambda: [0] * len(_KINDS))

    def __post_init__(self) -> None:
        self.size_bytes = RECORD_BYTES + self.name_chars

    @property
    def name_chars(self) -> int:
        return len(self.decision_id) + len(self.namespace) + len(self.name)

    @property
    def uid(self) -> str:
        return self.decision_id.rpartition(".")[0]

    def part(self, kind: type[P]) -> P | None:
        part = self._parts[_INDEX_OF[kind]]
        return msgspec.msgpack.decode(part, type=kind) if part else None

    def times(self, kind: type) -> int:
        return self._times[_INDEX_OF[kind]]

    def put(self, part: Part, times: int | None = None) -> int:
        """Replace the part of this kind. Return the number of bytes by which the record has grown.

        ``times`` is the number of calls of the verb. None adds one to the previous number.
        """
        index, encoded = _INDEX_OF[type(part)], _encode(part)
        before = self._parts[index]
        self._parts[index] = encoded
        self._times[index] = self._times[index] + 1 if times is None else times
        growth_bytes = len(encoded) - len(before) + (0 if before else PART_BYTES)
        self.size_bytes += growth_bytes
        return growth_bytes


class Records:
    """All records within the bounds. The least recently written record is dropped first."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.size_bytes = 0
        #: A number that increases with every part that is written.
        self.version = 0
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    def note(
        self, decision_id: str, namespace: str, name: str, part: Part, at_s: float, node: str = ""
    ) -> None:
        """Record the result of a verb. ``at_s`` is the current Unix time in seconds.

        Calls with names that are longer than the API server accepts are not recorded.
        """
        record = self._records.get(decision_id)
        if record is None:
            record = Record(decision_id, namespace, name, at_s)
            if record.name_chars > MAX_NAME_CHARS:
                return
            self._records[decision_id] = record
            self.size_bytes += record.size_bytes
        self.size_bytes += record.put(part)
        record.at_s = at_s
        record.node = node or record.node
        self._written(record)

    def adopt(self, record: Record) -> None:
        """Add a record of another process, or replace the record with the same decision id."""
        if record.name_chars > MAX_NAME_CHARS:
            return
        before = self._records.get(record.decision_id)
        self.size_bytes += record.size_bytes - (before.size_bytes if before else 0)
        self._records[record.decision_id] = record
        self._written(record)

    def newer_than(self, version: int) -> list[Record]:
        """Return the records written after this version, oldest first."""
        newer = list(takewhile(lambda record: record.version > version, self.newest_first()))
        newer.reverse()
        return newer

    def of_id(self, decision_id: str) -> Record | None:
        return self._records.get(decision_id)

    def newest_first(self) -> Iterator[Record]:
        return reversed(list(self._records.values()))

    def _written(self, record: Record) -> None:
        """Move the record to the end, and drop records beyond the bounds."""
        self._records.move_to_end(record.decision_id)
        self.version += 1
        record.version = self.version
        bounds, now_s = self.bounds, record.at_s
        while self._records:
            first = next(iter(self._records.values()))
            too_many = len(self._records) > bounds.decisions or self.size_bytes > bounds.size_bytes
            if not too_many and first.at_s >= now_s - bounds.age_s:
                return
            del self._records[first.decision_id]
            self.size_bytes -= first.size_bytes
