"""Why a pod waits, or where it is: the body, and the sentences in it beside the same as fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta

from pydantic import BaseModel

from contract.annotations import PREFIX
from contract.kube import Pod
from contract.quantity import gib
from extender.cluster.advice import Advice
from extender.cluster.holders import Held
from extender.placement.explain import DeviceExplanation, Explanation, NodeExplanation
from extender.placement.prose import told
from extender.placement.request import Unreadable, VramRequest
from extender.web.bodies import AskView, Body, ReasonView, ask_view, reason_view
from extender.web.decisions import DecisionView, FilterView, Unanswered
from extender.web.held import HeldView, held_view
from extender.web.views import Aged, DeviceView, device_view
from extender.web.visible import Sees, everything

#: kube-scheduler tries what nothing woke again after so long, unless it is told otherwise.
FLUSHED_AFTER = timedelta(minutes=5)
#: Of a node, those with the most.
MOST_BLOCKERS = 10


class CandidateView(BaseModel):
    device: DeviceView
    need_bytes: int
    room_bytes: int
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


class AdviceView(BaseModel):
    """What would help, tried before it is said."""

    #: lower (what is asked for), wait (for a pod), mend (a node or a device), or replicas (more of
    #: them).
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


class ExplainBody(Body):
    namespace: str
    name: str
    uid: str
    #: The node it is bound to; null while it waits.
    bound_to: str | None
    #: What its author changed after it was bound, and what that means; null for nothing.
    changed: str | None
    #: What Headroom wrote on the pod with its Binding.
    annotations: dict[str, str]
    #: "bound", "fits", "refused", "not_ours" (asks for no GPU) or "unreadable".
    verdict: str
    message: str
    request: list[AskView]
    #: Over all nodes we know, on the newest snapshot; kube-scheduler may have offered fewer.
    fits: int
    reasons: list[ReasonView]
    #: Of what is said of every node; `headroom replay` prints the same. Null where nothing is.
    verdict_digest: str | None
    nearest: list[NearestView]
    #: Those of ``advice``, to be read.
    suggestions: list[str]
    advice: list[AdviceView]
    attempts: AttemptsView
    #: Of all replicas.
    last_decision: DecisionView | None
    unanswered: list[Unanswered]


def candidate_view(device: DeviceExplanation, aged: Aged, sees: Sees) -> CandidateView:
    return CandidateView(
        device=device_view(device.terms, aged, sees),
        need_bytes=device.need_bytes,
        room_bytes=device.room_bytes,
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
        told=[*told(node), *map(_holds, shown), *_hold_unseen(hidden)],
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
    advice: Sequence[Advice]
    #: Of each of the nearest nodes.
    blockers: Sequence[Sequence[Held]]
    last: DecisionView | None
    unanswered: Sequence[Unanswered]
    sees: Sees
    #: Nodes that we know.
    nodes: int
    generation: int


def explain_body(why: Explained, aged: Aged, generated_at: str) -> ExplainBody:
    pod, request, explanation = why.pod, why.request, why.explanation
    verdict, message = _verdict(pod.node, request, explanation)
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


def _verdict(
    bound_to: str, request: VramRequest | Unreadable, explanation: Explanation | None
) -> tuple[str, str]:
    if isinstance(request, Unreadable):
        return "unreadable", request.message
    if bound_to:
        return "bound", f"bound to node {bound_to}"
    if not request.asks:
        return "not_ours", "the pod asks for no GPU that Headroom manages"
    if explanation is None or not explanation.fits:
        return "refused", "no node can take the pod"
    return "fits", f"{explanation.fits} nodes can take the pod"


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


def _advice_view(one: Advice) -> AdviceView:
    return AdviceView(
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
            message="kube-scheduler has not asked Headroom about this pod lately: its own checks "
            "left no node, or another scheduler has the pod"
            if not pod.node
            else "the calls that placed it are not on record any more",
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


def _tried(asked: FilterView, left_out: int, again_by: str | None) -> str:
    said = f"kube-scheduler offered {asked.offered} nodes, of which {asked.fits} could take the pod"
    if left_out:
        said += (
            f"; nodes never offered: {left_out}, which kube-scheduler's own checks (selectors, "
            "taints, CPU ...) left out, or it had found enough"
        )
    if again_by:
        said += (
            f"; it tries again as soon as Headroom sees room for the pod, and by {again_by} if "
            "nothing happens"
        )
    return said
