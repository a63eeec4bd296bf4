"""Selects the smallest set of victims on a node that lets a preemptor fit, in kube-scheduler's
order.

    rank(set) = (violations of disruption budgets, highest priority, sum of priorities, number,
                 earliest start of the pods with the highest priority: later is better)

This is how ``pickOneNodeForPreemption`` compares nodes (pkg/scheduler/framework/preemption). The
set with the lowest rank is the *smallest*. Adding a pod never lowers the rank, so the search tries
sets in the order of their rank. The first set that lets the preemptor fit is the best, and it
contains no superfluous victim.

More victims are not always better. The plugin chooses the device with the fewest allocated
replicas, so an eviction can make it choose a device without enough memory. So the node must be
computed without the victims to find out whether the preemptor fits (``helps``). This takes a
fraction of a millisecond, but a node with 50 pods has 2^50 sets. So a cheap check (``may_help``)
first excludes most sets.

On a node with more than ``FEW`` pods the search tries the sets of pods on each single device,
because one of them usually suffices. If no such set helps, the search proceeds like kube-scheduler:
it removes all pods and then reprieves them one by one, starting with the most important pod. If
``Tries`` suffice, the result is the smallest set among all pods of a node with up to ``FEW`` pods,
and on other nodes the smallest set among the pods of one device with up to ``FEW`` pods. In all
other cases it is a set without superfluous victims.
"""

from collections.abc import Callable, Collection, Iterable, Sequence, Set
from dataclasses import dataclass
from heapq import heappop, heappush

from headroom.core.cluster.trackers.pod_selectors import Budget

#: Maximum number of pods for which every set is tried. Ten pods have 1,024 sets.
FEW = 10
#: kube-scheduler adds this number to each priority, so that each additional victim increases the
#: sum.
OFFSET = 1 << 31
#: Start time of pods that have not started, which is later than any other start time.
NOT_STARTED_S = 1 << 62

Rank = tuple[int, int, int, int, int]
#: Rank of the empty set, which is lower than any other rank.
NO_VICTIMS: Rank = (0, -OFFSET - 1, 0, 0, -NOT_STARTED_S)
#: A function that returns whether the preemptor fits, or may fit, without the pods with these uids.
Helps = Callable[[frozenset[str]], bool]


@dataclass(frozen=True, slots=True)
class Evictable:
    """A pod that may be evicted."""

    uid: str
    priority: int
    #: Start as Unix time in whole seconds.
    started_s: int = NOT_STARTED_S


@dataclass(slots=True)
class Tries:
    """The number of calls of ``helps`` that remain for one preemptor, on all nodes together."""

    left: int


def importance(pod: Evictable) -> tuple[int, int, str]:
    """Return a sort key that puts the most important pod first.

    Victims must be listed in this order, because kube-scheduler takes the priority of the first
    victim as the highest.
    """
    return -pod.priority, pod.started_s, pod.uid


def violators(pods: Iterable[Evictable], budgets: Sequence[Budget]) -> list[str]:
    """Return the uids of pods whose eviction violates a budget, most important pods first."""
    still_allowed = [budget.allowed for budget in budgets]
    found: list[str] = []
    for pod in sorted(pods, key=importance):
        violates = False
        for i, budget in enumerate(budgets):
            if pod.uid in budget.uids:
                still_allowed[i] -= 1
                violates = violates or still_allowed[i] < 0
        if violates:
            found.append(pod.uid)
    return found


def rank(pods: Collection[Evictable], budgets: Sequence[Budget] = ()) -> Rank:
    """Return the rank of a set of victims. The set with the lowest rank is the best."""
    if not pods:
        return NO_VICTIMS
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
    may_help: Helps,
    helps: Helps,
    tries: Tries,
    below: Rank | None = None,
    whole: bool = True,
) -> frozenset[str] | None:
    """Return the set of uids with the lowest rank without which the preemptor fits.

    The module's docstring describes how exact the result is. It is empty if the preemptor fits
    without victims, and None if no set helps or if no set that helps has a rank below ``below``.

    ``devices`` contains, for each device, the lowest rank of a set that can help there and the uids
    of the device's pods. It is sorted by rank. If ``whole`` is set, and no set on a single device
    helps on a node with more than ``FEW`` pods, the function also tries sets on several devices,
    which takes at least one try for each pod. ``may_help`` is a cheap check. If it is false for a
    set, no subset of the set helps. ``helps`` is called at most once for each set, and at most as
    often as ``tries`` allows.
    """
    search = _Search(budgets, may_help, helps, tries)
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
        self, budgets: Sequence[Budget], may_help: Helps, helps: Helps, tries: Tries
    ) -> None:
        self._budgets = budgets
        self._may_help = may_help
        self._helps = helps
        self._tries = tries
        #: Results of ``helps``, kept because sets on one device occur again among the sets on the
        #: node.
        self._results: dict[frozenset[str], bool] = {}

    def rank_of(self, uids: Set[str], pods: Iterable[Evictable]) -> Rank:
        return rank([pod for pod in pods if pod.uid in uids], self._budgets)

    def exact(self, pods: Sequence[Evictable], below: Rank | None) -> frozenset[str] | None:
        """Return the first set that helps in the order of rank, skipping sets that cannot help.

        Return None if no set below ``below`` helps, or if no tries remain.
        """
        ordered = sorted(pods, key=lambda pod: (rank([pod], self._budgets), pod.uid))
        rest = [frozenset(pod.uid for pod in ordered[i:]) for i in range(len(ordered) + 1)]
        heap: list[tuple[Rank, tuple[int, ...]]] = [(NO_VICTIMS, ())]
        while heap:
            set_rank, members = heappop(heap)
            if below is not None and set_rank >= below:
                return None
            uids = frozenset(ordered[i].uid for i in members)
            if self._does_help(uids):
                return uids
            if self._tries.left <= 0:
                return None
            for i in range(members[-1] + 1 if members else 0, len(ordered)):
                if not self._may_help(uids | rest[i]):
                    break  # no smaller set can help either
                more = (*members, i)
                heappush(heap, (rank([ordered[j] for j in more], self._budgets), more))
        return None

    def spared(self, pods: Sequence[Evictable], below: Rank | None) -> frozenset[str] | None:
        """Find a set without superfluous victims by removing all pods and reprieving them one by
        one.

        Pods whose eviction violates a budget are reprieved first, then the most important pods.
        Return None if the removal of all pods does not help, or if the rank of the set is not below
        ``below``.
        """
        victims = frozenset(pod.uid for pod in pods)
        if not self._does_help(victims):
            return None
        violating = set(violators(pods, self._budgets))
        ordered = sorted(pods, key=lambda pod: (pod.uid not in violating, importance(pod)))
        any_reprieved = True
        while any_reprieved:  # one reprieve can make the reprieve of an earlier pod possible
            any_reprieved = False
            for pod in ordered:
                if pod.uid in victims and self._does_help(victims - {pod.uid}):
                    victims, any_reprieved = victims - {pod.uid}, True
        if below is not None and self.rank_of(victims, pods) >= below:
            return None
        return victims

    def _does_help(self, uids: frozenset[str]) -> bool:
        """Return whether the set helps. Also return False if it was not tried because no tries
        remain."""
        result = self._results.get(uids)
        if result is None:
            if self._tries.left <= 0 or not self._may_help(uids):
                return False
            self._tries.left -= 1
            result = self._results[uids] = self._helps(uids)
        return result
