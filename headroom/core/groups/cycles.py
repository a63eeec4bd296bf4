"""Decides until when memory is held for the pods of a group.

kube-scheduler calls filter for each pod of a group in one cycle, and binds the pods after the
cycle. With the Coscheduling plugin or in Kubernetes 1.35, it tries other pods in between, and binds
the group when its last pod has a node. So the memory that was chosen for the first pod is held
until the last pod is bound, and the holds of a group end together:

* ``FOLLOWS_WITHIN_S`` seconds after the last call for a pod of the group. The length of the cycle
  does not matter, because each call restarts this period.
* ``ENDS_WITHIN_S`` seconds after the last call if no bind has followed and the cycle may have
  failed. It may have failed if filter rejected a pod of the group, because the scheduler then gives
  up the group unless enough other pods have a node. The cycle of a group of kube-scheduler itself
  may also have failed if filter is called for a pod outside the group. kube-scheduler tries no
  other pod during the cycle, so one of its own filters may have rejected a pod. If the cycle has
  succeeded, binds follow immediately.
* Immediately if the scheduler begins again with the group. This is the case if filter is called
  again for a pod that has a node, or for any pod in a group of kube-scheduler itself. Nodes that
  were chosen since then are kept.

After ``FOLLOWS_WITHIN_S`` seconds the pods that have a node can still be bound, because the
Coscheduling plugin and kube-scheduler 1.35 let them wait for minutes. But memory is no longer held
for them.
"""

import math
from dataclasses import dataclass, field

from headroom.bounded_dict import Bounded
from headroom.core.groups.membership import Group, GroupKind

#: The next call for a group follows within this number of seconds. It is longer than the time
#: between two pods that a controller creates, or between two binds. If it were even longer, groups
#: that are never complete would keep memory from other pods.
FOLLOWS_WITHIN_S = 5.0
#: This number of seconds is longer than kube-scheduler takes from the last filter call of a cycle
#: to the first bind call.
ENDS_WITHIN_S = 0.25
#: This number of seconds is longer than the maximum time for which a pod waits for its group.
BINDS_WITHIN_S = 900.0
#: Maximum number of groups. If there are more, no memory is held for the oldest groups.
MAX_GROUPS = 512


@dataclass(slots=True)
class _Cycle:
    #: Time of the last call for a pod of the group.
    last_s: float
    #: Whether filter has rejected a pod since the last bind.
    rejected: bool = False
    #: Whether the scheduler has tried another pod since the last call.
    is_over: bool = False
    #: Number of attempts to schedule the group before this one.
    attempt: int = 0
    #: Uids of the pods for which filter was called.
    asked: set[str] = field(default_factory=set)

    @property
    def until_s(self) -> float:
        may_have_failed = self.rejected or self.is_over
        return self.last_s + (ENDS_WITHIN_S if may_have_failed else FOLLOWS_WITHIN_S)


class GroupCycles:
    """The cycle of each group. All times are on the monotonic clock."""

    def __init__(self) -> None:
        self._cycles: Bounded[Group, _Cycle] = Bounded(MAX_GROUPS)
        #: The group of the last pod for which filter was called.
        self._asked: Group | None = None

    def ask(self, group: Group | None, uid: str, chosen_in: int | None, now_s: float) -> int | None:
        """Record that filter is called for a pod of the group, or of no group if ``group`` is None.

        ``chosen_in`` is the attempt in which filter named a node for the pod, or None if it named
        none. If this call begins a new attempt, return the last attempt that is over, otherwise
        None.
        """
        if self._asked is not None and self._asked != group:
            self._try_another(self._asked)
        self._asked = group
        if group is None:
            return None
        over, cycle = chosen_in, self._cycles.get(group) or _Cycle(now_s)
        if over is None and group.kind is GroupKind.KUBERNETES and uid in cycle.asked:
            over = cycle.attempt
        if over is not None:
            cycle = _Cycle(now_s, attempt=cycle.attempt + 1)
        cycle.last_s, cycle.is_over = now_s, False
        cycle.asked.add(uid)
        self._cycles[group] = cycle
        return over

    def _try_another(self, last: Group) -> None:
        """Record that the scheduler tries a pod outside of the last group."""
        cycle = self._cycles.get(last)
        if cycle is not None and last.kind is GroupKind.KUBERNETES:
            cycle.is_over = True

    def choose(self, group: Group, now_s: float) -> int:
        """Record that a node was chosen for a pod of the group. Return the number of the
        attempt."""
        return self._move(group, now_s).attempt

    def reject(self, group: Group, now_s: float) -> None:
        """Record that filter has rejected a pod of the group.

        The Coscheduling plugin then gives up the group, and may begin the next attempt with pods
        that had no node in this one.
        """
        cycle = self._move(group, now_s)
        cycle.rejected = True
        if group.kind is not GroupKind.KUBERNETES:
            cycle.attempt += 1

    def bind(self, group: Group, now_s: float) -> None:
        """Record that bind is called for a pod of the group, so binds of its other pods will
        follow."""
        self._move(group, now_s).rejected = False

    def _move(self, group: Group, now_s: float) -> _Cycle:
        cycle = self._cycles.get(group) or _Cycle(now_s)
        cycle.last_s, cycle.is_over = now_s, False
        self._cycles[group] = cycle
        return cycle

    def until_s(self, group: Group) -> float:
        """Return when the holds of the group end."""
        cycle = self._cycles.get(group)
        return cycle.until_s if cycle else -math.inf

    def binds_until_s(self, group: Group) -> float:
        """Return until when a bind may follow, even if memory is no longer held for it."""
        cycle = self._cycles.get(group)
        return cycle.last_s + BINDS_WITHIN_S if cycle else -math.inf

    def has_lapsed(self, group: Group, now_s: float) -> bool:
        """Return whether the group has lost its held memory, even if its cycle continues."""
        cycle = self._cycles.get(group)
        return cycle is not None and cycle.last_s + FOLLOWS_WITHIN_S < now_s
