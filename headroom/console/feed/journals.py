"""The journals that one process has: its own, and the journals of extenders that it follows."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from headroom.core.journal.decision_records import Record
from headroom.core.journal.journal import Decision, Journal
from headroom.runtime.follow.journal_stream import HoldsLine, StateLine


@dataclass(frozen=True, slots=True)
class Followed:
    """Another extender, and what this process has read of its journal."""

    #: The address as host:port, or only the host if its name does not resolve.
    address: str
    journal: Journal
    #: The last state that the extender sent, or None before the first state.
    state: StateLine | None
    #: Seconds since the extender's last line, or None before the first line.
    line_age_s: float | None
    #: A sentence that states why the extender sends no lines. Empty if it sends lines.
    problem: str
    #: Whether the extender has stopped, because its name no longer resolves to this address, or
    #: because another extender has the address now. It is no error if such an extender sends
    #: nothing.
    is_gone: bool = False
    #: The last line about holds; None before the first such line.
    holds: HoldsLine | None = None


class Journals:
    """The journal of this process, named ``replica``, and the journals that it follows."""

    def __init__(
        self, replica: str, own: Journal, followed: Callable[[], Sequence[Followed]] = tuple
    ) -> None:
        self.replica = replica
        self.own = own
        self.followed = followed

    def each(self) -> list[tuple[str, Journal]]:
        """Return (name of the extender, its journal) for all extenders, this process first."""
        named = ((f.state.replica if f.state else f.address, f.journal) for f in self.followed())
        return [(self.replica, self.own), *named]

    def of_id(self, decision_id: str) -> Iterator[tuple[str, Record]]:
        """Yield (name of the extender, its record) for each journal that has the decision."""
        for replica, journal in self.each():
            record = journal.records.of_id(decision_id)
            if record is not None:
                yield replica, record

    def of_uid(self, uid: str) -> Decision | None:
        """Return the last filter call about the pod. Any extender may have answered it."""
        return _newest(journal.of_uid(uid) for _, journal in self.each())

    def of_pod(self, namespace: str, name: str) -> Decision | None:
        """Return the last filter call about the pod, as ``of_uid`` does."""
        return _newest(journal.of_pod(namespace, name) for _, journal in self.each())

    def latest(self, most: int) -> list[Decision]:
        """Return the last filter call about each pod, newest first, for at most ``most`` pods."""
        found: dict[str, Decision] = {}
        of_all = (each for _, journal in self.each() for each in journal.latest(most))
        for decision in sorted(of_all, key=lambda each: -each.at_s):
            found.setdefault(decision.pod.metadata.uid, decision)
        return list(found.values())[:most]

    @property
    def schedulers(self) -> list[str]:
        """Return the names of the schedulers that called last, as pods name them."""
        return list(dict.fromkeys(name for _, j in self.each() for name in j.schedulers))


def _newest(decisions: Iterator[Decision | None]) -> Decision | None:
    known = [each for each in decisions if each is not None]
    return max(known, key=lambda each: each.at_s, default=None)
