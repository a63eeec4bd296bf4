"""Binds all pods of a group together, or none of them.

kube-scheduler calls bind for all pods of a group at the same time. If the ledger declined one call,
for example because a program has taken the memory in the meantime, the other pods would be bound
and hold memory although they cannot work. So each bind first reserves its pod's memory, and then
waits. When all binds have reserved memory, all pods are bound. If one bind is declined, all binds
are declined and release their memory, and kube-scheduler tries the group again.

A bind waits only for pods that had a node when the first bind of the group was called, and for at
most half of its timeout. After that, the pods with reservations are bound. The other binds may be
missing because another component has stopped them, because another extender has received their
calls, or because the group is large and the API server is slow. The memory of these pods is held,
so they can be bound later.
"""

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from headroom.bounded_dict import Bounded
from headroom.contract.kube import Pod
from headroom.core.cluster.assumed_binds import AssumedBinds
from headroom.core.groups.membership import Group, group_of

#: Number of seconds between two checks whether the missing bind calls are still expected.
CHECKED_EVERY_S = 0.05
#: Maximum number of recorded pods. A pod is recorded while its group is being bound, or after the
#: group was declined and until it is tried again.
MAX_PODS = 4096
#: Maximum number of recorded groups that were declined.
MAX_GROUPS = 512


@dataclass(slots=True, eq=False)
class _Attempt:
    """The binds of a group that kube-scheduler calls at the same time."""

    group: Group
    #: Pods whose bind has not been called yet.
    expected: set[str]
    #: Pods whose bind was called but whose memory is not reserved yet.
    unreserved: set[str] = field(default_factory=set)
    #: True if the pods may be bound, False if their binds are declined, and None before this is
    #: decided.
    verdict: bool | None = None
    decided: asyncio.Event = field(default_factory=asyncio.Event)

    def decide(self, verdict: bool) -> None:
        if self.verdict is None:
            self.verdict = verdict
            self.decided.set()


class GroupBinds:
    """Coordinates the groups that are being bound. Runs on the event loop of the calls."""

    def __init__(self, assumed: AssumedBinds, monotonic_s: Callable[[], float]) -> None:
        self._assumed = assumed
        self._monotonic_s = monotonic_s
        self._attempts: Bounded[str, _Attempt] = Bounded(MAX_PODS)
        #: The groups whose last attempt was declined.
        self._declined: Bounded[Group, None] = Bounded(MAX_GROUPS)

    def call(self, uid: str, pod: Pod | None) -> bool:
        """Record that bind is called for the pod. Return False if its group is already declined."""
        now_s = self._monotonic_s()
        attempt = self._attempts.get(uid)
        group = group_of(pod) if pod is not None else None
        if attempt is None and group is not None:
            members = self._assumed.members(group, now_s) | {uid}
            attempt = _Attempt(group, set(filter(self._is_free, members)))
            for member in attempt.expected:
                self._attempts[member] = attempt
        self._assumed.call_bind(uid, now_s)
        if attempt is None:
            return True
        if attempt.verdict is False:
            self._attempts.pop(uid, None)
            return False
        attempt.expected.discard(uid)
        attempt.unreserved.add(uid)
        return True

    def _is_free(self, uid: str) -> bool:
        """Return whether no other bind waits for the bind of this pod."""
        attempt = self._attempts.get(uid)
        return attempt is None or attempt.verdict is not None

    async def may_bind(self, uid: str, until_s: float) -> bool:
        """Wait for the group of a pod whose memory is reserved, at most until ``until_s``.

        Return whether to bind the pod.
        """
        attempt = self._attempts.get(uid)
        if attempt is None:
            return True
        attempt.unreserved.discard(uid)
        while attempt.verdict is None:
            self._check(attempt, until_s)
            with suppress(TimeoutError):
                await asyncio.wait_for(attempt.decided.wait(), CHECKED_EVERY_S)
        return attempt.verdict

    def _check(self, attempt: _Attempt, until_s: float) -> None:
        now_s = self._monotonic_s()
        if now_s > until_s:
            attempt.decide(True)
        expected = (self._assumed.may_follow(uid, now_s) for uid in attempt.expected)
        if not attempt.unreserved and not any(expected):
            attempt.decide(True)

    def end(self, uid: str, bound: bool) -> None:
        """Record that the bind has been answered."""
        attempt = self._attempts.pop(uid, None)
        if attempt is None:
            return
        attempt.unreserved.discard(uid)
        if bound:
            self._declined.pop(attempt.group, None)
        elif attempt.verdict is None:
            attempt.decide(False)
            self._declined[attempt.group] = None
            self._assumed.end_group(attempt.group)

    def withdraw(self, uid: str) -> None:
        """Record that filter is called for the pod again, so its last attempt leads to no bind."""
        if (attempt := self._attempts.pop(uid, None)) is not None:
            attempt.expected.discard(uid)

    def was_declined(self, pod: Pod) -> bool:
        """Return whether the last attempt to bind the pod's group was declined."""
        return (group := group_of(pod)) is not None and group in self._declined
