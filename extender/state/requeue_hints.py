"""Which refused pods to have kube-scheduler try again, when.

kube-scheduler does not see memory come free, nor SMs grow idle, and would leave a pod that we
refused for minutes. It is woken when there is room for it that it has not been tried for: once for
each time that a node where it fits got room, or grew calmer where the pod asks for that; the most
important and oldest first, and not more pods at once than fit together. A pod that was woken has a
*claim* on a node until it is bound or refused again, so that nobody else is woken for the same
room; a pod that comes back refused has had its turn, and the room goes to the next. So pods that
something we know nothing of keeps from a node delay the others, but never shut them out.

A look at thousands of pods and nodes takes a while, and kube-scheduler's calls must not wait for
it: it is made in steps of a few milliseconds, and what it finds out about one pod serves all that
ask for the same.

That a pod waits for us is told by its condition, whoever refused it. Our own journal is only ahead
of that: it knows what the pod was refused for before the condition has come back to us.
"""

import itertools
import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from contract.annotations import MAX_SM, RETRY
from contract.kube import Pod
from contract.reasons import Reason
from extender.bounded import Bounded
from extender.placement.candidate_devices import Mask
from extender.placement.fit import fit
from extender.placement.request import Kind, Unreadable, VramRequest
from extender.placement.snapshot import Rows, Snapshot
from extender.state.cluster_state import ClusterState
from extender.state.heartbeats import NEVER_S
from extender.state.journal import Decision, Journal
from extender.state.node_whatif import rejection_beside
from extender.state.nominations import yields
from extender.state.selectors import eligibility_key, eligible

#: For so long the room that a pod was woken for is kept for it.
CLAIM_S = 2.0
#: A pod that passed filter is being bound, whatever its condition still says.
BINDING_S = 5.0
#: Of pods that are woken in vain again and again.
BACK_OFF_S, MOST_BACK_OFF_S = 0.25, 10.0
#: Each is a write; the others come a moment later.
AT_ONCE = 64
#: Nodes with claims on them that are weighed for one pod: each costs a millisecond.
CROWDED = 8
#: Such weighings in one look; the rest is for the next, which knows the answers of this one.
MOST_WEIGHED = 256
MOST_KINDS = 4096
#: Nodes that are looked at for a kind of request before the caller may see to other things.
FITTED_TOGETHER = 256


@dataclass(slots=True)
class _Wait:
    """What became of one pod so far."""

    #: Snapshot that it was last looked at on, with everything that was room then.
    generation: int = 0
    #: Its annotation as seen last, and as we wrote it last: any other is of another replica.
    seen: str | None = None
    written: str | None = None
    #: When another replica was seen to have woken it, on the monotonic clock.
    by_another_s: float = NEVER_S
    #: Unix time, seconds: what decisions are dated with.
    requeued_at_s: float = 0.0
    #: Node, empty for none; on the monotonic clock.
    claim: str = ""
    claim_until_s: float = NEVER_S
    vain: int = 0
    not_before_s: float = NEVER_S
    #: The pod as it was read last: whether its condition quotes us, and what decides where it may
    #: run besides us.
    pod: Pod | None = None
    rejected: bool = False
    may_run: bytes = b""
    #: What it asks for, with this default of its namespace.
    request: VramRequest | Unreadable | None = None
    #: The number of its kind of request: kinds themselves are costly to compare.
    kind: int = 0
    default_vram: str | None = None

    def look(self, retry: str | None, now_s: float) -> None:
        if retry not in (self.seen, self.written):
            self.by_another_s = now_s
        self.seen = retry


#: Kind of request, node, generation in which that changed last, who has claims there.
_Beside = tuple[int, str, int, tuple[tuple[str, str], ...]]


class RequeueHints:
    """Remembers whom it named; all of it may be lost without harm, but for one wake too many."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        #: Whether some who would fit were passed over for now.
        self.pending = False
        #: What the last look found out about nodes with claims on them.
        self._beside: Mapping[_Beside, bool] = {}
        self._kinds = _Kinds()

    def due(self, state: ClusterState, journal: Journal, now_s: float, wall_s: float) -> list[Pod]:
        """Those to be woken now, at most ``AT_ONCE``; they count as woken from here on."""
        return [pod for pod in self.look(state, journal, now_s, wall_s) if pod is not None]

    def look(
        self, state: ClusterState, journal: Journal, now_s: float, wall_s: float
    ) -> Iterator[Pod | None]:
        """The same, one by one; None says that the caller may see to other things first."""
        snap = state.snapshot()
        unbound = {pod.metadata.uid: pod for pod in state.unbound()}
        self._waits = {uid: wait for uid, wait in self._waits.items() if uid in unbound}
        self.pending = False
        if not unbound:
            return
        claims: dict[str, list[Pod]] = {}
        for name, nominees in state.nominees(now_s).items():
            claims[name] = list(nominees)
        for uid, wait in self._waits.items():
            if wait.claim and _claims(wait, journal.of_uid(uid), now_s):
                _claim(claims, wait.claim, unbound[uid])
                self.pending = True
            else:
                wait.claim = ""
        look = _Look(state, snap, now_s, self._kinds, self._beside)
        found = 0
        for pod in sorted(unbound.values(), key=_urgency):
            yield None
            decision = journal.of_uid(pod.metadata.uid)
            known = self._waits.get(pod.metadata.uid)
            wait = known if known is not None and known.pod is pod else self._seen(pod)
            if not _waits_for_room(wait, decision, wall_s):
                continue
            retry = pod.annotation(RETRY)
            wait.look(retry, now_s)
            # Not later than now, as when the clock was ahead: decisions after it would not count.
            wait.requeued_at_s = min(wait.requeued_at_s, wall_s)
            if wait.claim:
                continue
            node = yield from self._room_for(pod, wait, decision, look, claims)
            if node is None:
                continue
            _claim(claims, node, pod)
            wait.claim, wait.claim_until_s, wait.requeued_at_s = node, now_s + CLAIM_S, wall_s
            self.pending = True
            if now_s - wait.by_another_s < CLAIM_S:
                continue  # if that was for other room, it is looked at again
            wait.generation = snap.generation
            wait.not_before_s = now_s + min(BACK_OFF_S * 2**wait.vain, MOST_BACK_OFF_S)
            wait.vain = min(wait.vain + 1, 16)
            yield pod
            found += 1
            if found == AT_ONCE:
                break
        self._beside = look.beside

    def _seen(self, pod: Pod) -> _Wait:
        """What is remembered of the pod, with what is read off it once for each of its versions."""
        wait = self._waits.setdefault(pod.metadata.uid, _Wait(seen=pod.annotation(RETRY)))
        wait.pod, wait.rejected, wait.request = pod, rejected_by_us(pod), None
        wait.may_run = eligibility_key(pod)
        return wait

    def requeued(self, uid: str, retry: str) -> None:
        """The pod carries this annotation now: ours, or that of a replica that was faster."""
        if (wait := self._waits.get(uid)) is not None:
            wait.written = retry

    def missed(self, uid: str) -> None:
        """It could not be woken."""
        if (wait := self._waits.get(uid)) is not None:
            wait.claim, wait.generation, self.pending = "", 0, True

    def _room_for(
        self,
        pod: Pod,
        wait: _Wait,
        decision: Decision | None,
        look: "_Look",
        claims: dict[str, list[Pod]],
    ) -> Generator[None, None, str | None]:
        """A node on which it fits, that got room since it was looked at last."""
        since = wait.generation
        if decision is not None and not decision.fits:
            if decision.sure:
                since = max(since, decision.generation)
            elif decision.at_s > wait.requeued_at_s:
                since = 0  # refused for pods that perhaps never came
        request = look.asks(pod, wait, since)
        names = (yield from look.roomier_since(wait, request, since)) if request else []
        if request is None or not names:
            wait.generation = look.snap.generation
            return None
        if look.now_s < wait.not_before_s:
            self.pending = True
            return None
        # Where others left for it, it is tried first.
        own = look.state.nominations.node_of(pod.metadata.uid)
        if own in names and not look.before(pod, claims.get(own, ()), own):
            return own
        for name in names:
            if name not in claims:
                return name
        for name in names[:CROWDED]:
            others = look.before(pod, claims[name], name)
            fits = look.fits_beside(pod, wait.kind, name, others)
            if fits:
                return name
            if fits is None:
                break
            yield
        self.pending = True  # if those who claim it do not take it, it has a turn
        return None


class _Kinds:
    """Numbers that are the same for requests of one kind, and never for two kinds."""

    def __init__(self) -> None:
        self._number_of: Bounded[Kind, int] = Bounded(MOST_KINDS)
        self._numbers = itertools.count(1)

    def number(self, kind: Kind) -> int:
        number = self._number_of.get(kind)
        if number is None:  # also for a kind that was forgotten
            number = self._number_of[kind] = next(self._numbers)
        return number


class _Look:
    """One snapshot, and what has been found out about it, since many pods ask for the same.

    ``before``: what was found out by the look before, for claims and nodes that are still the same.
    """

    def __init__(
        self,
        state: ClusterState,
        snap: Snapshot,
        now_s: float,
        kinds: "_Kinds",
        before: Mapping[_Beside, bool],
    ) -> None:
        self.state, self.snap, self.now_s = state, snap, now_s
        self._kinds = kinds
        self._before = before
        self.beside: dict[_Beside, bool] = {}
        self._weighed = 0
        self._latest = state.rooms.latest, max(state.rooms.latest, state.calms.latest)
        #: Generation, and whether idler SMs count -> rows that got better since.
        self._rows: dict[tuple[int, bool], list[int]] = {}
        #: Kind of request -> rows that were asked about, and those of them where it fits.
        self._fits: dict[int, tuple[Mask, Mask]] = {}
        #: Selector, affinity and tolerations -> node -> whether such a pod may run there.
        self._eligible: dict[bytes, dict[str, bool]] = {}
        #: Kind of request, where it may run, generation -> nodes.
        self._names: dict[tuple[int, bytes, int], list[str]] = {}

    def asks(self, pod: Pod, wait: _Wait, generation: int) -> VramRequest | None:
        """What it asks for; None where it asks for nothing, or nothing got better since then."""
        if self._latest[pod.annotation(MAX_SM) is not None] <= generation:
            return None
        default = self.state.namespaces.default_vram(pod.metadata.namespace)
        if wait.request is None or wait.default_vram != default:
            wait.request, wait.default_vram = self.state.understand(pod), default
            if isinstance(wait.request, VramRequest):
                wait.kind = self._kinds.number(wait.request.kind)
        request = wait.request
        return request if isinstance(request, VramRequest) and request.asks else None

    def roomier_since(
        self, wait: _Wait, request: VramRequest, generation: int
    ) -> Generator[None, None, list[str]]:
        key = wait.kind, wait.may_run, generation
        if key not in self._names:
            self._names[key] = yield from self._find(wait, request, generation)
        return self._names[key]

    def _find(
        self, wait: _Wait, request: VramRequest, generation: int
    ) -> Generator[None, None, list[str]]:
        newer = np.array(self._better_since(generation, request.max_sm_ppm is not None), np.int64)
        for start in range(0, len(newer), FITTED_TOGETHER):
            self._fit(wait.kind, request, newer[start : start + FITTED_TOGETHER])
            yield
        if not len(newer):
            return []
        _, fits = self._fits[wait.kind]
        names = [self.snap.nodes[row].name for row in newer[fits[newer]].tolist()]
        where = self._eligible.setdefault(wait.may_run, {})
        for i, name in enumerate(names):
            if name not in where:
                node = self.state.node(name)
                assert wait.pod is not None
                where[name] = node is not None and eligible(wait.pod, node)
                if i % FITTED_TOGETHER == 0:
                    yield
        return [name for name in names if where[name]]

    def _better_since(self, generation: int, calmer: bool) -> list[int]:
        key = generation, calmer
        if key not in self._rows:
            names = set(self.state.rooms.since(generation))
            if calmer:
                names.update(self.state.calms.since(generation))
            row_of = self.snap.row_of
            self._rows[key] = sorted(row_of[name] for name in names if name in row_of)
        return self._rows[key]

    def _fit(self, kind: int, request: VramRequest, asked: Rows) -> None:
        """Find out where it fits, of these rows at least: those with new room are few."""
        if kind not in self._fits:
            nothing = np.zeros(len(self.snap.nodes), bool)
            self._fits[kind] = nothing, nothing.copy()
        known, fits = self._fits[kind]
        rows = asked[~known[asked]]
        if len(rows):
            verdicts = fit(request, self.snap.part(rows), np.arange(len(rows)), self.now_s)
            known[rows] = True
            fits[rows] = verdicts.fits

    def before(self, pod: Pod, claiming: Sequence[Pod], name: str) -> list[Pod]:
        """Those whose claim the pod has to leave room for: all but itself, and but nominees that it
        outranks."""
        node_of = self.state.nominations.node_of
        both = node_of(pod.metadata.uid) == name
        return [
            other
            for other in claiming
            if other.metadata.uid != pod.metadata.uid
            and (node_of(other.metadata.uid) != name or yields(pod, other, both))
        ]

    def fits_beside(self, pod: Pod, kind: int, name: str, others: list[Pod]) -> bool | None:
        """Whether there is room beside them; None where it is left to the next look."""
        version = int(self.snap.changed_in[self.snap.row_of[name]])
        who = tuple((o.metadata.uid, o.metadata.resource_version) for o in others)
        question = kind, name, version, who
        fits = self.beside.get(question, self._before.get(question))
        if fits is None:
            if self._weighed == MOST_WEIGHED:
                return None
            self._weighed += 1
            fits = rejection_beside(self.state, pod, name, others, self.now_s) is None
        self.beside[question] = fits
        return fits


def _claim(claims: dict[str, list[Pod]], name: str, pod: Pod) -> None:
    there = claims.setdefault(name, [])
    if all(other.metadata.uid != pod.metadata.uid for other in there):
        there.append(pod)


def rejected_by_us(pod: Pod) -> bool:
    """Whether kube-scheduler says of it that it waits, and quotes us.

    After an error it is tried again by itself, and changing it does not hasten that.
    """
    return any(
        condition.type == "PodScheduled"
        and condition.status == "False"
        and condition.reason == "Unschedulable"
        and _QUOTES_US.search(condition.message) is not None
        for condition in (pod.status and pod.status.conditions) or ()
    )


_QUOTES_US = re.compile("|".join(re.escape(reason.sentence) for reason in Reason))


def _waits_for_room(wait: _Wait, decision: Decision | None, wall_s: float) -> bool:
    if decision is not None and not decision.fits:
        return True
    if decision is not None and abs(wall_s - decision.at_s) < BINDING_S:
        return False
    return wait.rejected


def _claims(wait: _Wait, decision: Decision | None, now_s: float) -> bool:
    """Whether it may still take the room that it was woken for."""
    rejected = decision is not None and not decision.fits and decision.at_s > wait.requeued_at_s
    return not rejected and now_s < wait.claim_until_s


def _urgency(pod: Pod) -> tuple[int, str]:
    return -(pod.spec.priority or 0), pod.metadata.creation_timestamp or ""
