"""Decisions on record: what each verb made of an attempt to place a pod, compact and bounded.

An attempt is known by its decision id, the pod's uid and resourceVersion. Kept are codes and
columns, each part as MessagePack, and no text but names: sentences are made when somebody reads.
The part of a verb that is called again for the same version of a pod takes the place of the one
before, so that a storm of retries is one record that is counted up and pushes nobody out.

One thread writes; others may read at any time what they were handed.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from itertools import takewhile
from typing import TypeVar

import msgspec

from extender.placement.policy import Weights


@dataclass(frozen=True, slots=True)
class Bounds:
    """What is kept: whichever is reached first."""

    decisions: int = 10_000
    size_bytes: int = 16 << 20
    age_s: float = 86_400.0


DEFAULT_BOUNDS = Bounds()


class Asked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What one container asks for."""

    container: str
    resource: str
    count: int
    #: As users write it, and who says so.
    amount: str
    source: str


class Filtered(msgspec.Struct, frozen=True, array_like=True, gc=False):
    #: Unix time, seconds; as in all parts.
    at_s: float
    took_us: int
    generation: int
    offered: int
    fits: int
    #: Code of the reason -> nodes refused for it.
    rejected: dict[int, int]
    asked: tuple[Asked, ...]
    #: All were let pass, whatever they were refused for: the mode was observe.
    observed: bool = False


class Ranked(msgspec.Struct, frozen=True, array_like=True, gc=False):
    at_s: float
    took_us: int
    generation: int
    offered: int
    #: Empty where any would do.
    winner: str


class Candidate(msgspec.Struct, frozen=True, array_like=True, gc=False):
    node: str
    #: In thousandths; the terms in the order of ``TERMS``.
    score: int
    terms: tuple[int, ...]

    @property
    def score_ratio(self) -> float:
        return self.score / 1000

    @property
    def score_terms(self) -> Mapping[str, float]:
        return {name: term / 1000 for name, term in zip(TERMS, self.terms, strict=True)}


class Candidates(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """The best of those that were ranked, the winner first."""

    best: tuple[Candidate, ...]


class Victim(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A pod that is to leave, or leaves anyway."""

    namespace: str
    name: str
    uid: str
    priority: int
    leaving: bool


class Loser(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A node on which others would have had to leave."""

    node: str
    victims: int
    #: By what it is worse, as ``cluster.victimstold.LOST_BY`` has it.
    lost_by: str


class Preempted(msgspec.Struct, frozen=True, array_like=True, gc=False):
    at_s: float
    took_us: int
    #: Nodes with victims that kube-scheduler proposed, and those that it was told.
    offered: int
    kept: int
    #: The best of them; empty where nobody is to leave.
    node: str = ""
    victims: tuple[Victim, ...] = ()
    #: Victims that are none of ours, which kube-scheduler needs.
    others: int = 0
    pdb_violations: int = 0
    #: Whose choice it is: "proposed" by kube-scheduler, "corrected", "added" where it proposed
    #: nothing, or "controller" where it did not even ask.
    source: str = ""
    losers: tuple[Loser, ...] = ()
    #: Nodes on which no removal was found to help; whether there will be room anyway; whether some
    #: node was not looked at to the end.
    helpless: int = 0
    soon: bool = False
    cut_short: bool = False


class BindTried(msgspec.Struct, frozen=True, array_like=True, gc=False):
    at_s: float
    took_us: int
    node: str
    #: bound, declined or failed.
    outcome: str
    #: Code of the reason why it was declined, 0 for none; what failed, in words.
    reason: int
    message: str


Part = Filtered | Ranked | Candidates | Preempted | BindTried
_KINDS: tuple[type, ...] = (Filtered, Ranked, Candidates, Preempted, BindTried)
_PLACE_OF = {kind: place for place, kind in enumerate(_KINDS)}
#: The terms of a score.
TERMS = tuple(each.name for each in fields(Weights))
P = TypeVar("P", Filtered, Ranked, Candidates, Preempted, BindTried)
MOST_NAME_CHARS = 1024
_encode = msgspec.msgpack.encode
#: What a record takes without its parts and its texts, and a part without its bytes: measured.
RECORD_BYTES, PART_BYTES = 540, 55


@dataclass(slots=True, eq=False)
class Record:
    decision_id: str
    namespace: str
    name: str
    #: Unix time, seconds: of the first call and of the last.
    first_at_s: float
    at_s: float = 0.0
    #: The node that it was bound to, or that won; empty for none.
    node: str = ""
    #: That of all records when this one was written to last.
    version: int = 0
    #: As reckoned from what is kept; a test holds it against what Python takes.
    size_bytes: int = 0
    #: Of each kind what it says, and how often that verb was called.
    _parts: list[bytes] = field(default_factory=lambda: [b""] * len(_KINDS))
    _times: list[int] = field(default_factory=lambda: [0] * len(_KINDS))

    @property
    def uid(self) -> str:
        return self.decision_id.rpartition(".")[0]

    def part(self, kind: type[P]) -> P | None:
        part = self._parts[_PLACE_OF[kind]]
        return msgspec.msgpack.decode(part, type=kind) if part else None

    def times(self, kind: type) -> int:
        return self._times[_PLACE_OF[kind]]

    def put(self, part: Part, times: int | None = None) -> int:
        """Returns by how many bytes it has grown; ``times``: how often that verb was called, one
        more than before if not given."""
        place, said = _PLACE_OF[type(part)], _encode(part)
        before = self._parts[place]
        self._parts[place] = said
        self._times[place] = self._times[place] + 1 if times is None else times
        grown = len(said) - len(before) + (0 if before else PART_BYTES)
        self.size_bytes += grown
        return grown


class Records:
    """Those written to last come last; the others go first."""

    def __init__(self, bounds: Bounds) -> None:
        self.bounds = bounds
        self.size_bytes = 0
        #: Grows with every part that is noted.
        self.version = 0
        self._records: OrderedDict[str, Record] = OrderedDict()

    def __len__(self) -> int:
        return len(self._records)

    @property
    def oldest_at_s(self) -> float | None:
        oldest = next(iter(list(self._records.values())), None)
        return oldest.at_s if oldest else None

    def note(
        self, decision_id: str, namespace: str, name: str, part: Part, at_s: float, node: str = ""
    ) -> None:
        """Put what a verb did on record; ``at_s`` is now, in Unix seconds.

        What has longer names than an API server takes is not recorded.
        """
        if len(decision_id) + len(namespace) + len(name) > MOST_NAME_CHARS:
            return
        record = self._records.get(decision_id)
        if record is None:
            texts = len(decision_id) + len(namespace) + len(name)
            record = Record(decision_id, namespace, name, at_s, size_bytes=RECORD_BYTES + texts)
            self._records[decision_id] = record
            self.size_bytes += record.size_bytes
        self._records.move_to_end(decision_id)
        self.size_bytes += record.put(part)
        record.at_s = at_s
        record.node = node or record.node
        self.version += 1
        record.version = self.version
        self._forget(at_s)

    def adopt(self, record: Record) -> None:
        """Put a record of another process in the place of the one with its id."""
        texts = len(record.decision_id) + len(record.namespace) + len(record.name)
        if texts > MOST_NAME_CHARS:
            return
        record.size_bytes += RECORD_BYTES + texts
        before = self._records.pop(record.decision_id, None)
        self.size_bytes += record.size_bytes - (before.size_bytes if before else 0)
        self._records[record.decision_id] = record
        self.version += 1
        record.version = self.version
        self._forget(record.at_s)

    def newer_than(self, version: int) -> list[Record]:
        """Those that were written to since that version, the oldest first."""
        newer = list(takewhile(lambda record: record.version > version, self.newest_first()))
        newer.reverse()
        return newer

    def of_id(self, decision_id: str) -> Record | None:
        return self._records.get(decision_id)

    def newest_first(self) -> Iterator[Record]:
        return reversed(list(self._records.values()))

    def _forget(self, now_s: float) -> None:
        bounds = self.bounds
        while self._records:
            first = next(iter(self._records.values()))
            too_many = len(self._records) > bounds.decisions or self.size_bytes > bounds.size_bytes
            if not too_many and first.at_s >= now_s - bounds.age_s:
                return
            del self._records[first.decision_id]
            self.size_bytes -= first.size_bytes
