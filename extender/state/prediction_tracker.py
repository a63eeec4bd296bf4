"""Follows every pod from its promise to the report that shows it, and says how it was predicted.

Each promise is compared once: when a report shows the pod with all that it asked for, or when the
promise goes and none ever did. What this replica first sees as shown already, as after its start,
it never compares: what was known when it was promised is not known here. A pod that was compared is
not compared again while its promise stands, whatever a later or older report says of it.
"""

from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace

from contract.annotations import DeviceChoice
from contract.gpunode import ADOPTED, GPUNode, GPUNodeStatus, Reservation
from extender.placement.device_accounting import DeviceTerms
from extender.placement.prediction_outcome import (
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

#: Misses that are kept to be shown.
REMEMBERED = 200
#: Pods remembered in all grounds of one node and of all nodes: of reports, reservations and
#: unreserved pods. An entry takes about 250 bytes.
MAX_NODE_ENTRIES = 16_384
MAX_ENTRIES = 262_144


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What is known of the node besides its object."""

    unreserved_pods: Mapping[str, Reservation]
    leaving: Set[str]
    device_choice: DeviceChoice


@dataclass(frozen=True, slots=True)
class Outcome:
    """How the prediction for one pod turned out."""

    node: str
    uid: str
    reservation: Reservation
    result: Result
    surprise: Surprise | None
    predicted: tuple[str, ...]
    observed: tuple[str, ...]
    #: From the promise to the report, as this replica heard of them.
    window_s: float
    #: When that was, on the monotonic clock.
    at_s: float
    #: The most that any device of the pod was overcommitted with it there.
    overcommitted_bytes: int = 0


@dataclass(slots=True)
class _Ground:
    """What was known when pods were promised memory on one and the same report, and what came
    after."""

    basis: Basis
    reservations: dict[str, Reservation] = field(default_factory=dict)
    unreserved_pods: dict[str, Reservation] = field(default_factory=dict)
    changes: set[Surprise] = field(default_factory=set)

    @property
    def entries(self) -> int:
        """Pods that are remembered in it."""
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
    #: The one on which it was promised; those after it are others', who relied on what was known.
    #: None if the pod's own variable decides: its devices were known for certain.
    ground: _Ground | None
    at_s: float


@dataclass(slots=True)
class _Followed:
    """One GPUNode: a new one of the same name begins anew."""

    uid: str
    status: GPUNodeStatus
    #: When it was heard of last, on the monotonic clock.
    at_s: float
    #: What it promised then.
    reservations: Mapping[str, Reservation] = field(default_factory=dict)
    #: In the order in which they were promised.
    pending: dict[str, _Pending] = field(default_factory=dict)
    #: From that of the first that is pending on.
    grounds: list[_Ground] = field(default_factory=list)
    #: None where it was shown before it was followed.
    settled: dict[str, Outcome | None] = field(default_factory=dict)
    #: Pods remembered in all grounds.
    entries: int = 0


class PredictionTracker:
    """``sat(uid, node)``: whether a pod, there or gone, was bound to the node."""

    def __init__(self, sat: Callable[[str, str], bool]) -> None:
        self._sat = sat
        self._nodes: dict[str, _Followed] = {}
        #: Compared, and not weighed yet.
        self._fresh: dict[str, list[Outcome]] = {}
        #: Pods remembered in the grounds of all nodes.
        self._entries = 0
        self._done: list[Outcome] = []
        #: Since this replica was started, whoever bound the pods.
        self.totals: Counter[Result] = Counter()
        self.misses: deque[Outcome] = deque(maxlen=REMEMBERED)

    def take(self) -> list[Outcome]:
        """What turned out since the last call."""
        done, self._done = self._done, []
        return done

    def of_pod(self, node: str, uid: str) -> Outcome | None:
        followed = self._nodes.get(node)
        return followed.settled.get(uid) if followed else None

    def is_pending(self, node: str, uid: str) -> bool:
        followed = self._nodes.get(node)
        return followed is not None and uid in followed.pending

    def waits_on(self, node: str) -> bool:
        """Whether any pod is on its way there."""
        followed = self._nodes.get(node)
        return followed is not None and bool(followed.pending)

    def see(
        self, gpunode: GPUNode, circumstances: Callable[[], Circumstances], at_s: float
    ) -> None:
        """The next version of a node's object."""
        name, status = gpunode.name, gpunode.status
        if status is None:
            return
        followed = self._nodes.get(name)
        if followed is not None and followed.uid != gpunode.metadata.uid:
            self.lose(name)
            followed = None
        if followed is None:
            followed = self._nodes[name] = _Followed(gpunode.metadata.uid, status, at_s)
        reservations = gpunode.spec.reservations
        if reservations is followed.reservations and not followed.pending:
            followed.status, followed.at_s = status, at_s
            return
        self._forget(name, followed, reservations, at_s)
        fresh = [uid for uid in reservations if _is_new(followed, uid, reservations[uid])]
        if fresh or followed.pending:
            known = circumstances()
            self.bypassed(name, known.unreserved_pods)
            new = {uid: p for uid, p in reservations.items() if uid not in followed.reservations}
            differs = changes(followed.status, status) if followed.grounds else set[Surprise]()
            for ground in followed.grounds:
                ground.reservations |= new
                ground.changes |= differs
            if fresh:
                _follow(followed, fresh, gpunode, status, known, at_s)
            self._compare(name, followed, status, at_s)
            self._prune(name, followed, at_s)
        followed.status, followed.reservations, followed.at_s = status, reservations, at_s

    def bypassed(self, node: str, unreserved_pods: Mapping[str, Reservation]) -> None:
        """Pods sit on the node that nobody promised anything; they may be gone before a report."""
        followed = self._nodes.get(node)
        if followed is None or not unreserved_pods:
            return
        for ground in followed.grounds:
            ground.unreserved_pods |= unreserved_pods
        self._prune(node, followed, followed.at_s)

    def weighed(self, node: str, terms: Sequence[DeviceTerms]) -> None:
        """The node was weighed with what was seen last."""
        for outcome in self._fresh.pop(node, ()):
            over = [-t.headroom_bytes for t in terms if t.device.uuid in outcome.observed]
            done = replace(outcome, overcommitted_bytes=max(0, *over, 0))
            followed = self._nodes.get(node)
            if followed is not None and followed.settled.get(done.uid) is outcome:
                followed.settled[done.uid] = done
            self.totals[done.result] += 1
            if done.result is Result.MISS:
                self.misses.append(done)
            self._done.append(done)

    def lose(self, node: str) -> None:
        """The node's object is gone, and its promises with it."""
        followed = self._nodes.pop(node, None)
        if followed is not None:
            self._forget(node, followed, {}, followed.at_s)
            self._entries -= followed.entries

    def _compare(self, name: str, followed: _Followed, status: GPUNodeStatus, at_s: float) -> None:
        for uid, pending in list(followed.pending.items()):
            if not is_shown(status, uid, pending.reservation):
                continue
            if pending.ground is None:
                found = compare_used(uid, pending.reservation, status)
            else:
                later = followed.pending.keys() - {uid}
                first = next(i for i, g in enumerate(followed.grounds) if g is pending.ground)
                grounds = [(g.basis, _since(g, status, later)) for g in followed.grounds[first:]]
                found = compare(uid, pending.reservation, grounds)
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
                followed,
            )

    def _settle(self, outcome: Outcome, followed: _Followed) -> None:
        del followed.pending[outcome.uid]
        followed.settled[outcome.uid] = outcome
        self._fresh.setdefault(outcome.node, []).append(outcome)

    def _forget(
        self, name: str, followed: _Followed, reservations: Mapping[str, Reservation], at_s: float
    ) -> None:
        """What is promised no longer."""
        for uid, pending in list(followed.pending.items()):
            if uid in reservations:
                continue
            if self._sat(uid, name):
                self._settle(_unseen(name, uid, pending, at_s), followed)
            else:
                del followed.pending[uid]  # it was never bound there
        for uid in followed.settled.keys() - reservations.keys():
            del followed.settled[uid]

    def _prune(self, name: str, followed: _Followed, at_s: float) -> None:
        """Forget the grounds before that of the first pending pod. Beyond the bounds, give up on
        that pod: no report has shown it while very much happened on its node."""
        while True:
            compared = ((uid, p) for uid, p in followed.pending.items() if p.ground is not None)
            uid, first = next(compared, ("", None))
            while followed.grounds and (first is None or followed.grounds[0] is not first.ground):
                followed.grounds.pop(0)
            self._entries -= followed.entries
            followed.entries = sum(ground.entries for ground in followed.grounds)
            self._entries += followed.entries
            is_bounded = followed.entries <= MAX_NODE_ENTRIES and self._entries <= MAX_ENTRIES
            if first is None or is_bounded:
                return
            self._settle(_unseen(name, uid, first, at_s), followed)


def _unseen(node: str, uid: str, pending: _Pending, at_s: float) -> Outcome:
    window_s, said = at_s - pending.at_s, predicted(pending.reservation)
    return Outcome(node, uid, pending.reservation, Result.UNSEEN, None, said, (), window_s, at_s)


def _is_new(followed: _Followed, uid: str, reservation: Reservation) -> bool:
    """Whether it is a prediction that is not followed yet."""
    if uid in followed.settled or ADOPTED in reservation.flags or not reservation.charges:
        return False
    pending = followed.pending.get(uid)
    return pending is None or pending.reservation.attempt != reservation.attempt


def _follow(
    followed: _Followed,
    fresh: Sequence[str],
    gpunode: GPUNode,
    status: GPUNodeStatus,
    known: Circumstances,
    at_s: float,
) -> None:
    reservations = gpunode.spec.reservations
    coming = [uid for uid in fresh if not is_shown(status, uid, reservations[uid])]
    followed.settled |= dict.fromkeys(set(fresh) - set(coming))
    if not coming:
        return
    together = {**known.unreserved_pods, **reservations}
    last = followed.grounds[-1] if followed.grounds else None
    if last is None or not _is_still_known(last, status, together, known.leaving):
        basis = Basis(status, together, known.leaving, known.device_choice)
        followed.grounds.append(_Ground(basis))
    for uid in coming:
        followed.pending.pop(uid, None)  # promised anew, it is the last
        ground = None if is_by_environment(reservations[uid]) else followed.grounds[-1]
        followed.pending[uid] = _Pending(reservations[uid], ground, at_s)


def _is_still_known(
    ground: _Ground,
    status: GPUNodeStatus,
    reservations: Mapping[str, Reservation],
    leaving: Set[str],
) -> bool:
    """Whether nothing differs but that more was promised since."""
    return (
        ground.basis.status is status
        and ground.basis.leaving == leaving
        and ground.basis.reservations.keys() | ground.reservations.keys() <= reservations.keys()
    )


def _since(ground: _Ground, status: GPUNodeStatus, later: Set[str]) -> Since:
    every = ground.unreserved_pods | ground.reservations
    every = {o: p for o, p in every.items() if o not in ground.basis.reservations}
    ours = {
        other: reservation
        for other, reservation in every.items()
        if other in ground.reservations and ADOPTED not in reservation.flags
    }
    others = {other: reservation for other, reservation in every.items() if other not in ours}
    return Since(status, ours, others, later, ground.changes)
