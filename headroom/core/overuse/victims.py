"""Explains which pods were on an overcommitted device, who took the memory, and whose containers
failed meanwhile.

CUDA reports "out of memory" only to the program, which usually exits with code 1. Kubernetes shows
this exit code, but not the cause. The cause is likely if the device was overcommitted when the
container ended.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.contract.timestamps import age
from headroom.core.overuse.tracker import Overcommit
from headroom.core.placement.occupancy import Holder

#: An agent reports memory a few seconds after it was taken, and the clocks of nodes differ. So a
#: container counts as failed on an overcommitted device up to this number of seconds before or
#: after the device was overcommitted.
TOLERANCE_S = 30.0
#: Times from the year 5138 on, and times before 1970, are not believed.
MAX_UNIX_S = 1e11
#: Maximum number of pods named in one sentence.
MOST_NAMED = 2

#: A pod in a sentence for a reader who may not read it.
UNNAMED = "a pod that you may not read"

#: A function that returns whether a reader may see the pod with this namespace and name.
MayRead = Callable[[str, str], bool]


@dataclass(frozen=True, slots=True)
class FailedEnd:
    """The last end of a container, with an exit code other than 0."""

    container: str
    exit_code: int
    reason: str
    #: Unix time in seconds, or None if it is unknown.
    at_s: float | None
    restarts: int

    @property
    def sentence(self) -> str:
        """Describe the end, such as "container main ended with exit code 1 (Error) at ..."."""
        why = f" ({self.reason})" if self.reason else ""
        at = f" at {moment(self.at_s)}" if self.at_s is not None else ""
        again = ""
        if self.restarts:
            times = "once" if self.restarts == 1 else f"{self.restarts:,} times"
            again = f" and was restarted {times}"
        return f"container {self.container} ended with exit code {self.exit_code}{why}{at}{again}"


@dataclass(frozen=True, slots=True)
class Crowding:
    """A device that is or was overcommitted while the pod was on it, or could get it."""

    uid: str
    #: The present state, or the state with the largest excess if the overcommitment has ended.
    over: Overcommit
    #: The state with the largest excess.
    worst: Overcommit
    #: Name of the device, such as "GPU 0", or its UUID if the node no longer reports it.
    gpu: str
    #: Unix times in seconds. The end is None while the device is overcommitted.
    began_s: float
    ended_s: float | None
    #: Whether the device was already overcommitted when this process started.
    at_start: bool
    #: Whether ``over`` is the present state.
    is_present: bool

    def at_worst(self) -> "Crowding":
        """Return the state with the largest excess, as of the past unless it is the present
        state."""
        is_present = self.is_present and self.worst is self.over
        return replace(self, over=self.worst, is_present=is_present)

    def distance_s(self, end: FailedEnd) -> float:
        """Return how many seconds before or after the overcommitment the container ended."""
        if end.at_s is None:
            return 0.0
        after_s = 0.0 if self.ended_s is None else end.at_s - self.ended_s
        return max(0.0, self.began_s - end.at_s, after_s)

    def covers(self, end: FailedEnd) -> bool:
        """Return whether the device was overcommitted when the container ended."""
        if end.at_s is None:
            return self.ended_s is None
        return self.began_s - TOLERANCE_S <= end.at_s and (
            self.ended_s is None or end.at_s <= self.ended_s + TOLERANCE_S
        )

    @property
    def is_own(self) -> bool:
        """Return whether this pod itself uses memory of the device that it did not reserve."""
        return any(each.uid == self.uid for each in self.over.takers)

    def span(self) -> str:
        """Describe by how much and since when, such as "is overcommitted by 6.0 GiB since ..."."""
        excess, began = gib(self.over.excess_bytes, up=True), moment(self.began_s)
        if self.at_start:
            began += " or earlier"
        if self.is_present:
            return f"is overcommitted by {excess} since {began}"
        if self.ended_s is None:
            return f"has been overcommitted by up to {excess} since {began}"
        return f"was overcommitted by up to {excess} from {began} to {moment(self.ended_s)}"

    def causes(self, sees: MayRead, unnamed: str = UNNAMED) -> str:
        """Describe who uses the memory, with ``unnamed`` for pods that the reader may not see."""
        used, many_used = ("uses", "use") if self.is_present else ("used", "used")
        over = self.over
        named, others = over.takers[:MOST_NAMED], over.takers[MOST_NAMED:]
        found = [self._taken(each, used, sees, unnamed) for each in named]
        if more := sum(each in over.overusing for each in others):
            found.append(f"{more} more {used if more == 1 else many_used} more than reserved")
        rest_bytes = over.unreserved_pods_bytes - sum(
            each.measured_bytes or 0 for each in named if each in over.unreserved
        )
        if rest_bytes > 0:
            pods = "other pods" if len(over.unreserved) > len(others) else "pods"
            size = gib(rest_bytes, up=True)
            found.append(f"{pods} without a reservation {many_used} {size}")
        if over.unattributed_bytes:
            size = gib(over.unattributed_bytes, up=True)
            found.append(f"processes of no known pod {many_used} {size}")
        return ", ".join(found) or f"its pods reserve more than its {gib(over.allocatable_bytes)}"

    def sentence(self, sees: MayRead) -> str:
        """Describe the device, by how much, since when, and because of whom."""
        return f"{self.gpu} of node {self.over.node} {self.span()}: {self.causes(sees)}"

    def _taken(self, holder: Holder, used: str, sees: MayRead, unnamed: str) -> str:
        measured_bytes = holder.measured_bytes or 0
        if holder.uid == self.uid:
            who = "this pod"
        elif not holder.name:
            who = f"the pod with uid {holder.uid}"
        elif sees(holder.namespace, holder.name):
            who = f"pod {holder.namespace}/{holder.name}"
        else:
            who = unnamed
        uses = f"{who} {used} {gib(measured_bytes, up=True)}"
        if holder in self.over.unreserved:
            return f"{uses} without a reservation"
        excess = gib(measured_bytes - holder.requested_bytes, up=True)
        return f"{uses}, {excess} more than it reserved"


@dataclass(frozen=True, slots=True)
class Crash:
    """A container that failed while its device was overcommitted."""

    end: FailedEnd
    crowding: Crowding


def failed_ends(pod: Pod) -> list[FailedEnd]:
    """Return the containers whose last end has an exit code other than 0, the latest end first."""
    status = pod.status
    statuses = [*((status and status.init_container_statuses) or ())]
    statuses += (status and status.container_statuses) or ()
    found = [
        FailedEnd(
            each.name, end.exit_code, end.reason, _unix_s(end.finished_at), each.restart_count
        )
        for each in statuses
        if (end := each.last_end) is not None and end.exit_code
    ]
    return sorted(found, key=lambda each: -(each.at_s or 0.0))


def crashes(pod: Pod, found: Sequence[Crowding]) -> Iterator[Crash]:
    """Yield each failed container with a device that was overcommitted when it ended."""
    for end in failed_ends(pod):
        covering = [each for each in found if each.covers(end)]
        if covering:
            nearest = min(covering, key=lambda each: each.distance_s(end))
            yield Crash(end, nearest.at_worst())


def moment(unix_s: float) -> str:
    """Return the time as RFC 3339 with whole seconds."""
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _unix_s(stamp: str | None) -> float | None:
    age_s = age(stamp, 0.0) if stamp else None
    is_usual = age_s is not None and -MAX_UNIX_S < age_s <= 0
    return -age_s if age_s is not None and is_usual else None
