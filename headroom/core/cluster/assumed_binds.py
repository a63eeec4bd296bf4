"""Tracks the bind calls that kube-scheduler is about to make, because an earlier call chose a node.

Only kube-scheduler's calls add assumed binds and the demand of pods, so only the scheduler's verbs
get ``Calls``. All other code reads ``cluster.holds`` and ``cluster.usual``.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from headroom.contract.kube import Pod
from headroom.core.cluster.trackers.nominations import Nominations
from headroom.core.groups.cycles import GroupCycles
from headroom.core.groups.membership import Group, group_of
from headroom.core.placement.demand_pricing import DemandTracker
from headroom.core.placement.request import VramRequest
from headroom.core.placement.visible_devices import Visible

#: Seconds after which the bind of a single pod is no longer expected.
BIND_FOLLOWS_WITHIN_S = 0.25


@dataclass(frozen=True, slots=True)
class Assumed:
    """A pod for which a call has chosen a node."""

    pod: Pod
    #: The kind of the pod's request, or None if the kind does not determine the device.
    kind: object | None
    node: str
    #: When the hold ends. For a pod of a group, ``groups.cycles`` decides when.
    until_s: float
    group: Group | None
    #: The attempt to schedule the group in which the node was chosen.
    attempt: int = 0
    #: Whether the hold is over although the pod may still be bound.
    lapsed: bool = False


class AssumedBinds:
    """The pods with a chosen node. Only the thread that owns the cluster's state changes it. Any
    thread may read it.

    Each pod was fitted beside the pods before it, so their number is limited by the number of pods
    that fit.
    """

    def __init__(self, nominations: Nominations) -> None:
        self._nominations = nominations
        #: Assumed binds by uid, in the order in which they were assumed.
        self._assumed: dict[str, Assumed] = {}
        self._cycles = GroupCycles()

    def ask(self, pod: Pod, now_s: float) -> None:
        """Record that filter was called for the pod, so no bind has followed the last call.

        If the pod already had a node, kube-scheduler has started again with the whole group of the
        pod.
        """
        uid, group = pod.metadata.uid, group_of(pod)
        held = self._assumed.pop(uid, None)
        if group is not None and self._cycles.has_lapsed(group, now_s):
            for member, each in list(self._assumed.items()):
                if each.group == group:
                    self._assumed[member] = replace(each, lapsed=True)
        over = self._cycles.ask(group, uid, held.attempt if held else None, now_s)
        if group is not None and over is not None:
            self.end_group(group, over)

    def assume(self, pod: Pod, request: VramRequest, node: str, now_s: float) -> None:
        """Hold memory for a pod that kube-scheduler is about to bind to the node.

        kube-scheduler does not call bind if it cannot schedule the pod after all, or if a user's
        preference for another node outweighs the extender's score.
        """
        # If the pod's own variable decides its device, its kind does not determine the device.
        kind = request.kind if request.visible is Visible.BY_PLUGIN else None
        for uid, each in list(self._assumed.items()):
            if each.kind == kind:
                kind = each.kind  # use one object for all equal kinds
            if self._follows_until_s(each) < now_s or uid == request.uid:
                self._assumed.pop(uid, None)
        until_s, group = now_s + BIND_FOLLOWS_WITHIN_S, group_of(pod)
        attempt = self._cycles.choose(group, now_s) if group is not None else 0
        self._assumed[request.uid] = Assumed(pod, kind, node, until_s, group, attempt)

    def reject(self, pod: Pod, now_s: float) -> None:
        """Record that filter has rejected the pod, so kube-scheduler may give up its group."""
        if (group := group_of(pod)) is not None:
            self._cycles.reject(group, now_s)

    def nominate(self, pod: Pod, node: str, now_s: float) -> None:
        """Hold the node for a pod that kube-scheduler is about to nominate after Headroom's answer
        to preempt."""
        self._nominations.expect(pod, node, now_s)

    def call_bind(self, uid: str, now_s: float) -> None:
        """Record that kube-scheduler has called bind for the pod, so its bind is no longer assumed.

        The binds of the other pods of its group follow.
        """
        held = self._assumed.pop(uid, None)
        if held is not None and held.group is not None:
            self._cycles.bind(held.group, now_s)

    def forget(self, uid: str) -> None:
        """Stop assuming a bind of the pod."""
        self._assumed.pop(uid, None)

    def end_group(self, group: Group, attempt: float = math.inf) -> None:
        """End the holds of the group's pods, except for pods that preempt others.

        Holds that were made after this attempt stay.
        """
        for uid, each in list(self._assumed.items()):
            if each.group == group and each.attempt <= attempt:
                self.forget(uid)
                self._nominations.give_up(uid)

    def members(self, group: Group, now_s: float) -> set[str]:
        """Return the uids of the group's pods that have a node and whose bind may follow."""
        return {
            uid
            for uid, each in list(self._assumed.items())
            if each.group == group and self._follows_until_s(each) >= now_s
        }

    def may_follow(self, uid: str, now_s: float) -> bool:
        """Return whether the pod has a node and its bind may follow."""
        held = self._assumed.get(uid)
        return held is not None and self._follows_until_s(held) >= now_s

    def current(self, now_s: float) -> Iterator[tuple[str, Assumed, float]]:
        """Yield (uid, assumed bind, monotonic time at which its hold ends) of all holds."""
        for uid, each in list(self._assumed.items()):
            if (until_s := self._ends_s(each)) >= now_s:
                yield uid, each, until_s

    def _ends_s(self, held: Assumed) -> float:
        if held.lapsed:
            return -math.inf
        return held.until_s if held.group is None else self._cycles.until_s(held.group)

    def _follows_until_s(self, held: Assumed) -> float:
        return held.until_s if held.group is None else self._cycles.binds_until_s(held.group)


@dataclass(frozen=True, slots=True)
class Calls:
    """The state that calls of kube-scheduler change."""

    assumed: AssumedBinds
    demand: DemandTracker
