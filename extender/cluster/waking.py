"""Which refused pods to have kube-scheduler try again, when.

kube-scheduler does not see memory come free, and would leave a pod that we refused for minutes. It
is woken when there is room for it that it has not been tried for: once for each time that a node
where it fits got room, the most important and oldest first, and not more pods at once than fit
together. A pod that was woken has a *claim* on a node until it is bound or refused again, so that
nobody else is woken for the same room; a pod that comes back refused has had its turn, and the room
goes to the next. So pods that something we know nothing of keeps from a node delay the others, but
never shut them out.

That a pod waits for us is told by its condition, whoever refused it. Our own journal is only ahead
of that: it knows what the pod was refused for before the condition has come back to us.
"""

from dataclasses import dataclass

import msgspec
import numpy as np

from contract.annotations import RETRY
from contract.kube import Pod
from contract.reasons import Reason
from extender.cluster.eligible import eligible
from extender.cluster.freshness import NEVER_S
from extender.cluster.state import ClusterState
from extender.journal import Decision, Journal
from extender.placement.candidates import Mask
from extender.placement.fit import fit
from extender.placement.request import VramRequest
from extender.placement.snapshot import Snapshot

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
_encode = msgspec.json.Encoder(order="sorted").encode


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
    woken_at_s: float = 0.0
    #: Node, empty for none; on the monotonic clock.
    claim: str = ""
    claim_until_s: float = NEVER_S
    vain: int = 0
    not_before_s: float = NEVER_S

    def look(self, retry: str | None, now_s: float) -> None:
        if retry not in (self.seen, self.written):
            self.by_another_s = now_s
        self.seen = retry


class Waking:
    """Remembers whom it named; all of it may be lost without harm, but for one wake too many."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        #: Whether some who would fit were passed over for now.
        self.pending = False

    def due(self, state: ClusterState, journal: Journal, now_s: float, wall_s: float) -> list[Pod]:
        """Those to be woken now, at most ``AT_ONCE``; they count as woken from here on."""
        snap = state.snapshot()
        unbound = {pod.metadata.uid: pod for pod in state.unbound()}
        self._waits = {uid: wait for uid, wait in self._waits.items() if uid in unbound}
        self.pending = False
        if not unbound:
            return []
        claims: dict[str, list[Pod]] = {}
        for uid, wait in self._waits.items():
            if wait.claim and _claims(wait, journal.of_uid(uid), now_s):
                claims.setdefault(wait.claim, []).append(unbound[uid])
                self.pending = True
            else:
                wait.claim = ""
        look = _Look(state, snap, now_s)
        found: list[Pod] = []
        for pod in sorted(unbound.values(), key=_urgency):
            decision = journal.of_uid(pod.metadata.uid)
            if not _waits_for_room(pod, decision, wall_s):
                continue
            retry = pod.annotation(RETRY)
            wait = self._waits.setdefault(pod.metadata.uid, _Wait(seen=retry))
            wait.look(retry, now_s)
            if wait.claim:
                continue
            node = self._room_for(pod, wait, decision, look, claims)
            if node is None:
                continue
            claims.setdefault(node, []).append(pod)
            wait.claim, wait.claim_until_s, wait.woken_at_s = node, now_s + CLAIM_S, wall_s
            self.pending = True
            if now_s - wait.by_another_s < CLAIM_S:
                continue  # if that was for other room, it is looked at again
            found.append(pod)
            wait.generation = snap.generation
            wait.not_before_s = now_s + min(BACK_OFF_S * 2**wait.vain, MOST_BACK_OFF_S)
            wait.vain = min(wait.vain + 1, 16)
            if len(found) == AT_ONCE:
                break
        return found

    def woken(self, uid: str, retry: str) -> None:
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
    ) -> str | None:
        """A node on which it fits, that got room since it was looked at last."""
        since = wait.generation
        if decision is not None and not decision.fits:
            if decision.sure:
                since = max(since, decision.generation)
            elif decision.at_s > wait.woken_at_s:
                since = 0  # refused for pods that perhaps never came
        request = look.asks(pod, since)
        names = look.roomier_since(pod, request, since) if request else []
        if request is None or not names:
            wait.generation = look.snap.generation
            return None
        if look.now_s < wait.not_before_s:
            self.pending = True
            return None
        for name in names:
            if name not in claims:
                return name
        for name in names[:CROWDED]:
            if look.fits_beside(pod, request, name, claims[name]):
                return name
        self.pending = True  # if those who claim it do not take it, it has a turn
        return None


class _Look:
    """One snapshot, and what has been found out about it, since many pods ask for the same."""

    def __init__(self, state: ClusterState, snap: Snapshot, now_s: float) -> None:
        self.state, self.snap, self.now_s = state, snap, now_s
        self._room_in = np.fromiter(
            (state.room_in(node.name) for node in snap.nodes), np.int64, len(snap.nodes)
        )
        #: Kind of request -> rows that were asked about, and those of them where it fits.
        self._fits: dict[object, tuple[Mask, Mask]] = {}
        #: Selector, affinity and tolerations -> node -> whether such a pod may run there.
        self._eligible: dict[bytes, dict[str, bool]] = {}
        self._refused_beside: set[tuple[object, str, int]] = set()

    def asks(self, pod: Pod, generation: int) -> VramRequest | None:
        """What it asks for; None where it asks for nothing, or nothing got room since then."""
        if not len(self._room_in) or self._room_in.max() <= generation:
            return None
        request = self.state.understand(pod)
        return request if isinstance(request, VramRequest) and request.asks else None

    def roomier_since(self, pod: Pod, request: VramRequest, generation: int) -> list[str]:
        newer = self._room_in > generation
        rows = np.flatnonzero(newer & self._fits_on(request, newer)).tolist()
        if not rows:
            return []
        spec = pod.spec
        where = self._eligible.setdefault(
            _encode((spec.node_selector, spec.affinity, spec.tolerations)), {}
        )
        names = [self.snap.nodes[row].name for row in rows]
        for name in names:
            if name not in where:
                node = self.state.node(name)
                where[name] = node is not None and eligible(pod, node)
        return [name for name in names if where[name]]

    def _fits_on(self, request: VramRequest, asked: Mask) -> Mask:
        """Where it fits, of the rows asked about at least: those with new room are few."""
        nothing = np.zeros(len(asked), bool)
        known, fits = self._fits.get(request.kind, (nothing, nothing))
        if (asked & ~known).any():
            rows = np.flatnonzero(asked & ~known)
            verdicts = fit(request, self.snap.part(rows), np.arange(len(rows)), self.now_s)
            known, fits = known | asked, fits.copy()
            fits[rows] = verdicts.fits
            self._fits[request.kind] = known, fits
        return fits

    def fits_beside(self, pod: Pod, request: VramRequest, name: str, others: list[Pod]) -> bool:
        question = (request.kind, name, len(others))  # claims only grow while we look
        if question in self._refused_beside:
            return False
        fits = self.state.refusal_beside(pod, name, others, self.now_s) is None
        if not fits:
            self._refused_beside.add(question)
        return fits


def refused_by_us(pod: Pod) -> bool:
    """Whether kube-scheduler says of it that it waits, and quotes us.

    After an error it is tried again by itself, and changing it does not hasten that.
    """
    return any(
        condition.type == "PodScheduled"
        and condition.status == "False"
        and condition.reason == "Unschedulable"
        and any(reason.sentence in condition.message for reason in Reason)
        for condition in (pod.status and pod.status.conditions) or ()
    )


def _waits_for_room(pod: Pod, decision: Decision | None, wall_s: float) -> bool:
    if decision is not None and not decision.fits:
        return True
    if decision is not None and abs(wall_s - decision.at_s) < BINDING_S:
        return False
    return refused_by_us(pod)


def _claims(wait: _Wait, decision: Decision | None, now_s: float) -> bool:
    """Whether it may still take the room that it was woken for."""
    refused = decision is not None and not decision.fits and decision.at_s > wait.woken_at_s
    return not refused and now_s < wait.claim_until_s


def _urgency(pod: Pod) -> tuple[int, str]:
    return -(pod.spec.priority or 0), pod.metadata.creation_timestamp or ""
