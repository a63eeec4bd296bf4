"""Who has to leave a node so that a newcomer fits: the smallest set, by kube-scheduler's own order.

    rank(set) = (violations of disruption budgets, highest priority, sum of priorities, number,
                 latest start of those with the highest priority)

as ``pickOneNodeForPreemption`` compares nodes (pkg/scheduler/framework/preemption); the lowest
rank is the smallest set. Adding a pod never lowers it, so sets tried in the order of their rank
need only be tried until one helps: the first is the best, and nobody in it could stay.

More victims are not always better. The plugin takes the device with the fewest replicas taken, so
who leaves a device pulls the newcomer to it, memory or not; only weighing the node without them
tells, and that is what ``helps`` does. It costs a fraction of a millisecond, and a node with 50
pods has 2^50 sets. So what is cheap to know goes first (``promising``), and of a node with many
pods the sets on one device are tried, of which one is mostly enough; where it is not,
kube-scheduler's own way is gone: all leave, and one after the other may stay, the most important
first. With up to ``FEW`` pods the answer is exact. With more it is exact among sets on one device
with up to ``FEW`` pods, and else one of which nobody could stay.
"""

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush

#: Pods of which every set is tried: 1,024 of them.
FEW = 10
#: What kube-scheduler adds to each priority, so that more victims are never better.
OFFSET = 1 << 31
#: Who has not started yet starts later than everybody.
NOT_STARTED_S = 1 << 62

Rank = tuple[int, int, int, int, int]
#: Of nobody who has not to leave anyway.
NOBODY: Rank = (0, -OFFSET - 1, 0, 0, -NOT_STARTED_S)
Helps = Callable[[frozenset[str]], bool]


@dataclass(frozen=True, slots=True)
class Evictable:
    """A pod that may be made to leave."""

    uid: str
    priority: int
    #: Unix time, whole seconds.
    started_s: int = NOT_STARTED_S


@dataclass(frozen=True, slots=True)
class Budget:
    """A disruption budget: how many of its pods may still be disrupted."""

    allowed: int
    uids: frozenset[str]


@dataclass(slots=True)
class Tries:
    """How often nodes may still be weighed for one newcomer, on all nodes together."""

    left: int


def importance(pod: Evictable) -> tuple[int, int, str]:
    """The most important first, as kube-scheduler lists victims; it reads the first one's priority
    as the highest."""
    return -pod.priority, pod.started_s, pod.uid


def violators(pods: Iterable[Evictable], budgets: Sequence[Budget]) -> list[str]:
    """Uids of those whose eviction violates a budget, when the most important leave first."""
    left = [budget.allowed for budget in budgets]
    found: list[str] = []
    for pod in sorted(pods, key=importance):
        violates = False
        for i, budget in enumerate(budgets):
            if pod.uid in budget.uids:
                left[i] -= 1
                violates = violates or left[i] < 0
        if violates:
            found.append(pod.uid)
    return found


def rank(pods: Collection[Evictable], budgets: Sequence[Budget] = ()) -> Rank:
    """The lower, the rather they are to leave."""
    if not pods:
        return NOBODY
    highest = max(pod.priority for pod in pods)
    return (
        len(violators(pods, budgets)) if budgets else 0,
        highest,
        sum(pod.priority + OFFSET for pod in pods),
        len(pods),
        -min(pod.started_s for pod in pods if pod.priority == highest),
    )


def smallest(
    pods: Sequence[Evictable],
    budgets: Sequence[Budget],
    devices: Sequence[tuple[Rank, Set[str]]],
    reserving: Helps,
    helps: Helps,
    tries: Tries,
    below: Rank | None = None,
    whole: bool = True,
) -> frozenset[str] | None:
    """The set of the lowest rank that helps; empty where nobody has to leave, None where no set
    helps, or none that ranks lower than ``below``.

    ``devices``: of each of them a rank below which no set makes room there, and uids; those in
    order. ``whole``: of many pods sets on several devices are tried, too, where no set on one
    helps, which takes a try for each pod. ``promising`` is cheap, and true of a set whenever it is
    true of a part of it; where it is false nothing helps. ``helps`` is asked at most as often as
    ``tries`` allows, once for each set.
    """
    search = _Search(budgets, reserving, helps, tries)
    if len(pods) <= FEW:
        return search.exact(pods, below)
    best: frozenset[str] | None = None
    for floor, on in devices:
        if below is not None and floor >= below:
            continue
        there = [pod for pod in pods if pod.uid in on]
        found = search.exact(there, below) if len(there) <= FEW else search.spared(there, below)
        if found is not None:
            best, below = found, search.rank_of(found, pods)
    return best if best is not None or not whole else search.spared(pods, below)


class _Search:
    def __init__(
        self, budgets: Sequence[Budget], reserving: Helps, helps: Helps, tries: Tries
    ) -> None:
        self._budgets = budgets
        self._reserving = reserving
        self._helps = helps
        self._tries = tries
        #: What is known already, as sets on one device are sets on the node.
        self._known: dict[frozenset[str], bool] = {}

    def rank_of(self, uids: Set[str], pods: Iterable[Evictable]) -> Rank:
        return rank([pod for pod in pods if pod.uid in uids], self._budgets)

    def exact(self, pods: Sequence[Evictable], below: Rank | None) -> frozenset[str] | None:
        """Every set in the order of its rank, but for those that cannot help."""
        ordered = sorted(pods, key=lambda pod: (rank([pod], self._budgets), pod.uid))
        rest = [frozenset(pod.uid for pod in ordered[i:]) for i in range(len(ordered) + 1)]
        heap: list[tuple[Rank, tuple[int, ...]]] = [(NOBODY, ())]
        while heap:
            its_rank, members = heappop(heap)
            if below is not None and its_rank >= below:
                return None
            uids = frozenset(ordered[i].uid for i in members)
            if self._does(uids):
                return uids
            if self._tries.left <= 0:
                return None
            for i in range(members[-1] + 1 if members else 0, len(ordered)):
                if not self._reserving(uids | rest[i]):
                    break  # nor with fewer of them
                more = (*members, i)
                heappush(heap, (rank([ordered[j] for j in more], self._budgets), more))
        return None

    def spared(self, pods: Sequence[Evictable], below: Rank | None) -> frozenset[str] | None:
        """All leave but those that may stay: first who violates a budget, then by importance."""
        leaving = frozenset(pod.uid for pod in pods)
        if not self._does(leaving):
            return None
        guarded = set(violators(pods, self._budgets))
        turns = sorted(pods, key=lambda pod: (pod.uid not in guarded, importance(pod)))
        spared = True
        while spared:  # who could not stay beside one can perhaps without the other
            spared = False
            for pod in turns:
                if pod.uid in leaving and self._does(leaving - {pod.uid}):
                    leaving, spared = leaving - {pod.uid}, True
        if below is not None and self.rank_of(leaving, pods) >= below:
            return None
        return leaving

    def _does(self, uids: frozenset[str]) -> bool:
        known = self._known.get(uids)
        if known is None:
            if self._tries.left <= 0 or not self._reserving(uids):
                return False
            self._tries.left -= 1
            known = self._known[uids] = self._helps(uids)
        return known
