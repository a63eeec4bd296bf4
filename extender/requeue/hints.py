"""Decides which rejected pods kube-scheduler should retry, and when.

kube-scheduler does not see GPU memory become free or SMs become idle, and would not retry a
rejected pod for minutes. So the pod is requeued once whenever a node on which it fits gains
headroom, and if the pod limits SM activity, also whenever the SM activity of such a node falls.
Pods with a higher priority come first, and older pods before younger pods. The pods that are
requeued together also fit together. A requeued pod has a *claim* on a node until it is bound or
rejected again. Until then, no other pod is requeued for the same headroom. If the pod is rejected
again, the next pod is requeued. So a pod that kube-scheduler rejects for other reasons may delay
other pods, but never blocks them.

A pass over thousands of pods and nodes takes a while, and kube-scheduler's calls must not wait for
it. So it runs in steps of a few milliseconds, and its results for one pod are reused for all pods
with the same request.

The pod's condition shows a rejection by any replica of Headroom. The journal shows the rejections
of this replica before the watch delivers the condition.
"""

import re
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from headroom.contract.annotations import MAX_SM, RETRY
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.cluster.trackers.heartbeats import NEVER_S
from headroom.core.cluster.trackers.nominations import yields
from headroom.core.journal.journal import Decision, Journal
from headroom.core.placement.fit import fit
from headroom.core.placement.request import Kind, Unreadable, VramRequest
from headroom.core.placement.snapshot import Mask, Snapshot
from headroom.core.rules.eligible_nodes import eligibility_key, eligible
from headroom.core.whatif.node_whatif import rejection_beside

#: Maximum duration of a claim in seconds. It is shorter than kube-scheduler's maximum backoff of 10
#: s, because memory must not stay free for a pod that is not tried. A pod that is tried later waits
#: until a node gains headroom again.
CLAIM_S = 2.0
#: A pod that passed filter less than this time ago counts as being bound, even if its condition
#: still shows a rejection.
BINDING_S = 5.0
#: Initial and maximum delay of pods that are requeued repeatedly without success.
BACK_OFF_S, MAX_BACK_OFF_S = 0.25, 10.0
#: Maximum number of pods that are requeued together. Each requeue is a write, and the other pods
#: follow soon.
AT_ONCE = 64
#: Maximum number of claimed nodes that are checked for one pod. Each check takes a millisecond.
CROWDED = 8
#: Maximum number of such checks in one pass. The next pass reuses their results and continues.
MOST_WEIGHED = 256
#: Number of nodes on which a kind of request is fitted before control returns to the caller.
FITTED_TOGETHER = 256


@dataclass(slots=True)
class _Wait:
    """The state of one pending pod."""

    #: Generation of the snapshot on which the pod was last checked.
    generation: int = 0
    #: The pod's retry annotation as last seen, and as this replica last wrote it. If they differ,
    #: another replica wrote the annotation.
    seen: str | None = None
    written: str | None = None
    #: When this replica saw that another replica had requeued the pod, on the monotonic clock.
    by_another_s: float = NEVER_S
    #: The time when this replica requeued the pod, in Unix seconds like the times of decisions.
    requeued_at_s: float = 0.0
    #: The claimed node, or an empty string, and the end of the claim on the monotonic clock.
    claim: str = ""
    claim_until_s: float = NEVER_S
    #: Number of requeues so far, from which the backoff is computed.
    attempts: int = 0
    not_before_s: float = NEVER_S
    #: The last version of the pod, whether its condition contains a rejection by Headroom, and the
    #: key of its eligible nodes.
    pod: Pod | None = None
    rejected: bool = False
    eligibility: bytes = b""
    #: The pod's request, computed with ``default_vram`` of its namespace.
    request: VramRequest | Unreadable | None = None
    default_vram: str | None = None


#: The kind of request, the node, the generation of the node's last change, and the pods that claim
#: the node.
_ClaimCheck = tuple[Kind, str, int, tuple[tuple[str, str], ...]]


class RequeueHints:
    """Tracks the requeued pods. If this state is lost, each pod gets at most one extra requeue."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        #: Whether pods that might fit were skipped in the last pass.
        self.pending = False
        #: Results of the last pass for claimed nodes.
        self._claim_checks: Mapping[_ClaimCheck, bool] = {}

    def due(
        self, state: Cluster, journal: Journal, now_s: float, wall_s: float
    ) -> Iterator[Pod | None]:
        """Yield at most ``AT_ONCE`` pods to requeue now. A yielded pod counts as requeued.

        When the iterator yields None, the caller may do other work first.
        """
        snap = state.snapshot()
        unbound = {pod.metadata.uid: pod for pod in state.unbound()}
        self._waits = {uid: wait for uid, wait in self._waits.items() if uid in unbound}
        self.pending = False
        if not unbound:
            return
        claims = {name: list(nominees) for name, nominees in state.holds.nominees(now_s).items()}
        for uid, wait in self._waits.items():
            if wait.claim and _claims(wait, journal.of_uid(uid), now_s):
                _claim(claims, wait.claim, unbound[uid])
                self.pending = True
            else:
                wait.claim = ""
        checks = _Checks(state, snap, now_s, self._claim_checks)
        found = 0
        for pod in sorted(unbound.values(), key=_urgency):
            yield None
            decision = journal.of_uid(pod.metadata.uid)
            known = self._waits.get(pod.metadata.uid)
            wait = known if known is not None and known.pod is pod else self._seen(pod)
            if not _is_rejected(wait, decision, wall_s):
                continue
            if (retry := pod.annotation(RETRY)) not in (wait.seen, wait.written):
                wait.by_another_s = now_s
            wait.seen = retry
            # If the wall clock was set back, decisions would seem older than this requeue.
            wait.requeued_at_s = min(wait.requeued_at_s, wall_s)
            if wait.claim:
                continue
            node = yield from self._find_node(pod, wait, decision, checks, claims)
            if node is None:
                continue
            _claim(claims, node, pod)
            wait.claim, wait.claim_until_s, wait.requeued_at_s = node, now_s + CLAIM_S, wall_s
            self.pending = True
            if now_s - wait.by_another_s < CLAIM_S:
                continue  # if the pod was requeued for another node, a later pass checks it again
            wait.generation = snap.generation
            wait.not_before_s = now_s + min(BACK_OFF_S * 2**wait.attempts, MAX_BACK_OFF_S)
            wait.attempts = min(wait.attempts + 1, 16)
            yield pod
            found += 1
            if found == AT_ONCE:
                break
        self._claim_checks = checks.claim_checks

    def _seen(self, pod: Pod) -> _Wait:
        """Return the state of the pod, after updating everything that depends on the pod's
        version."""
        wait = self._waits.setdefault(pod.metadata.uid, _Wait(seen=pod.annotation(RETRY)))
        wait.pod, wait.rejected, wait.request = pod, rejected_by_us(pod), None
        wait.eligibility = eligibility_key(pod)
        return wait

    def requeued(self, uid: str, retry: str) -> None:
        """Record the pod's current retry annotation, which this replica or a faster replica has
        written."""
        if (wait := self._waits.get(uid)) is not None:
            wait.written = retry

    def missed(self, uid: str) -> None:
        """Release the claim of a pod that could not be requeued."""
        if (wait := self._waits.get(uid)) is not None:
            wait.claim, wait.generation, self.pending = "", 0, True

    def _find_node(
        self,
        pod: Pod,
        wait: _Wait,
        decision: Decision | None,
        checks: "_Checks",
        claims: dict[str, list[Pod]],
    ) -> Generator[None, None, str | None]:
        """Return a node on which the pod fits and that improved since the pod's last check."""
        since = wait.generation
        if decision is not None and not decision.fits:
            if decision.sure:
                since = max(since, decision.generation)
            elif decision.at_s > wait.requeued_at_s:
                since = 0  # rejected because of assumed binds that may have failed
        request = checks.request_of(pod, wait, since)
        names = (yield from checks.improved_since(wait, request, since)) if request else []
        if request is None or not names:
            wait.generation = checks.snap.generation
            return None
        if checks.now_s < wait.not_before_s:
            self.pending = True
            return None
        # A node on which victims were evicted for this pod comes first.
        own = checks.state.holds.node_of(pod.metadata.uid)
        if own in names and not checks.preceding(pod, claims.get(own, ()), own):
            return own
        for name in names:
            if name not in claims:
                return name
        for name in names[:CROWDED]:
            others = checks.preceding(pod, claims[name], name)
            fits = checks.fits_beside(request, name, others)
            if fits:
                return name
            if fits is None:
                break
            yield
        # The node becomes available if the pods that claim it are not bound there.
        self.pending = True
        return None


class _Checks:
    """The checks of one pass on one snapshot. Results are cached, because many requests are equal.

    ``previous`` contains the claim checks of the previous pass, which are valid for unchanged
    claims and nodes.
    """

    def __init__(
        self,
        state: Cluster,
        snap: Snapshot,
        now_s: float,
        previous: Mapping[_ClaimCheck, bool],
    ) -> None:
        self.state, self.snap, self.now_s = state, snap, now_s
        self._previous = previous
        self.claim_checks: dict[_ClaimCheck, bool] = {}
        self._weighed = 0
        self._latest = (
            state.headroom_gains.latest,
            max(state.headroom_gains.latest, state.sm_decreases.latest),
        )
        #: Snapshot rows of the nodes that have improved since a generation, by that generation and
        #: by whether lower SM activity counts as an improvement.
        self._rows: dict[tuple[int, bool], list[int]] = {}
        #: For each kind of request, the mask of the checked rows and the mask of the rows on which
        #: it fits.
        self._fits: dict[Kind, tuple[Mask, Mask]] = {}
        #: Whether a node is eligible, by eligibility key and node.
        self._eligible: dict[bytes, dict[str, bool]] = {}
        #: The nodes found by ``improved_since``, by kind of request, eligibility key and
        #: generation.
        self._names: dict[tuple[Kind, bytes, int], list[str]] = {}

    def request_of(self, pod: Pod, wait: _Wait, generation: int) -> VramRequest | None:
        """Return the pod's request, or None if it requests no GPU or no node has improved since
        ``generation``."""
        if self._latest[pod.annotation(MAX_SM) is not None] <= generation:
            return None
        default = self.state.namespaces.default_vram(pod.metadata.namespace)
        if wait.request is None or wait.default_vram != default:
            wait.request, wait.default_vram = self.state.understand(pod), default
        request = wait.request
        return request if isinstance(request, VramRequest) and request.asks else None

    def improved_since(
        self, wait: _Wait, request: VramRequest, generation: int
    ) -> Generator[None, None, list[str]]:
        """Return the eligible nodes that have improved since ``generation`` and on which the
        request fits."""
        key = request.kind, wait.eligibility, generation
        if key in self._names:
            return self._names[key]
        newer = np.array(self._better_since(generation, request.max_sm_ppm is not None), np.int64)
        masks = np.zeros((2, len(self.snap.nodes)), bool)
        checked, fits = self._fits.setdefault(request.kind, (masks[0], masks[1]))
        for start in range(0, len(newer), FITTED_TOGETHER):
            rows = newer[start : start + FITTED_TOGETHER]
            rows = rows[~checked[rows]]
            if len(rows):
                part = self.snap.part(rows)
                fits[rows] = fit(request, part, np.arange(len(rows)), self.now_s).fits
                checked[rows] = True
            yield
        names = [self.snap.nodes[row].name for row in newer[fits[newer]].tolist()]
        is_eligible = self._eligible.setdefault(wait.eligibility, {})
        for i, name in enumerate(names):
            if name not in is_eligible:
                node = self.state.node(name)
                assert wait.pod is not None
                is_eligible[name] = node is not None and eligible(wait.pod, node)
                if i % FITTED_TOGETHER == 0:
                    yield
        self._names[key] = [name for name in names if is_eligible[name]]
        return self._names[key]

    def _better_since(self, generation: int, lower_sm: bool) -> list[int]:
        key = generation, lower_sm
        if key not in self._rows:
            names = set(self.state.headroom_gains.since(generation))
            if lower_sm:
                names.update(self.state.sm_decreases.since(generation))
            row_of = self.snap.row_of
            self._rows[key] = sorted(row_of[name] for name in names if name in row_of)
        return self._rows[key]

    def preceding(self, pod: Pod, claiming: Sequence[Pod], name: str) -> list[Pod]:
        """Return the claiming pods that take precedence over the pod. These are all claiming pods
        except the pod itself and nominees with a lower rank."""
        node_of = self.state.holds.node_of
        is_nominated = node_of(pod.metadata.uid) == name
        return [
            other
            for other in claiming
            if other.metadata.uid != pod.metadata.uid
            and (node_of(other.metadata.uid) != name or yields(pod, other, is_nominated))
        ]

    def fits_beside(self, request: VramRequest, name: str, others: list[Pod]) -> bool | None:
        """Return whether the pod fits beside the other pods, or None if this pass has reached its
        maximum number of checks."""
        version = int(self.snap.changed_in[self.snap.row_of[name]])
        others_key = tuple((o.metadata.uid, o.metadata.resource_version) for o in others)
        question = request.kind, name, version, others_key
        fits = self.claim_checks.get(question, self._previous.get(question))
        if fits is None:
            if self._weighed == MOST_WEIGHED:
                return None
            self._weighed += 1
            fits = rejection_beside(self.state, request, name, others, self.now_s) is None
        self.claim_checks[question] = fits
        return fits


def _claim(claims: dict[str, list[Pod]], name: str, pod: Pod) -> None:
    claiming = claims.setdefault(name, [])
    if all(other.metadata.uid != pod.metadata.uid for other in claiming):
        claiming.append(pod)


def rejected_by_us(pod: Pod) -> bool:
    """Return whether kube-scheduler marked the pod as unschedulable with a reason of Headroom.

    Pods that failed with an error do not count, because kube-scheduler retries them anyway, and a
    requeue would not be faster.
    """
    return any(
        condition.type == "PodScheduled"
        and condition.status == "False"
        and condition.reason == "Unschedulable"
        and _ANY_REASON.search(condition.message) is not None
        for condition in (pod.status and pod.status.conditions) or ()
    )


_ANY_REASON = re.compile("|".join(re.escape(reason.sentence) for reason in Reason))


def _is_rejected(wait: _Wait, decision: Decision | None, wall_s: float) -> bool:
    if decision is not None and not decision.fits:
        return True
    if decision is not None and abs(wall_s - decision.at_s) < BINDING_S:
        return False
    return wait.rejected


def _claims(wait: _Wait, decision: Decision | None, now_s: float) -> bool:
    """Return whether the pod may still be bound to the node that it claims."""
    rejected = decision is not None and not decision.fits and decision.at_s > wait.requeued_at_s
    return not rejected and now_s < wait.claim_until_s


def _urgency(pod: Pod) -> tuple[int, str]:
    return -(pod.spec.priority or 0), pod.metadata.creation_timestamp or ""
