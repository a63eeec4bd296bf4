"""Tracks the memory of nodes that is held for pods that are not bound yet.

After kube-scheduler has chosen a node for a pod, and before the pod is bound, another pod could
take the memory. So the memory is held for one of three reasons:

* ``NOMINATED``: other pods have left the node for this pod, or are leaving it. Pods with a higher
  priority may still take the memory.
* ``ASSUMED``: filter or prioritize named the node, and kube-scheduler is about to call bind. If
  filter offered this memory to the next pod too, one of the binds would be declined, and its pod
  would back off for seconds.
* ``BINDING``: the bind call is being served, and the reservation is not written yet.

A reservation that is being written counts in the weighed nodes, because it will be in the ledger in
a moment. Memory that is held for the other two reasons is looked up for each decision, because the
order of precedence depends on the pod. A hold ends when the pod is bound, deleted or assigned to
another node, and at the latest when its time is over.

Holds are kept in the memory of one extender. If the holds of several extenders differ, the ledger
decides which bind succeeds.
"""

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import StrEnum

import msgspec

from headroom.contract.gpunode import GPUNode, Reservation
from headroom.contract.kube import Pod
from headroom.core.cluster.assumed_binds import AssumedBinds
from headroom.core.cluster.object_cache import NOTHING, ObjectCache
from headroom.core.cluster.trackers.heartbeats import Heartbeats
from headroom.core.cluster.trackers.nominations import Nominations, yields
from headroom.core.tracker import LastSeen, Tracker


class Why(StrEnum):
    NOMINATED = "nominated"
    ASSUMED = "assumed"
    BINDING = "binding"


class HeldFor(msgspec.Struct, frozen=True):
    """A hold as extenders send it to consoles.

    ``reservation`` is the expected reservation, or None for a nominee. ``holds`` is false for a
    nominee whose hold is over, but which still takes precedence over younger nominees of the node.
    ``until_s`` is the latest Unix time at which the hold ends, in seconds, or 0 if it is unknown.
    """

    uid: str
    node: str
    why: Why
    reservation: Reservation | None = None
    holds: bool = True
    until_s: float = 0


@dataclass(frozen=True, slots=True)
class Hold:
    """A pod that takes precedence over another pod on a node."""

    pod: Pod
    #: The kind of the pod's request if its bind is assumed, or None for a nominee.
    kind: object | None = None
    #: Latest Unix time at which the hold ends, or None if it is unknown.
    until_s: float | None = None

    @property
    def until_text(self) -> str:
        """A phrase that states when the hold ends, to be appended to the name of the pod."""
        if self.until_s is None:
            return "until it is bound"
        at = datetime.fromtimestamp(self.until_s, UTC)
        return f"until it is bound, at the latest until {at:%Y-%m-%dT%H:%M:%SZ}"


class Holds(Tracker):
    """All held memory. Only the thread that owns the cluster's state changes it. Any thread may
    read it.

    ``reserve`` returns the reservation to expect for a pod on a node. ``heartbeats`` has the Unix
    time at which the monotonic clock was 0.
    """

    def __init__(
        self,
        assumed: AssumedBinds,
        nominations: Nominations,
        objects: ObjectCache,
        reserve: Callable[[Pod, GPUNode], Reservation | None],
        heartbeats: Heartbeats,
    ) -> None:
        self._assumed = assumed
        self._nominations = nominations
        self._objects = objects
        self._reserve = reserve
        self._heartbeats = heartbeats
        #: The reservations that binds are about to write, by node and pod uid.
        self._binding: dict[str, dict[str, Reservation]] = {}
        #: The nominees of the extenders that this process follows, by uid, or None if it decides
        #: itself or follows no extender.
        self._followed: Mapping[str, HeldFor] | None = None

    # Changes.

    def pod_seen(self, pod: Pod, managed: bool) -> None:
        if pod.node or pod.ended:
            self._assumed.forget(pod.metadata.uid)

    def pod_gone(self, uid: str, last: LastSeen | None) -> None:
        self._assumed.forget(uid)

    def begin(self, uid: str, node: str, reservation: Reservation) -> None:
        """Record that a bind is about to write this reservation."""
        self._binding[node] = {**self.binding_to(node), uid: reservation}

    def end(self, uid: str, node: str) -> None:
        """Record that the bind has ended, with any outcome."""
        left = {of: each for of, each in self.binding_to(node).items() if of != uid}
        if left:
            self._binding[node] = left
        else:
            self._binding.pop(node, None)

    def follow(self, holds: Iterable[HeldFor] | None) -> Collection[str]:
        """Replace all holds with the holds of extenders, and return the nodes to weigh again.

        ``holds`` is None if no extender has sent its holds. In this case, the nominations of the
        pods that this process has seen are used.
        """
        before, after = self._binding, dict[str, dict[str, Reservation]]()
        followed: dict[str, HeldFor] = {}
        for each in holds or ():
            if each.reservation is not None:
                after.setdefault(each.node, {})[each.uid] = each.reservation
            elif each.holds or each.uid not in followed:
                followed[each.uid] = each
        self._binding, self._followed = after, None if holds is None else followed
        return [
            name for name in before.keys() | after.keys() if before.get(name) != after.get(name)
        ]

    # Readers.

    def binding_to(self, node: str) -> Mapping[str, Reservation]:
        """Return the reservations that binds are about to write for the node, by pod uid."""
        return self._binding.get(node, NOTHING)

    def all_binding(self) -> Mapping[str, Mapping[str, Reservation]]:
        """Return the result of ``binding_to`` for all nodes, by node name."""
        return dict(self._binding)

    def node_of(self, uid: str) -> str:
        """Return the node for which the pod was nominated last, or an empty string if there was
        none."""
        if self._followed is None:
            return self._nominations.node_of(uid)
        held = self._followed.get(uid)
        return held.node if held else ""

    def nominees(self, now_s: float) -> Mapping[str, Sequence[Pod]]:
        """Return the pods for which each node is held because other pods have left it."""
        found: dict[str, list[Pod]] = {}
        for pod, node in self._nominees(now_s):
            found.setdefault(node, []).append(pod)
        return found

    def nominees_before(self, pod: Pod, now_s: float) -> dict[str, list[Pod]]:
        """Return the nominees of each node that take precedence over the pod."""
        own = self.node_of(pod.metadata.uid)
        return {
            node: others
            for node, nominees in self.nominees(now_s).items()
            if (others := [other for other in nominees if yields(pod, other, own == node)])
        }

    def against(self, pod: Pod | None, now_s: float) -> Mapping[str, Sequence[Hold]]:
        """Return the pods that take precedence over the pod on each node, or all pods with holds if
        ``pod`` is None.

        Reservations that are being written are omitted, because the weighed nodes count them.
        ``now_s`` is the time of this process's monotonic clock.
        """
        found: dict[str, list[Hold]] = {}
        own, epoch_s = pod.metadata.uid if pod is not None else "", self._heartbeats.epoch_s
        for uid, each, until_s in self._assumed.current(now_s):
            if uid != own:
                held = Hold(each.pod, each.kind, epoch_s + until_s)
                found.setdefault(each.node, []).append(held)
        nominees = self.nominees(now_s) if pod is None else self.nominees_before(pod, now_s)
        for node, pods in nominees.items():
            holds = found.setdefault(node, [])
            known = {hold.pod.metadata.uid for hold in holds}
            holds += [
                Hold(nominee, None, self._until_s(uid))
                for nominee in pods
                if (uid := nominee.metadata.uid) not in known
            ]
        return found

    def all(self, now_s: float) -> Iterator[HeldFor]:
        """Yield all holds in the order that ``follow`` needs. Changes no state.

        Holds with a reservation come first, then nominees, and last the nominees whose hold is
        over.
        """
        known = set[tuple[str, str]]()
        for node, binding in self.all_binding().items():
            for uid, reservation in binding.items():
                known.add((uid, node))
                yield HeldFor(uid, node, Why.BINDING, reservation)
        for uid, each, _ in self._assumed.current(now_s):
            gpunode = self._objects.gpunodes.get(each.node)
            if (uid, each.node) in known or gpunode is None:
                continue
            if (expected := self._reserve(each.pod, gpunode)) is not None:
                yield HeldFor(uid, each.node, Why.ASSUMED, expected)
        if self._followed is not None:
            yield from self._followed.values()
            return
        over, epoch_s = list[HeldFor](), self._heartbeats.epoch_s
        for uid, node, holds, until_s in self._nominations.places(now_s):
            if holds:
                at_s = 0 if until_s is None else math.ceil(epoch_s + until_s)
                yield HeldFor(uid, node, Why.NOMINATED, until_s=at_s)
            else:
                over.append(HeldFor(uid, node, Why.NOMINATED, holds=False))
        yield from over

    def _nominees(self, now_s: float) -> Iterable[tuple[Pod, str]]:
        if self._followed is None:
            return self._nominations.current(now_s)
        unbound, followed = self._objects.unbound, self._followed.values()
        held = ((unbound.get(each.uid), each.node) for each in followed if each.holds)
        return ((pod, node) for pod, node in held if pod is not None)

    def _until_s(self, uid: str) -> float | None:
        """Return the latest Unix time at which the hold for a nominee ends."""
        if self._followed is not None:
            held = self._followed.get(uid)
            return (held.until_s or None) if held else None
        until_s = self._nominations.until_s(uid)
        return None if until_s is None else self._heartbeats.epoch_s + until_s
