"""The journals of several extenders, read as one: kube-scheduler's calls may go to any of them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from extender.observability.journal_stream import AssumedLine, StateLine
from extender.state.decision_records import Record
from extender.state.journal import Decision, Journal


@dataclass(frozen=True, slots=True)
class Followed:
    """Another extender, as far as its journal was read."""

    #: Its address.
    place: str
    journal: Journal
    #: The last state that it sent; None before the first.
    state: StateLine | None
    #: Seconds since it was heard of; None before that.
    heard_s: float | None
    #: Why nothing comes from it at present, in a sentence; "" if something does.
    trouble: str
    #: It has ended, and nothing is missed: its name has no such address any more, or another
    #: extender has it.
    is_gone: bool = False
    #: The last line about assumed binds and nominations; None before the first.
    assumed: AssumedLine | None = None


def none_followed() -> Sequence[Followed]:
    return ()


class Journals:
    """The journal of this process, by its name, and those that it follows."""

    def __init__(
        self,
        replica: str,
        own: Journal,
        followed: Callable[[], Sequence[Followed]] = none_followed,
    ) -> None:
        self.replica = replica
        self.own = own
        self.followed = followed

    def each(self) -> list[tuple[str, Journal]]:
        """Name of the extender -> its journal; this process first."""
        named = ((f.state.replica if f.state else f.place, f.journal) for f in self.followed())
        return [(self.replica, self.own), *named]

    def of_id(self, decision_id: str) -> Iterator[tuple[str, Record]]:
        for replica, journal in self.each():
            record = journal.records.of_id(decision_id)
            if record is not None:
                yield replica, record

    def of_uid(self, uid: str) -> Decision | None:
        """The last filter call about the pod, whichever extender answered it."""
        return _newest(journal.of_uid(uid) for _, journal in self.each())

    def of_pod(self, namespace: str, name: str) -> Decision | None:
        return _newest(journal.of_pod(namespace, name) for _, journal in self.each())

    def latest(self, most: int) -> list[Decision]:
        """The last filter call about each pod, at most so many, the newest first."""
        found: dict[str, Decision] = {}
        of_all = (each for _, journal in self.each() for each in journal.latest(most))
        for decision in sorted(of_all, key=lambda each: -each.at_s):
            found.setdefault(decision.pod.metadata.uid, decision)
        return list(found.values())[:most]

    @property
    def schedulers(self) -> list[str]:
        """The last schedulers that asked, by the names that pods gave them."""
        return list(dict.fromkeys(name for _, j in self.each() for name in j.schedulers))


def _newest(decisions: Iterator[Decision | None]) -> Decision | None:
    known = [each for each in decisions if each is not None]
    return max(known, key=lambda each: each.at_s, default=None)
