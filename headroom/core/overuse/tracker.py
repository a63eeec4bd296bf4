"""Tracks overcommitted devices, and pods that use more memory than they requested.

Headroom's own reservations never overcommit a device. But a device can become overcommitted because
of an unreserved pod, or an unattributed process that grows, or because it reports less memory than
before. Headroom charges the actual use, and this module reports the device until it is no longer
overcommitted.

Measured use is charged immediately. Overuse is reported only after it has lasted for a while,
because many pods use more memory during their start than later.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from headroom.contract.gpunode import ADOPTED, GPUNode, GPUNodeStatus, OveruseEviction
from headroom.contract.kube import Pod
from headroom.core.placement.device_accounting import DeviceTerms, first_of_each_memory
from headroom.core.placement.occupancy import Holder
from headroom.core.placement.unreserved_pods import unreserved_pods
from headroom.core.tracker import Tracker, WeighedNode

#: Seconds for which a pod is skipped after its eviction was rejected.
REJECTED_FOR_S = 30.0
#: Seconds for which the end of an overcommitment is remembered, and the maximum number of ends.
ENDED_FOR_S, MAX_ENDED = 3600.0, 1000
#: Maximum number of pods that a span names. Above it, the span forgets the pods that have left.
MAX_SPAN_PODS = 1000
#: A device that becomes overcommitted again within this number of seconds, by the same pods or
#: processes, was overcommitted all the time. A pod that crashes and starts again frees memory for a
#: moment.
MERGED_WITHIN_S = 60.0
#: Maximum number of earlier spans of a device that are remembered.
MAX_EARLIER_SPANS = 3


@dataclass(frozen=True, slots=True)
class Overuse:
    """The overuse of one pod on one device of one node."""

    node: str
    device: str
    uid: str
    namespace: str
    name: str
    requested_bytes: int
    measured_bytes: int

    @property
    def excess_bytes(self) -> int:
        return self.measured_bytes - self.requested_bytes

    @property
    def key(self) -> tuple[str, str]:
        return self.uid, self.device


class Overuses(Tracker):
    """The overuse of pods. The thread that owns the cluster state writes, and any thread may read
    ``lasting``."""

    def __init__(self, lasting_s: float) -> None:
        #: Minimum duration of overuse that is reported, in seconds.
        self._lasting_s = lasting_s
        self._of_node: dict[str, tuple[Overuse, ...]] = {}
        #: Nodes with a device that is overcommitted by a pod that was bound without Headroom. Such
        #: a pod may use less than its charge, but still more than other pods leave free.
        self._overcommitted: set[str] = set()
        #: Nodes on which a pod is to be evicted because of its overuse.
        self._decided: set[str] = set()
        #: When the eviction of each pod was rejected according to the ledger (RFC 3339), and when
        #: this process first saw the rejection on the monotonic clock, by node and uid. The clocks
        #: of replicas are not compared.
        self._rejected: dict[str, dict[str, tuple[str, float]]] = {}
        #: When ``update`` first found the overuse of each (pod, device), on the monotonic clock.
        self._since_s: dict[tuple[str, str], float] = {}
        #: Overuse that has lasted for at least ``lasting_s``. The tuple is replaced and never
        #: changed in place.
        self.lasting: tuple[Overuse, ...] = ()

    def node_weighed(self, node: WeighedNode) -> None:
        if found := tuple(_overuses(node.name, node.written_devices)):
            self._of_node[node.name] = found
        else:
            self._of_node.pop(node.name, None)
        reservations = node.gpunode.spec.reservations.values() if node.gpunode else ()
        _keep(self._decided, node.name, any(each.overuse for each in reservations))
        _keep(
            self._overcommitted,
            node.name,
            any(ADOPTED in each.flags for each in reservations)
            and any_overcommitted(node.written_devices),
        )

    def gpunode_seen(self, gpunode: GPUNode, at_s: float) -> None:
        before = self._rejected.pop(gpunode.name, {})
        found: dict[str, tuple[str, float]] = {}
        for uid, reservation in gpunode.spec.reservations.items():
            if reservation.overuse and (stamp := reservation.overuse.rejected_at):
                seen = before.get(uid)
                found[uid] = seen if seen and seen[0] == stamp else (stamp, at_s)
        if found:
            self._rejected[gpunode.name] = found

    def gpunode_gone(self, name: str) -> None:
        self._rejected.pop(name, None)

    def rejected_lately(self, node: str, uid: str, decision: OveruseEviction, now_s: float) -> bool:
        """Return whether the eviction of the pod was rejected in the last ``REJECTED_FOR_S``
        seconds.

        ``decision`` comes from the ledger, so that all replicas skip the pod. ``now_s`` is the time
        of the monotonic clock. A rejection that the watch has not shown yet counts as if it
        happened just now.
        """
        if not decision.rejected_at:
            return False
        stamp, at_s = self._rejected.get(node, {}).get(uid, ("", now_s))
        return stamp != decision.rejected_at or now_s - at_s < REJECTED_FOR_S

    def nodes(self) -> tuple[list[str], list[str]]:
        """Return the nodes with a pod to evict because of overuse, and the other nodes with
        possible overuse.

        Both lists are sorted by name.
        """
        others = (self._of_node.keys() | self._overcommitted) - self._decided
        return sorted(self._decided), sorted(others)

    def now(self) -> list[Overuse]:
        """Return all overuse, however short."""
        return [each for of_node in list(self._of_node.values()) for each in of_node]

    def since_s(self, overuse: Overuse) -> float | None:
        """Return when the overuse was first found, on the monotonic clock, or None if it has
        ended."""
        return self._since_s.get(overuse.key)

    def update(self, now_s: float) -> None:
        """Update ``lasting``. ``now_s`` is the time of the monotonic clock."""
        found = self.now()
        self._since_s = {each.key: self._since_s.get(each.key, now_s) for each in found}
        self.lasting = tuple(
            each for each in found if now_s - self._since_s[each.key] >= self._lasting_s
        )


def _keep(names: set[str], name: str, is_in: bool) -> None:
    if is_in:
        names.add(name)
    else:
        names.discard(name)


def _overuses(node: str, terms: Sequence[DeviceTerms]) -> Iterator[Overuse]:
    for term in first_of_each_memory(terms):
        for holder in term.holders:
            measured_bytes = holder.measured_bytes or 0
            if term.believed and measured_bytes > holder.requested_bytes:
                yield Overuse(
                    node,
                    term.device.uuid,
                    holder.uid,
                    holder.namespace,
                    holder.name,
                    holder.requested_bytes,
                    measured_bytes,
                )


#: The cause of an overcommitment by processes outside of known pods.
UNATTRIBUTED = ""


@dataclass(frozen=True, slots=True)
class Overcommit:
    """The overcommitment of one device of one node."""

    node: str
    device: str
    #: The bytes by which the worst-case use exceeds the device's allocatable memory.
    excess_bytes: int
    allocatable_bytes: int
    holders: tuple[Holder, ...]
    #: Measured use by pods without a reservation on the device.
    unreserved_pods_bytes: int = 0
    #: Measured use by processes outside of known pods.
    unattributed_bytes: int = 0
    #: The pods that use the device without a reservation, largest first.
    unreserved: tuple[Holder, ...] = ()

    @property
    def key(self) -> tuple[str, str]:
        return self.node, self.device

    @property
    def overusing(self) -> list[Holder]:
        """Return the pods that use more than they reserved on the device, largest excess first."""
        over = (each for each in self.holders if _excess_bytes(each) > 0)
        return sorted(over, key=lambda each: (-_excess_bytes(each), each.uid))

    @property
    def takers(self) -> list[Holder]:
        """Return the pods that use more than they reserved, and the pods without a reservation. The
        pod with the most memory that is not reserved comes first."""
        found = (*self.overusing, *self.unreserved)
        return sorted(found, key=lambda each: (-_excess_bytes(each), each.uid))

    @property
    def main_causes(self) -> frozenset[str]:
        """Return the uids of the pods that take at least half as much as the largest cause. The
        causes include ``UNATTRIBUTED``."""
        taken = {each.uid: _excess_bytes(each) for each in self.takers}
        taken[UNATTRIBUTED] = self.unattributed_bytes
        most = max(taken.values())
        return frozenset(cause for cause, size in taken.items() if size > 0 and 2 * size >= most)

    def continues(self, earlier: "Overcommit") -> bool:
        """Return whether this overcommitment and an earlier one have a main cause in common."""
        causes, before = self.main_causes, earlier.main_causes
        return causes == before or bool(causes & before)


@dataclass(frozen=True, slots=True)
class OvercommittedSpan:
    """The time for which a device was, or is, overcommitted by some cause.

    If other pods or processes become the cause, a new span begins. Times are on the monotonic
    clock.
    """

    #: The state with the largest excess, and the last state.
    worst: Overcommit
    latest: Overcommit
    began_s: float
    #: When the overcommitment ended. None while the device is overcommitted.
    ended_s: float | None
    #: The uids of all pods that were on the device meanwhile, or that could get it.
    uids: frozenset[str]
    #: Whether the device was already overcommitted when this process started.
    at_start: bool = False
    #: The earlier spans of the device in the last hour, latest first.
    earlier: "tuple[OvercommittedSpan, ...]" = ()


class Overcommits(Tracker):
    """The overcommitted devices. The thread that owns the cluster state writes, and any thread may
    read."""

    def __init__(self) -> None:
        self._of_node: dict[str, tuple[Overcommit, ...]] = {}
        self._is_first_update = True
        #: The last span of each (node, device). The mapping is replaced and never changed in place.
        self.spans: Mapping[tuple[str, str], OvercommittedSpan] = {}

    def node_weighed(self, node: WeighedNode) -> None:
        status = node.gpunode.status if node.gpunode else None
        if found := tuple(_overcommitted(node.name, node.written_devices, status, node.pods)):
            self._of_node[node.name] = found
        else:
            self._of_node.pop(node.name, None)

    def __contains__(self, node: str) -> bool:
        return node in self._of_node

    def now(self) -> list[Overcommit]:
        return [each for of_node in list(self._of_node.values()) for each in of_node]

    def update(self, now_s: float) -> None:
        """Update ``spans``. ``now_s`` is the time of the monotonic clock."""
        found = {each.key: each for each in self.now()}
        if not found and not self.spans:
            self._is_first_update = False
            return
        ended = (
            (key, span if span.ended_s is not None else replace(span, ended_s=now_s))
            for key, span in self.spans.items()
            if key not in found
        )
        kept = [each for each in ended if now_s - (each[1].ended_s or now_s) < ENDED_FOR_S]
        kept.sort(key=lambda each: each[1].ended_s or now_s)
        spans = dict(kept[-MAX_ENDED:])
        for key, over in found.items():
            spans[key] = self._continued(self.spans.get(key), over, now_s)
        self.spans, self._is_first_update = spans, False

    def _continued(
        self, span: OvercommittedSpan | None, over: Overcommit, now_s: float
    ) -> OvercommittedSpan:
        uids = frozenset(each.uid for each in (*over.holders, *over.unreserved))
        if span is None:
            return OvercommittedSpan(over, over, now_s, None, uids, self._is_first_update)
        ended_s = now_s if span.ended_s is None else span.ended_s
        if now_s - ended_s > MERGED_WITHIN_S or not over.continues(span.latest):
            ended = (replace(span, ended_s=ended_s, earlier=()), *span.earlier)
            return OvercommittedSpan(over, over, now_s, None, uids, earlier=_lately(ended, now_s))
        worst = over if over.excess_bytes >= span.worst.excess_bytes else span.worst
        if len(span.uids) < MAX_SPAN_PODS:
            uids |= span.uids
        earlier = _lately(span.earlier, now_s)
        return replace(span, worst=worst, latest=over, ended_s=None, uids=uids, earlier=earlier)


def _lately(ended: tuple[OvercommittedSpan, ...], now_s: float) -> tuple[OvercommittedSpan, ...]:
    found = (each for each in ended if now_s - (each.ended_s or now_s) < ENDED_FOR_S)
    return tuple(found)[:MAX_EARLIER_SPANS]


def _excess_bytes(holder: Holder) -> int:
    return (holder.measured_bytes or 0) - holder.requested_bytes


def any_overcommitted(terms: Sequence[DeviceTerms]) -> bool:
    return any(True for _ in _overcommitted("", terms))


def _overcommitted(
    node: str,
    terms: Sequence[DeviceTerms],
    status: GPUNodeStatus | None = None,
    pods: Sequence[Pod] = (),
) -> Iterator[Overcommit]:
    for term in terms:
        # Contradictory or missing values are no proof, so they must not raise an alarm.
        if term.headroom_bytes < 0 and term.believed:
            yield Overcommit(
                node,
                term.device.uuid,
                -term.headroom_bytes,
                term.allocatable_bytes,
                term.holders,
                term.unreserved_pods_bytes,
                term.unattributed_bytes,
                unreserved_pods(status, term, pods),
            )
