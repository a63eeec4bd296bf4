"""What is known of pods that are gone: how they went, and since when.

A pod whose end was seen, or that never sat on the node, needs its promise no longer. Of every
other one it is only known that it is *gone*: deleted by force, or while nobody looked. Its
containers may run on. Then a *mark* is kept: a version of the Lease of the node's agent, read from
the store when the pod was gone already. An agent says with each heartbeat which version of its
Lease it knew before it took the sample that the heartbeat is about. If that is a later one than the
mark, then

    pod gone < mark read < later version written < agent told of it < sample taken

in this order, whatever any clock shows, however late a watch is, and however long a request was on
its way. Such a sample, if it does not show the pod, is the proof that the pod has left.
"""

from collections.abc import Collection
from dataclasses import dataclass

from contract.kube import Pod

#: Of the pods that went last; forgetting one only means that its promise waits for a sample.
REMEMBERED = 10_000
#: Digits of 2**64 - 1.
_LONGEST_VERSION = 20


@dataclass(frozen=True, slots=True)
class Departure:
    """The last that was seen of a pod: where it sat ("" on no node), and whether it had ended."""

    node: str
    ended: bool

    def settles(self, node: str) -> bool:
        """Whether none of its containers can run on this node."""
        return self.ended or self.node != node


class Departures:
    def __init__(self) -> None:
        self._seen: dict[str, Departure] = {}
        #: (node, pod uid) -> version of the agent's Lease.
        self._marks: dict[tuple[str, str], int] = {}

    def note(self, pod: Pod, ended: bool = False, last: bool = True) -> None:
        """A pod went; ``last``: this is its last version. An earlier one does not tell where a pod
        sat that was not bound yet."""
        if not last and not pod.node:
            return
        self._seen[pod.metadata.uid] = Departure(pod.node, ended or pod.ended)
        if len(self._seen) > REMEMBERED:
            del self._seen[next(iter(self._seen))]

    def seen(self, uid: str) -> Departure | None:
        return self._seen.get(uid)

    def mark(self, node: str, uid: str, lease_version: str) -> None:
        """The first mark stays: later ones are only later."""
        number = _number(lease_version)
        if number is not None:
            self._marks.setdefault((node, uid), number)

    def marked(self, node: str, uid: str) -> bool:
        return (node, uid) in self._marks

    def precede(self, node: str, uid: str, after: str) -> bool:
        """Whether a sample was taken when the pod was gone, of an agent that knew this version."""
        mark, number = self._marks.get((node, uid)), _number(after)
        return mark is not None and number is not None and number > mark

    def keep(self, node: str, uids: Collection[str]) -> None:
        """Forget the marks of this node but for these pods."""
        if self._marks:
            for key in [k for k in self._marks if k[0] == node and k[1] not in uids]:
                del self._marks[key]


def _number(version: str) -> int | None:
    """resourceVersions of one object are ordered as numbers; what is no number is not compared, nor
    what an agent made up that is longer than any."""
    short = len(version) <= _LONGEST_VERSION
    return int(version) if short and version.isascii() and version.isdigit() else None
