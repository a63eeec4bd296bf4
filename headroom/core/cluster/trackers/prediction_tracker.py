"""Tracks each pod from its reservation to the report that shows it, and evaluates the prediction.

Each reservation is compared once, either when a report shows the pod with all its replicas, or when
the reservation is removed before any report has shown the pod. If a report already shows a pod when
this replica first sees it, for example after a start, the pod is never compared, because this
replica did not see the facts on which the prediction was based. A compared pod is not compared
again while its reservation exists, even if later or older reports differ.
"""

from collections import Counter, deque
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Protocol

from headroom.contract.gpunode import ADOPTED, GPUNode, GPUNodeStatus, Reservation
from headroom.core.placement.prediction_outcome import (
    Basis,
    Result,
    Since,
    Surprise,
    changes,
    compare,
    compare_used,
    is_by_environment,
    is_shown,
    predicted,
)
from headroom.core.tracker import Tracker, WeighedNode

#: Maximum number of misses kept for display.
REMEMBERED = 200
#: Maximum number of entries in all baselines of one node, and of all nodes. Pods in reports,
#: reservations and unreserved pods are entries, and each takes about 250 bytes.
MAX_NODE_ENTRIES = 16_384
MAX_ENTRIES = 262_144


@dataclass(frozen=True, slots=True)
class Circumstances:
    """Facts about the node in addition to its GPUNode."""

    unreserved_pods: Mapping[str, Reservation]
    leaving: Set[str]


class Facts(Protocol):
    """Looks up facts about nodes and pods."""

    def circumstances(self, gpunode: GPUNode) -> Circumstances: ...

    def was_bound(self, uid: str, node: str) -> bool:
        """Return whether a pod, existing or deleted, is or was bound to the node."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of the prediction for one pod."""

    node: str
    uid: str
    reservation: Reservation
    result: Result
    surprise: Surprise | None
    predicted: tuple[str, ...]
    observed: tuple[str, ...]
    #: Seconds from the time when this replica received the reservation until it received the
    #: report.
    window_s: float
    #: When the pod was compared, on the monotonic clock.
    at_s: float
    #: The largest overcommitment of any device of the pod, including the pod.
    overcommitted_bytes: int = 0


@dataclass(slots=True)
class _Baseline:
    """The facts at the time when memory was reserved on the basis of one report, and the changes
    since then."""

    basis: Basis
    reservations: dict[str, Reservation] = field(default_factory=dict)
    unreserved_pods: dict[str, Reservation] = field(default_factory=dict)
    changes: set[Surprise] = field(default_factory=set)

    @property
    def entries(self) -> int:
        """Number of pods in the baseline, plus one."""
        known = (
            self.basis.status.pods,
            self.basis.reservations,
            self.reservations,
            self.unreserved_pods,
        )
        return 1 + sum(map(len, known))


@dataclass(slots=True)
class _Pending:
    reservation: Reservation
    #: The baseline when the pod was reserved. Later baselines belong to pods that were reserved
    #: later. None if an environment variable of the pod decides its devices, because such devices
    #: are certain.
    baseline: _Baseline | None
    at_s: float


@dataclass(slots=True)
class _TrackedNode:
    """The tracked data of one GPUNode. Tracking starts again if the GPUNode is deleted and created
    again."""

    uid: str
    status: GPUNodeStatus
    #: When the last version was received, on the monotonic clock.
    at_s: float
    #: The reservations in the last version.
    reservations: Mapping[str, Reservation] = field(default_factory=dict)
    #: Pods that no report has shown yet, by uid and in the order of their reservations.
    pending: dict[str, _Pending] = field(default_factory=dict)
    #: The baselines since the first pending pod was reserved, oldest first.
    baselines: list[_Baseline] = field(default_factory=list)
    #: Outcomes by uid, or None for a pod that a report showed before it was tracked.
    settled: dict[str, Outcome | None] = field(default_factory=dict)
    #: Number of pods in all baselines.
    entries: int = 0


class PredictionTracker(Tracker):
    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._nodes: dict[str, _TrackedNode] = {}
        #: Outcomes of compared pods by node, until the node is weighed with these pods.
        self._fresh: dict[str, list[Outcome]] = {}
        #: Number of pods in the baselines of all nodes.
        self._entries = 0
        self._done: list[Outcome] = []
        #: Number of outcomes since this replica started, including pods that other replicas bound.
        self.totals: Counter[Result] = Counter()
        self.misses: deque[Outcome] = deque(maxlen=REMEMBERED)

    def take(self) -> list[Outcome]:
        """Return the outcomes since the last call."""
        done, self._done = self._done, []
        return done

    def of_pod(self, node: str, uid: str) -> Outcome | None:
        tracked = self._nodes.get(node)
        return tracked.settled.get(uid) if tracked else None

    def is_pending(self, node: str, uid: str) -> bool:
        tracked = self._nodes.get(node)
        return tracked is not None and uid in tracked.pending

    def gpunode_seen(self, gpunode: GPUNode, at_s: float) -> None:
        if gpunode.status is not None:
            self._process(gpunode, gpunode.status, at_s)

    def _process(self, gpunode: GPUNode, status: GPUNodeStatus, at_s: float) -> None:
        name = gpunode.name
        tracked = self._nodes.get(name)
        if tracked is not None and tracked.uid != gpunode.metadata.uid:
            self.gpunode_gone(name)
            tracked = None
        if tracked is None:
            tracked = self._nodes[name] = _TrackedNode(gpunode.metadata.uid, status, at_s)
        reservations = gpunode.spec.reservations
        if reservations == tracked.reservations and not tracked.pending:
            tracked.status, tracked.at_s = status, at_s
            return
        self._forget(name, tracked, reservations, at_s)
        fresh = [uid for uid in reservations if _is_new(tracked, uid, reservations[uid])]
        if fresh or tracked.pending:
            known = self._facts.circumstances(gpunode)
            self._note_unreserved(name, known.unreserved_pods)
            new = {uid: p for uid, p in reservations.items() if uid not in tracked.reservations}
            differs = changes(tracked.status, status) if tracked.baselines else set[Surprise]()
            for baseline in tracked.baselines:
                baseline.reservations |= new
                baseline.changes |= differs
            if fresh:
                _track(tracked, fresh, gpunode, status, known, at_s)
            self._compare(name, tracked, status, at_s)
            self._prune(name, tracked, at_s)
        tracked.status, tracked.reservations, tracked.at_s = status, reservations, at_s

    def _note_unreserved(self, node: str, unreserved_pods: Mapping[str, Reservation]) -> None:
        """Record unreserved pods on the node, because they may be gone before the next report."""
        tracked = self._nodes.get(node)
        if tracked is None or not unreserved_pods:
            return
        for baseline in tracked.baselines:
            baseline.unreserved_pods |= unreserved_pods
        self._prune(node, tracked, tracked.at_s)

    def node_weighed(self, node: WeighedNode) -> None:
        """Complete the outcomes of the node, whose devices now include the compared pods."""
        tracked = self._nodes.get(node.name)
        if tracked is not None and tracked.pending and node.gpunode is not None:
            unreserved_pods = self._facts.circumstances(node.gpunode).unreserved_pods
            self._note_unreserved(node.name, unreserved_pods)
        for outcome in self._fresh.pop(node.name, ()):
            over = [-t.headroom_bytes for t in node.devices if t.device.uuid in outcome.observed]
            done = replace(outcome, overcommitted_bytes=max(0, *over, 0))
            if tracked is not None and tracked.settled.get(done.uid) is outcome:
                tracked.settled[done.uid] = done
            self.totals[done.result] += 1
            if done.result is Result.MISS:
                self.misses.append(done)
            self._done.append(done)

    def gpunode_gone(self, name: str) -> None:
        """Forget a GPUNode and its reservations."""
        tracked = self._nodes.pop(name, None)
        if tracked is not None:
            self._forget(name, tracked, {}, tracked.at_s)
            self._entries -= tracked.entries

    def _compare(
        self, name: str, tracked: _TrackedNode, status: GPUNodeStatus, at_s: float
    ) -> None:
        for uid, pending in list(tracked.pending.items()):
            if not is_shown(status, uid, pending.reservation):
                continue
            if pending.baseline is None:
                found = compare_used(uid, pending.reservation, status)
            else:
                later = tracked.pending.keys() - {uid}
                first = next(i for i, g in enumerate(tracked.baselines) if g is pending.baseline)
                baselines = [(g.basis, _since(g, status, later)) for g in tracked.baselines[first:]]
                found = compare(uid, pending.reservation, baselines)
            self._settle(
                Outcome(
                    name,
                    uid,
                    pending.reservation,
                    found.result,
                    found.surprise,
                    found.predicted,
                    found.observed,
                    at_s - pending.at_s,
                    at_s,
                ),
                tracked,
            )

    def _settle(self, outcome: Outcome, tracked: _TrackedNode) -> None:
        del tracked.pending[outcome.uid]
        tracked.settled[outcome.uid] = outcome
        self._fresh.setdefault(outcome.node, []).append(outcome)

    def _forget(
        self, name: str, tracked: _TrackedNode, reservations: Mapping[str, Reservation], at_s: float
    ) -> None:
        """Drop pods that no longer have a reservation."""
        for uid, pending in list(tracked.pending.items()):
            if uid in reservations:
                continue
            if self._facts.was_bound(uid, name):
                self._settle(_unseen(name, uid, pending, at_s), tracked)
            else:
                del tracked.pending[uid]  # the pod was never bound there
        for uid in tracked.settled.keys() - reservations.keys():
            del tracked.settled[uid]

    def _prune(self, name: str, tracked: _TrackedNode, at_s: float) -> None:
        """Drop the baselines before the baseline of the first pending pod.

        If the limits are exceeded, stop tracking this pod, because no report has shown it although
        much has changed on its node.
        """
        while True:
            compared = ((uid, p) for uid, p in tracked.pending.items() if p.baseline is not None)
            uid, first = next(compared, ("", None))
            while tracked.baselines and (
                first is None or tracked.baselines[0] is not first.baseline
            ):
                tracked.baselines.pop(0)
            self._entries -= tracked.entries
            tracked.entries = sum(baseline.entries for baseline in tracked.baselines)
            self._entries += tracked.entries
            is_bounded = tracked.entries <= MAX_NODE_ENTRIES and self._entries <= MAX_ENTRIES
            if first is None or is_bounded:
                return
            self._settle(_unseen(name, uid, first, at_s), tracked)


def _unseen(node: str, uid: str, pending: _Pending, at_s: float) -> Outcome:
    window_s, devices = at_s - pending.at_s, predicted(pending.reservation)
    return Outcome(node, uid, pending.reservation, Result.UNSEEN, None, devices, (), window_s, at_s)


def _is_new(tracked: _TrackedNode, uid: str, reservation: Reservation) -> bool:
    """Return whether the reservation is a prediction that is not tracked yet."""
    if uid in tracked.settled or ADOPTED in reservation.flags or not reservation.charges:
        return False
    pending = tracked.pending.get(uid)
    return pending is None or pending.reservation.attempt != reservation.attempt


def _track(
    tracked: _TrackedNode,
    fresh: Sequence[str],
    gpunode: GPUNode,
    status: GPUNodeStatus,
    known: Circumstances,
    at_s: float,
) -> None:
    reservations = gpunode.spec.reservations
    unconfirmed = [uid for uid in fresh if not is_shown(status, uid, reservations[uid])]
    tracked.settled |= dict.fromkeys(set(fresh) - set(unconfirmed))
    if not unconfirmed:
        return
    together = {**known.unreserved_pods, **reservations}
    last = tracked.baselines[-1] if tracked.baselines else None
    if last is None or not _is_still_known(last, status, together, known.leaving):
        basis = Basis(status, together, known.leaving)
        tracked.baselines.append(_Baseline(basis))
    for uid in unconfirmed:
        # A pod that was reserved again moves to the end.
        tracked.pending.pop(uid, None)
        baseline = None if is_by_environment(reservations[uid]) else tracked.baselines[-1]
        tracked.pending[uid] = _Pending(reservations[uid], baseline, at_s)


def _is_still_known(
    baseline: _Baseline,
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    leaving: Set[str],
) -> bool:
    """Return whether only additional reservations have changed since the baseline."""
    return (
        baseline.basis.status is status
        and baseline.basis.leaving == leaving
        and baseline.basis.reservations.keys() | baseline.reservations.keys() <= reservations.keys()
    )


def _since(baseline: _Baseline, status: GPUNodeStatus, later: Set[str]) -> Since:
    added = baseline.unreserved_pods | baseline.reservations
    added = {o: p for o, p in added.items() if o not in baseline.basis.reservations}
    ours = {
        other: reservation
        for other, reservation in added.items()
        if other in baseline.reservations and ADOPTED not in reservation.flags
    }
    others = {other: reservation for other, reservation in added.items() if other not in ours}
    return Since(status, ours, others, later, baseline.changes)
