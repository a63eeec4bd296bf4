"""The body that explains why a pod is pending or where it is placed: fields and sentences."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import BaseModel

from contract.annotations import PREFIX
from contract.kube import Pod
from contract.quantity import gib
from extender.console.bodies import (
    AskView,
    Body,
    ReasonView,
    Recomputed,
    ask_view,
    counted,
    obstacle_view,
    reason_view,
)
from extender.console.decision_bodies import DecisionView, FilterView, Unanswered
from extender.console.node_views import Aged, DeviceView, device_view
from extender.console.occupant_bodies import HeldView, held_view
from extender.console.visible_pods import Sees, everything
from extender.placement.explain import DeviceExplanation, Explanation, NodeExplanation
from extender.placement.explanation_text import explanation_lines
from extender.placement.request import Unreadable, VramRequest
from extender.state.device_occupants import Held
from extender.state.explained_nodes import Feasible
from extender.state.journal import scheduler_of
from extender.state.suggestions import Suggestion, but_not_checked

#: kube-scheduler retries a pod that nothing requeued after this time, by default.
FLUSHED_AFTER = timedelta(minutes=5)
#: Maximum number of blocking pods shown for a node, the largest first.
MOST_BLOCKERS = 10
#: Maximum number of characters quoted from a scheduler's message.
MOST_QUOTED = 500


class CandidateView(BaseModel):
    device: DeviceView
    need_bytes: int
    free_bytes: int
    short_bytes: int


class NearestView(BaseModel):
    node: str
    fits: bool
    reason: str | None
    message: str | None
    #: Evidence for the message, if it does not include any.
    detail: str | None
    #: "not measured" and the source of the capacity, if no agent reports the node.
    unmeasured: str | None
    #: Memory that the pod lacks on its fullest candidate device; null if memory does not decide.
    short_bytes: int | None
    candidates: list[CandidateView]
    #: 0 to 1, the highest wins: the weighted mean of ``score_terms`` (setting score_weights). Null,
    #: with no terms, if the pod does not fit.
    score_ratio: float | None
    score_terms: dict[str, float]
    #: Pods that hold the memory or the replicas that the pod lacks: at most 10, the largest first.
    blockers: list[HeldView]
    #: Number of such pods that the caller may not get, and the memory that they hold in total.
    hidden_blockers: int
    hidden_blockers_bytes: int
    #: All of this as lines to read.
    lines: list[str]


class SuggestionsView(BaseModel):
    """A change that would help; each was simulated first."""

    #: lower (the request), wait (for a pod), eligible (change where the pod may run), replicas (add
    #: some), quota (it would reject the pod if created again), or the value for a node or device
    #: that must be repaired.
    kind: str
    sentence: str
    #: The node concerned; null if there are several, counted in ``nodes``.
    node: str | None
    nodes: int
    lower_to_bytes: int | None
    wait_for: HeldView | None


class AttemptsView(BaseModel):
    """The attempts of kube-scheduler to place the pod, as far as any replica has them on record."""

    first_at: str | None
    last_at: str | None
    times: int
    #: Number of nodes offered in the last attempt, and of known nodes that were not offered.
    offered_nodes: int | None
    not_offered_nodes: int | None
    #: When kube-scheduler retries at the latest, with its default settings; null if it does not, or
    #: if that is not known.
    again_by: str | None
    message: str


class ExplainBody(Body, Recomputed):
    namespace: str
    name: str
    uid: str
    #: The node the pod is bound to; null while it is pending.
    bound_to: str | None
    #: Changes of its request after it was bound, and their effect; null if there are none.
    changed: str | None
    #: Annotations that Headroom wrote on the pod when it bound it.
    annotations: dict[str, str]
    #: "bound", "fits", "rejected", "gated" (scheduling gates), "other_scheduler" (the scheduler of
    #: the pod does not call Headroom), "not_ours" (requests no managed GPU) or "unreadable".
    verdict: str
    message: str
    request: list[AskView]
    #: Number of eligible nodes that can take the pod, on the newest snapshot. Only nodes of its
    #: last filter call count, if they are on record.
    fits: int
    reasons: list[ReasonView]
    #: Nodes that kube-scheduler does not offer, by selector, affinity, taint or cordon.
    ineligible: list[ReasonView]
    #: Number of eligible nodes that kube-scheduler left out of its last filter call.
    left_out_nodes: int
    #: Checks of kube-scheduler that this answer does not include, such as volumes.
    not_checked: list[str]
    #: Digest of the verdicts on all nodes, which `headroom replay` prints too; null without any.
    verdict_digest: str | None
    nearest: list[NearestView]
    #: The sentences of ``advice``.
    suggestions: list[str]
    advice: list[SuggestionsView]
    attempts: AttemptsView
    #: The last decision, merged over all replicas; the fields above are recomputed.
    last_decision: DecisionView | None
    unanswered: list[Unanswered]


def candidate_view(device: DeviceExplanation, aged: Aged, sees: Sees) -> CandidateView:
    return CandidateView(
        device=device_view(device.terms, aged, sees),
        need_bytes=device.need_bytes,
        free_bytes=device.free_bytes,
        short_bytes=device.short_bytes,
    )


def nearest_view(
    node: NodeExplanation, aged: Aged, blockers: Sequence[Held] = (), sees: Sees = everything
) -> NearestView:
    shown, hidden = list[Held](), list[Held]()
    for held in blockers:
        (shown if sees(held.namespace, held.name) else hidden).append(held)
    shown = shown[:MOST_BLOCKERS]
    return NearestView(
        node=node.node,
        fits=node.reason is None,
        reason=node.reason.code if node.reason else None,
        message=node.reason.sentence if node.reason else None,
        detail=node.detail or None,
        unmeasured=node.unmeasured or None,
        short_bytes=node.short_bytes,
        score_ratio=node.score,
        score_terms=dict(node.terms),
        candidates=[candidate_view(device, aged, sees) for device in node.candidates],
        blockers=[held_view(held) for held in shown],
        hidden_blockers=len(hidden),
        hidden_blockers_bytes=sum(held.charged_bytes for held in hidden),
        lines=[*explanation_lines(node), *map(_holds, shown), *_held_by_hidden(hidden)],
    )


@dataclass(frozen=True, slots=True)
class Explained:
    """The inputs of ``explain_body``."""

    pod: Pod
    request: VramRequest | Unreadable
    #: None if the request of the pod cannot be read.
    explanation: Explanation | None
    #: How the request was changed after the pod was bound; "" if it was not.
    changed: str
    digest: str
    advice: Sequence[Suggestion]
    #: The blocking pods of each of the nearest nodes.
    blockers: Sequence[Sequence[Held]]
    last: DecisionView | None
    unanswered: Sequence[Unanswered]
    sees: Sees
    #: None if the request of the pod cannot be read.
    where: Feasible | None
    #: Schedulers known to call Headroom.
    schedulers: Sequence[str]
    #: Number of known nodes.
    nodes: int
    generation: int


def explain_body(why: Explained, aged: Aged, generated_at: str) -> ExplainBody:
    pod, request, explanation, where = why.pod, why.request, why.explanation, why.where
    asked = why.last is not None
    verdict, message = verdict_of(pod, request, explanation, where, asked, why.schedulers)
    annotations = pod.metadata.annotations or {}
    nearest = explanation.nearest if explanation else ()
    return ExplainBody(
        generatedAt=generated_at,
        snapshot_generation=why.generation,
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        bound_to=pod.node or None,
        changed=why.changed or None,
        annotations={k: v for k, v in annotations.items() if k.startswith(PREFIX)},
        verdict=verdict,
        message=message,
        request=[ask_view(ask) for ask in request.containers]
        if isinstance(request, VramRequest)
        else [],
        fits=explanation.fits if explanation else 0,
        reasons=[reason_view(*pair) for pair in explanation.reasons] if explanation else [],
        ineligible=[obstacle_view(*pair) for pair in where.obstacles] if where else [],
        left_out_nodes=where.left_out if where else 0,
        not_checked=list(where.not_checked()) if where else [],
        verdict_digest=why.digest or None,
        nearest=[
            nearest_view(node, aged, held, why.sees)
            for node, held in zip(nearest, why.blockers, strict=True)
        ],
        suggestions=[one.sentence for one in why.advice],
        advice=[_advice_view(one) for one in why.advice],
        attempts=_attempts(pod, why.last, why.nodes),
        last_decision=why.last,
        unanswered=list(why.unanswered),
    )


def verdict_of(
    pod: Pod,
    request: VramRequest | Unreadable,
    explanation: Explanation | None,
    where: Feasible | None,
    asked: bool,
    schedulers: Sequence[str],
) -> tuple[str, str]:
    """Return the verdict of ``ExplainBody`` and its message.

    ``asked``: whether any filter call for the pod is on record. ``schedulers``: the schedulers
    known to call Headroom.
    """
    if isinstance(request, Unreadable):
        return "unreadable", request.message
    if pod.node:
        return "bound", f"bound to node {pod.node}"
    if not request.asks:
        return "not_ours", "the pod requests no GPU that Headroom manages"
    if found := not_tried(pod, asked, schedulers):
        return found
    if explanation is None or where is None:
        return "rejected", "no node can take the pod"
    return _fits_or_not(explanation, where)


def not_tried(pod: Pod, asked: bool, schedulers: Sequence[str]) -> tuple[str, str] | None:
    """Return verdict and message if no scheduler that calls Headroom tries the pod, else None."""
    if gates := [gate.name for gate in pod.spec.scheduling_gates or ()]:
        they = "it is" if len(gates) == 1 else "they are"
        return "gated", (
            f"the pod has {counted(len(gates), 'scheduling gate')} ({', '.join(gates[:3])}): "
            f"no scheduler tries it until {they} removed"
        )
    if not asked and (scheduler := scheduler_of(pod)) not in schedulers:
        return "other_scheduler", (
            f"spec.schedulerName is {scheduler}, which is not known to call Headroom; create "
            f"the pod again with spec.schedulerName: {schedulers[0]}"
        )
    return None


def _fits_or_not(explanation: Explanation, where: Feasible) -> tuple[str, str]:
    if explanation.fits:
        some, unchecked = counted(explanation.fits, "node"), where.not_checked()
        if not unchecked:
            return "fits", f"{some} can take the pod"
        has = "has" if explanation.fits == 1 else "have"
        return "fits", f"{some} {has} GPU memory for the pod{but_not_checked(unchecked)}"
    if not len(where.eligible.rows) and not where.obstacles:
        return "rejected", "no node can take the pod: Headroom has seen no nodes yet"
    if not len(where.eligible.rows):
        ((obstacle, nodes), *others) = where.obstacles
        more = f", and {len(others)} more reasons" if len(others) > 1 else ""
        if len(others) == 1:
            more = f"; {counted(others[0][1], 'node')}: {others[0][0].sentence}"
        return "rejected", (
            f"no node is eligible: {counted(nodes, 'node')}: {obstacle.sentence}{more}"
        )
    if not len(where.rows):
        return "rejected", (
            "no node can take the pod: kube-scheduler left out all "
            f"{counted(where.left_out, 'eligible node')} for other resources, volumes or affinity"
        )
    if explanation.too_large is not None:
        needs, has_bytes = explanation.too_large
        return "rejected", (
            f"no node can take the pod: it needs {gib(needs, up=True)}, larger than any GPU that "
            f"it may use ({gib(has_bytes)})"
        )
    return "rejected", "no node can take the pod"


def _holds(held: Held) -> str:
    since = f" since {held.since[:19]}Z" if held.since else ""
    how = held.phase.replace("_", " ")
    return f"  pod {held.namespace}/{held.name} holds {gib(held.charged_bytes)}{since}, {how}"


def _held_by_hidden(hidden: Sequence[Held]) -> list[str]:
    if not hidden:
        return []
    who = "1 pod that you may not read holds"
    if len(hidden) > 1:
        who = f"{len(hidden)} pods that you may not read hold"
    return [f"  {who} {gib(sum(held.charged_bytes for held in hidden))}"]


def _advice_view(one: Suggestion) -> SuggestionsView:
    return SuggestionsView(
        kind=one.kind,
        sentence=one.sentence,
        node=one.node or None,
        nodes=one.nodes,
        lower_to_bytes=one.lower_to_bytes,
        wait_for=held_view(one.held) if one.held else None,
    )


def _attempts(pod: Pod, last: DecisionView | None, nodes: int) -> AttemptsView:
    asked = last.filter if last else None
    if last is None or asked is None:
        return AttemptsView(
            first_at=last.first_at if last else None,
            last_at=last.at if last else None,
            times=0,
            offered_nodes=None,
            not_offered_nodes=None,
            again_by=None,
            message="the attempt that placed it is no longer on record"
            if pod.node
            else _never_asked(pod),
        )
    left_out = max(0, nodes - asked.offered)
    again = None if pod.node or asked.fits else datetime.fromisoformat(asked.at) + FLUSHED_AFTER
    again_by = again.isoformat(timespec="milliseconds") if again else None
    return AttemptsView(
        first_at=last.first_at,
        last_at=asked.at,
        times=asked.times,
        offered_nodes=asked.offered,
        not_offered_nodes=left_out,
        again_by=again_by,
        message=_tried(asked, left_out, again_by),
    )


def _never_asked(pod: Pod) -> str:
    """Return why no attempt is on record; quotes the scheduler from the pod's condition."""
    reported = (
        condition.message
        for condition in (pod.status and pod.status.conditions) or ()
        if condition.type == "PodScheduled" and condition.status == "False" and condition.message
    )
    if message := next(reported, ""):
        return (
            "its scheduler has not called Headroom for this pod lately. The scheduler reports: "
            f"{message[:MOST_QUOTED]}"
        )
    return (
        "its scheduler has not called Headroom for this pod lately, and has not reported why the "
        f"pod is pending: is scheduler {scheduler_of(pod)} running?"
    )


def _tried(asked: FilterView, left_out: int, again_by: str | None) -> str:
    message = (
        f"kube-scheduler offered {counted(asked.offered, 'node')}, of which {asked.fits:,} could "
        "take the pod"
    )
    if left_out:
        message += (
            f"; {counted(left_out, 'node')} did not pass kube-scheduler's own checks (selectors, "
            "taints, CPU, replicas ...), or it had found enough"
        )
    if again_by:
        message += f"; it retries when Headroom finds room for the pod, at the latest by {again_by}"
    return message
