"""The feed of recent changes: reservations, reports, devices and decisions.

``Feed`` keeps a bounded history, and a queue for each follower. It drops a follower whose queue is
full. All its methods run on one event loop, except ``past``.

``ChangeFeed`` publishes the changes since its last check. It compares states at intervals, a few
nodes at a time, so the code that decides does not have to publish anything. A state that appears
and disappears between two checks is missed, but the decision behind it is not.
"""

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

import msgspec

from headroom.bounded_dict import Bounded
from headroom.console.feed.journals import Journals
from headroom.contract.gpunode import ADOPTED, EVICTED, Reservation
from headroom.contract.quantity import gib
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.object_cache import NOTHING
from headroom.core.journal.decision_records import BindTried, Filtered, Ranked, Record
from headroom.core.placement.per_node import PerNode
from headroom.core.placement.snapshot import REASONS, NodeTerms
from headroom.runtime.loops import Loops

#: Number of events that are kept. Each takes a quarter of a KiB.
KEPT = 4096
#: Maximum number of events that wait for one follower.
MOST_WAITING = 1024
MOST_FOLLOWERS = 32
#: Seconds between two checks for changes.
CHECK_EVERY_S = 0.5
#: Number of nodes or decisions that are checked before the event loop serves other tasks.
AT_ONCE = 50
#: Maximum number of extenders whose journal position is kept. Restarted extenders have new names,
#: so this can be more than the number of extenders followed at the same time.
MAX_EXTENDERS = 32


EventKind = Literal[
    "reservation_made",
    "reservation_changed",
    "reservation_removed",
    "pod_observed",
    "prediction_missed",
    "decision",
    "overuse_began",
    "overuse_ended",
    "overcommit_began",
    "overcommit_ended",
    "report_lost",
    "report_returned",
    "device_unhealthy",
    "device_healthy",
    "device_cordoned",
    "device_uncordoned",
    "node_appeared",
    "node_gone",
]
#: Maps each kind of event to its possible causes, or to a description. The reference page lists
#: them.
KINDS: Mapping[EventKind, str] = {
    "reservation_made": "`bind`, `bound_without_us`; in one process with an extender also "
    "`bind_on_another_replica`",
    "reservation_changed": "`bound_again`, `corrected`, `is_to_leave`, `may_stay`",
    "reservation_removed": "`pod_gone`, `pod_ended`, `bound_elsewhere`, `taken_back`",
    "pod_observed": "a report shows the pod on this device",
    "prediction_missed": "`released`, `health`, `bypass`, `configuration`, `disobeyed`, `several`, "
    "`unknown`",
    "decision": "`rejected`, `chosen`, `bound`, `declined`, `failed`: each once for a version of a "
    "pod",
    "overuse_began": "the pod has used more than it reserved for longer than `overuse_after_s`; "
    "`message` gives the amounts",
    "overuse_ended": "the pod no longer uses more than it reserved",
    "overcommit_began": "`message` states by how much and because of which pods; `namespace` "
    "and `name` are the pod with the most memory that it did not reserve",
    "overcommit_ended": "`message` states by how much it was overcommitted, and when; if other "
    "pods or processes are the cause now, `overcommit_began` follows",
    "report_lost": "no heartbeat for `stale_after_s`",
    "report_returned": "a heartbeat after `report_lost`",
    "device_unhealthy": "`message` gives the reason",
    "device_healthy": "the fault is gone",
    "device_cordoned": "`headroom.gpu/cordon` of the node names the device",
    "device_uncordoned": "`headroom.gpu/cordon` of the node no longer names the device",
    "node_appeared": "a new node has GPUs",
    "node_gone": "the node was deleted",
}


class TooManyFollowers(Exception):
    """``MOST_FOLLOWERS`` followers exist already."""


@dataclass(frozen=True, slots=True)
class FeedEvent:
    """One change. Fields that do not apply are empty."""

    number: int
    #: When the event happened, in Unix seconds.
    at_s: float
    generation: int
    kind: EventKind
    node: str = ""
    device: str = ""
    namespace: str = ""
    name: str = ""
    uid: str = ""
    decision_id: str = ""
    #: The cause as a code. Each kind has a fixed set of codes.
    cause: str = ""
    #: The cause as a sentence, with numbers.
    message: str = ""


@dataclass(slots=True, eq=False)
class Follower:
    """A queue of events. None marks the end of the feed.

    ``dropped`` is set when an event does not fit in the queue.
    """

    queue: asyncio.Queue[FeedEvent | None] = field(
        default_factory=lambda: asyncio.Queue(MOST_WAITING)
    )
    dropped: bool = False


class Feed:
    """Keeps the latest events and passes each event to all followers.

    ``wall_s`` returns the Unix time. ``generation`` returns the generation of the newest snapshot.
    """

    def __init__(self, wall_s: Callable[[], float], generation: Callable[[], int]) -> None:
        self._wall_s = wall_s
        self._generation = generation
        self._numbers = itertools.count(1)
        self._past: deque[FeedEvent] = deque(maxlen=KEPT)
        self._followers: list[Follower] = []
        self.closed = False

    @classmethod
    def over(cls) -> "Feed":
        """Return a closed feed that has no events."""
        feed = cls(lambda: 0.0, lambda: 0)
        feed.close()
        return feed

    def publish(self, kind: EventKind, **fields: str) -> None:
        """Keep an event, and put it in the queue of each follower."""
        feed_event = FeedEvent(
            next(self._numbers), self._wall_s(), self._generation(), kind, **fields
        )
        self._past.append(feed_event)
        for follower in self._followers:
            _put(follower, feed_event)

    def past(self, after: int = 0, since_s: float = float("-inf")) -> list[FeedEvent]:
        """Return the kept events, oldest first, whose number is above ``after`` and whose time is
        at least ``since_s`` (Unix time). Any thread may call this method.
        """
        return [each for each in list(self._past) if each.number > after and each.at_s >= since_s]

    def join(self) -> Follower:
        """Return a new follower, which receives all later events until it leaves. Raise
        ``TooManyFollowers`` if there are too many already."""
        if len(self._followers) >= MOST_FOLLOWERS:
            raise TooManyFollowers
        follower = Follower()
        self._followers.append(follower)
        if self.closed:
            _put(follower, None)
        return follower

    def leave(self, follower: Follower) -> None:
        self._followers.remove(follower)

    def close(self) -> None:
        """End the feed: each follower receives the end mark."""
        self.closed = True
        for follower in self._followers:
            _put(follower, None)


def _put(follower: Follower, feed_event: FeedEvent | None) -> None:
    try:
        follower.queue.put_nowait(feed_event)
    except asyncio.QueueFull:
        follower.dropped = True


class _Seen(msgspec.Struct, frozen=True, gc=False):
    """The state of a node at the last check."""

    terms: NodeTerms
    #: Generation of the last snapshot in which the node's figures changed.
    changed_in: int
    reservations: Mapping[str, Reservation]
    fresh: bool

    def health_issues(self) -> dict[str, str]:
        """Return why devices are unhealthy, by UUID."""
        return {
            each.device.uuid: each.health_detail or each.unhealthy.sentence
            for each in self.terms.devices
            if each.unhealthy is not None
        }

    def cordoned(self) -> set[str]:
        """Return the UUIDs of cordoned devices."""
        return {each.device.uuid for each in self.terms.devices if each.cordoned}

    def observed(self) -> set[tuple[str, str]]:
        """Return (pod, device) of all pods that a report shows on a device."""
        return {
            (holder.uid, each.device.uuid)
            for each in self.terms.devices
            for holder in each.holders
            if holder.observed
        }


class ChangeFeed:
    """Publishes how the state of the cluster and the journals changed since the last check.

    ``name`` is the prefix of the ids of this process's bind attempts. If it is "", this process
    counts as the maker of every reservation.
    """

    def __init__(self, cluster: Cluster, journals: Journals, feed: Feed, name: str) -> None:
        self._cluster = cluster
        self._journals = journals
        self._feed = feed
        self._name = name
        self._nodes = PerNode[_Seen]()
        #: The first check publishes only decisions.
        self._is_first = True
        #: The version of the records of each extender at the last check.
        self._versions: Bounded[str, int] = Bounded(MAX_EXTENDERS)
        #: The last published state of each recorded decision, by the decision's id.
        self._published: Bounded[str, str] = Bounded(journals.own.records.bounds.decisions)

    def start(self, loops: Loops, begun: asyncio.Event) -> None:
        """Start the loop. It publishes nothing until ``begun`` is set."""

        async def check() -> None:
            if begun.is_set():
                for _ in self.check(asyncio.get_running_loop().time()):
                    await asyncio.sleep(0)

        loops.start("feed", check, CHECK_EVERY_S)

    def check(self, now_s: float) -> Iterator[None]:
        """Publish the changes since the last check. Other tasks may run between two steps."""
        snap = self._cluster.snapshot()
        changes = self._nodes.update(
            snap,
            lambda node: (node, self._reservations(node.name), node.fresh_until_s >= now_s),
            lambda node, _, *rest: _Seen(node, int(snap.changed_in[snap.row_of[node.name]]), *rest),
            now_s,
        )
        for number, (name, before, after) in enumerate(changes, 1):
            if after is None:
                self._feed.publish("node_gone", node=name)
            elif before is not None:
                self._compare(before, after)
            elif not self._is_first:
                self._feed.publish("node_appeared", node=name)
            if number % AT_ONCE == 0:
                yield
        self._is_first = False
        yield from self._decisions()

    def _reservations(self, node: str) -> Mapping[str, Reservation]:
        gpunode = self._cluster.gpunode(node)
        return gpunode.spec.reservations if gpunode else NOTHING

    def _compare(self, was: _Seen, now: _Seen) -> None:
        node, feed = now.terms.name, self._feed
        if was.reservations is not now.reservations and was.reservations != now.reservations:
            self._compare_reservations(node, was.reservations, now.reservations)
        if was.fresh != now.fresh and now.terms.devices:
            feed.publish("report_returned" if now.fresh else "report_lost", node=node)
        if was.changed_in == now.changed_in:
            return  # the usual case
        unhealthy, health_issues = was.health_issues(), now.health_issues()
        for device in unhealthy.keys() - health_issues.keys():
            feed.publish("device_healthy", node=node, device=device)
        for device, why in health_issues.items():
            if unhealthy.get(device) != why:
                feed.publish("device_unhealthy", node=node, device=device, message=why)
        for device in sorted(now.cordoned() - was.cordoned()):
            feed.publish("device_cordoned", node=node, device=device)
        for device in sorted(was.cordoned() - now.cordoned()):
            feed.publish("device_uncordoned", node=node, device=device)
        for uid, device in sorted(now.observed() - was.observed()):
            reservation = now.reservations.get(uid)
            feed.publish("pod_observed", node=node, device=device, uid=uid, **_pod(reservation))

    def _compare_reservations(
        self, node: str, was: Mapping[str, Reservation], now: Mapping[str, Reservation]
    ) -> None:
        change: tuple[EventKind, str, str]
        for uid, reservation in now.items():
            before = was.get(uid)
            if before is None:
                change = "reservation_made", self._maker(reservation), _amount(reservation)
            elif before != reservation:
                change = "reservation_changed", _change(before, reservation), _amount(reservation)
            else:
                continue
            kind, cause, message = change
            of_pod = _pod(reservation)
            self._feed.publish(kind, node=node, uid=uid, cause=cause, message=message, **of_pod)
        for uid in was.keys() - now.keys():
            cause = self._removal_cause(uid, node)
            of_pod = _pod(was[uid])
            self._feed.publish("reservation_removed", node=node, uid=uid, cause=cause, **of_pod)

    def _maker(self, reservation: Reservation) -> str:
        """Return the cause of ``reservation_made``, which names the writer of the reservation."""
        if ADOPTED in reservation.flags:
            return "bound_without_us"
        return "bind" if reservation.attempt.startswith(self._name) else "bind_on_another_replica"

    def _removal_cause(self, uid: str, node: str) -> str:
        """Return why the pod no longer has a reservation on the node."""
        pod = self._cluster.pod(uid)
        if pod is None:
            return "pod_gone"
        if pod.ended:
            return "pod_ended"
        return "bound_elsewhere" if pod.node and pod.node != node else "taken_back"

    def _decisions(self) -> Iterator[None]:
        changed: list[Record] = []
        for replica, journal in self._journals.each():
            changed += journal.records.newer_than(self._versions.get(replica, 0))
            self._versions[replica] = journal.records.version
        changed.sort(key=lambda record: record.at_s)
        for number, record in enumerate(changed, 1):
            cause, message = _decided(record)
            if cause and self._published.get(record.decision_id) != cause:
                self._published[record.decision_id] = cause
                self._feed.publish(
                    "decision",
                    node=record.node,
                    namespace=record.namespace,
                    name=record.name,
                    uid=record.uid,
                    decision_id=record.decision_id,
                    cause=cause,
                    message=message,
                )
            if number % AT_ONCE == 0:
                yield


def _pod(reservation: Reservation | None) -> dict[str, str]:
    return {"namespace": reservation.namespace, "name": reservation.name} if reservation else {}


def _amount(reservation: Reservation) -> str:
    """Describe the charge: the largest amount on one device, and the device, the devices that
    Headroom chose, or the number of candidates."""
    devices = sorted({uuid for charge in reservation.charges for uuid in charge.candidates})
    most = max((max(c.candidates.values(), default=0) for c in reservation.charges), default=0)
    if len(devices) == 1:
        return f"{gib(most)} on {devices[0]}"
    if all(charge.choices for charge in reservation.charges):
        return f"{gib(most)} on each of {len(devices)} GPUs: {', '.join(devices)}"
    return f"{gib(most)} on each of {len(devices)} GPUs that the pod could get"


def _change(before: Reservation, after: Reservation) -> str:
    """Return the cause of ``reservation_changed``."""
    if _leaves(before) != _leaves(after):
        return "is_to_leave" if _leaves(after) else "may_stay"
    return "bound_again" if before.attempt != after.attempt else "corrected"


def _leaves(reservation: Reservation) -> bool:
    """Return whether the pod is to be evicted, because it lacks memory or exceeds its request."""
    return EVICTED in reservation.flags or bool(reservation.overuse)


def _decided(record: Record) -> tuple[str, str]:
    """Return the pod's state after this decision, and a message. Both are "" if nothing is
    decided yet."""
    bound, filtered = record.part(BindTried), record.part(Filtered)
    if bound is not None:
        reason = REASONS[bound.reason]
        return bound.outcome, bound.message or (reason.sentence if reason else "")
    if filtered is not None and not filtered.fits:
        counts = [f"{n} {reason.sentence}" for code, n in filtered.rejected.items()
                if (reason := REASONS[code])]  # fmt: skip
        nodes = "1 node" if filtered.offered == 1 else f"{filtered.offered} nodes"
        return "rejected", f"none of {nodes}: {', '.join(counts)}"
    ranked = record.part(Ranked)
    return ("chosen", "") if ranked is not None and ranked.winner else ("", "")
