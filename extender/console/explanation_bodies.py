"""Why a pod waits, or where it is: the body, and the sentences in it beside the same as fields."""

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

#: kube-scheduler tries what nothing woke again after so long, unless it is told otherwise.
FLUSHED_AFTER = timedelta(minutes=5)
#: Of a node, those with the most.
MOST_BLOCKERS = 10
#: Characters of what a scheduler reports.
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
    #: What shows it, where the message does not say.
    detail: str | None
    #: "not measured" and where its capacity was learned, if no agent reports it.
    unmeasured: str | None
    #: What the pod lacks on the fullest device that it could end on; null when not memory decides.
    short_bytes: int | None
    candidates: list[CandidateView]
    #: 0..1, of which the highest wins, and the named terms of which it is the weighted mean
    #: (setting score_weights); null and empty where the pod does not fit.
    score_ratio: float | None
    score_terms: dict[str, float]
    #: Who holds what keeps the pod out, at most 10, those with the most first; empty where it is
    #: neither memory nor replicas.
    blockers: list[HeldView]
    #: Other such pods, which the reader may not get, and what they hold together.
    hidden_blockers: int
    hidden_blockers_bytes: int
    #: All of this as lines to read.
    told: list[str]


class SuggestionsView(BaseModel):
    """What would help, tried before it is said."""

    #: lower (what is asked for), wait (for a pod), eligible (change where the pod may run), mend (a
    #: node or a device), replicas (more of them), or quota (which rejects the pod if it is created
    #: again).
    kind: str
    sentence: str
    #: Null where no single node is meant; then of how many it is true.
    node: str | None
    nodes: int
    lower_to_bytes: int | None
    wait_for: HeldView | None


class AttemptsView(BaseModel):
    """What kube-scheduler did about the pod, as it stands now, on all replicas."""

    first_at: str | None
    last_at: str | None
    times: int
    #: In the last one; and the nodes that we know and were not asked about.
    offered_nodes: int | None
    not_offered_nodes: int | None
    #: The latest that kube-scheduler tries again by its defaults; null where it is not known, or
    #: will not.
    again_by: str | None
    message: str


class ExplainBody(Body, Recomputed):
    namespace: str
    name: str
    uid: str
    #: The node it is bound to; null while it waits.
    bound_to: str | None
    #: What its author changed after it was bound, and what that means; null for nothing.
    changed: str | None
    #: What Headroom wrote on the pod with its Binding.
    annotations: dict[str, str]
    #: "bound", "fits", "refused", "gated" (scheduling gates), "other_scheduler" (its scheduler does
    #: not ask Headroom), "not_ours" (asks for no GPU) or "unreadable".
    verdict: str
    message: str
    request: list[AskView]
    #: Eligible nodes that take the pod, on the newest snapshot; of those in its last filter call
    #: when that is known.
    fits: int
    reasons: list[ReasonView]
    #: Nodes that kube-scheduler does not offer, by selector, affinity, taints and cordon.
    ineligible: list[ReasonView]
    #: Eligible nodes that its last filter call did not name, for reasons of kube-scheduler's.
    left_out_nodes: int
    #: Checks of kube-scheduler that this answer does not include, such as volumes.
    not_checked: list[str]
    #: Of what is said of every node; `headroom replay` prints the same. Null where nothing is.
    verdict_digest: str | None
    nearest: list[NearestView]
    #: Those of ``advice``, to be read.
    suggestions: list[str]
    advice: list[SuggestionsView]
    attempts: AttemptsView
    #: Of all replicas; the fields above are recomputed.
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
        told=[*explanation_lines(node), *map(_holds, shown), *_hold_unseen(hidden)],
    )


@dataclass(frozen=True, slots=True)
class Explained:
    """All that is known of why a pod is where it is."""

    pod: Pod
    request: VramRequest | Unreadable
    #: None where nothing was fitted, because the pod cannot be read.
    explanation: Explanation | None
    #: How its request was changed after it was bound.
    changed: str
    digest: str
    advice: Sequence[Suggestion]
    #: Of each of the nearest nodes.
    blockers: Sequence[Sequence[Held]]
    last: DecisionView | None
    unanswered: Sequence[Unanswered]
    sees: Sees
    #: None where nothing was fitted.
    where: Feasible | None
    #: Schedulers that are known to ask Headroom.
    schedulers: Sequence[str]
    #: Nodes that we know.
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
    """The verdict of ``ExplainBody`` and its message. ``asked``: whether any filter call for the
    pod is on record; ``schedulers``: those that are known to ask Headroom."""
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
    """The verdict and the message when no scheduler that asks Headroom tries the pod; else None."""
    if gates := [gate.name for gate in pod.spec.scheduling_gates or ()]:
        they = "it is" if len(gates) == 1 else "they are"
        return "gated", (
            f"the pod has {counted(len(gates), 'scheduling gate')} ({', '.join(gates[:3])}): "
            f"no scheduler tries it until {they} removed"
        )
    if not asked and (scheduler := scheduler_of(pod)) not in schedulers:
        return "other_scheduler", (
            f"spec.schedulerName is {scheduler}, which is not known to ask Headroom; create "
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
        return "rejected", "no node can take the pod: Headroom knows no node"
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


def _hold_unseen(hidden: Sequence[Held]) -> list[str]:
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
            message="the calls that placed it are not on record any more"
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
    """Quotes the scheduler from the condition of a pod that Headroom was not asked about."""
    said = (
        condition.message
        for condition in (pod.status and pod.status.conditions) or ()
        if condition.type == "PodScheduled" and condition.status == "False" and condition.message
    )
    if message := next(said, ""):
        return (
            "its scheduler has not asked Headroom about this pod lately. The scheduler reports: "
            f"{message[:MOST_QUOTED]}"
        )
    return (
        "its scheduler has not asked Headroom about this pod lately, and has not reported why it "
        f"waits: is scheduler {scheduler_of(pod)} running?"
    )


def _tried(asked: FilterView, left_out: int, again_by: str | None) -> str:
    said = (
        f"kube-scheduler offered {counted(asked.offered, 'node')}, of which {asked.fits:,} could "
        "take the pod"
    )
    if left_out:
        said += (
            f"; {counted(left_out, 'node')} did not pass kube-scheduler's own checks (selectors, "
            "taints, CPU, replicas ...), or it had found enough"
        )
    if again_by:
        said += (
            f"; it tries again as soon as Headroom sees room for the pod, and by {again_by} if "
            "nothing happens"
        )
    return said
