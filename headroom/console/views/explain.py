"""Explains why a pod is pending, or where it is placed."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Path
from starlette.responses import Response

from headroom.console.facts.device_occupants import Held, blockers
from headroom.console.facts.group_report import group_report
from headroom.console.facts.memory_caps import caps_of
from headroom.console.facts.suggestions import Suggestion, suggest, within_quotas
from headroom.console.responses import (
    UNKNOWN,
    AskView,
    Body,
    OfPod,
    ReasonView,
    Recomputed,
    ask_view,
    encoded,
    obstacle_view,
    reason_view,
)
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest, Visible
from headroom.console.views.attempts import AttemptsView, attempts_of
from headroom.console.views.decision_bodies import DecisionView, Unanswered
from headroom.console.views.decisions import Sought, decisions
from headroom.console.views.devices import (
    CapView,
    HeldView,
    OveruseView,
    cap_view,
    held_view,
    overuse_views,
)
from headroom.console.views.overcommitted import (
    FailedContainerView,
    OvercommittedView,
    failed_container_views,
    overcommitted_views,
    trouble_of,
)
from headroom.console.views.pending import verdict_of
from headroom.console.views.pod_recommendation import above_recorded_peaks, lower_as_recommended
from headroom.console.views.requested_pods import pod_named
from headroom.console.views.score_bodies import NearestView, nearest_view
from headroom.contract.annotations import PREFIX
from headroom.contract.kube import Pod
from headroom.core.overuse.victims import moment
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.explain import Explanation, explain, verdict_digest
from headroom.core.placement.fit import fit
from headroom.core.placement.request import Unreadable, VramRequest
from headroom.core.placement.snapshot import NodeTerms, Snapshot
from headroom.core.rules.eligible_nodes import Feasible, eligible_nodes, feasible
from headroom.core.rules.pod_requests import exceeded
from headroom.core.starting_alone.decisions import start_sentence
from headroom.core.whatif.held_memory import verdicts_on
from headroom.runtime.server.auth import Sees

Namespace = Annotated[str, Path(examples=["default"])]
PodName = Annotated[str, Path(examples=["trainer-0"])]
#: Seconds after which a pod of a filter call is in the watch, if it still exists.
WATCH_LAG_S = 10.0
#: Number of the pod's latest decisions that are searched for a preemption.
MAX_DECISIONS = 8


class SuggestionsView(View):
    """A change with which the pod would fit. For kind quota, what to do before such a change."""

    kind: str
    """rollout (end an old pod first), lower (lower the request), recommended (lower it to the
    recommendation from past lives), wait (for a pod), overuse (limit a pod that uses more than it
    reserved), eligible (change where the pod may run), steer (let Headroom choose the device),
    replicas (add some), repair (a node or its device), activity (change the limit of SM activity),
    variable (remove NVIDIA_VISIBLE_DEVICES), or quota (raise it first, because it could reject the
    pod when it is created again)."""
    sentence: str
    node: str | None
    """The affected node; null if there are several, which ``nodes`` counts."""
    nodes: int
    lower_to_bytes: int | None
    fix: str | None
    """A kubectl command, or YAML for the pod or its template, that applies the suggestion. Null if
    there is no such fix."""
    wait_for: HeldView | None


class ExplainBody(Body, Recomputed):
    namespace: str
    name: str
    uid: str
    bound_to: str | None
    """The node the pod is bound to; null while it is pending."""
    devices: list[str]
    """Names of the devices of its node on which a report shows it."""
    group: str | None
    """How many pods of its group are bound, and where the others would fit; null if it has no
    group."""
    changed: str | None
    """Changes to its request after it was bound, and their effect; null if there were none."""
    annotations: dict[str, str]
    """Annotations that Headroom wrote on the pod when it bound it."""
    caps: list[CapView]
    """The limits of its memory on each device on which a report shows it."""
    overuse: list[OveruseView]
    """Devices on which it uses more than it reserved, and whether it is evicted because of that."""
    overcommitted: list[OvercommittedView]
    """Its devices that are overcommitted, or were in the last hour, the current ones first."""
    failed_containers: list[FailedContainerView]
    """Its containers whose last end has an exit code other than 0, the latest end first."""
    start: str | None
    """Whether its start keeps other pods waiting, and whether it has to wait when it starts again;
    null if it is not bound or does not start alone."""
    verdict: str
    """"bound", "ended", "deleted", "fits", "rejected", "waits" (it fits, but kube-scheduler
    reports that it lacks something else), "not_scheduled" (it fits, but its scheduler does not try
    it), "gated" (scheduling gates), "not_ours" (requests no managed GPU), "unreadable" or
    "other_scheduler" (the scheduler of the pod does not call Headroom)."""
    message: str
    request: list[AskView]
    memory_class: str | None
    """guaranteed (limit equals request), burstable (limit above request) or unlimited; null if its
    request cannot be read, or if it requests no managed GPU."""
    fits: int
    """Number of eligible nodes that can take the pod, on the newest snapshot. If the nodes of its
    last filter call are on record, only these nodes count."""
    observes: bool
    """Whether the mode is observe, in which Headroom passes the pod on all nodes; ``fits`` and
    ``reasons`` are then as in mode enforce."""
    reasons: list[ReasonView]
    ineligible: list[ReasonView]
    """Nodes that kube-scheduler does not offer because of a selector, affinity, taint or cordon."""
    left_out_nodes: int
    """Number of eligible nodes that kube-scheduler left out of its last filter call."""
    not_checked: list[str]
    """Checks of kube-scheduler that this answer does not include, such as volumes."""
    verdict_digest: str | None
    """Digest of the verdicts on all nodes, which `headroom replay` prints too. It ignores memory
    that is held for other pods. Null if there are no verdicts."""
    nearest: list[NearestView]
    suggestions: list[str]
    """The sentences of ``advice``."""
    advice: list[SuggestionsView]
    attempts: AttemptsView
    last_decision: DecisionView | None
    """The last decision, merged over all replicas. All fields above are recomputed."""
    unanswered: list[Unanswered]


@dataclass(frozen=True, slots=True)
class Analysis:
    """The verdicts on all nodes for a pod whose request can be read, and suggestions for it."""

    #: Digest of the verdicts on all nodes.
    digest: str
    candidates: Feasible
    explanation: Explanation
    #: For each of the nearest nodes, the pods that hold the memory or replicas that the pod needs.
    blockers: list[list[Held]]
    suggestions: list[Suggestion]


routes = APIRouter()


@routes.get("/v1/explain", response_model=ExplainBody, responses=UNKNOWN)
def explain_pod(context: InContext, of_pod: OfPod, snap: Newest, sees: Visible) -> Response:
    """Explain why the pod is pending, or where it is placed: its request, the reasons with node
    counts, the nearest nodes with their devices, suggestions, and the last decision."""
    namespace, name = of_pod
    pod = pod_named(context, namespace, name)
    request = context.cluster.understand(pod)
    # Search by uid, because a StatefulSet reuses the names of its pods.
    sought = Sought(uid=pod.metadata.uid, offered_nodes=True)
    found, unanswered = decisions(context, sought, MAX_DECISIONS, sees)
    last, analysis = _last(found), None
    deleted = deletion_of(context, pod, found)
    if isinstance(request, VramRequest) and not deleted:
        analysis = analysed(context, snap, pod, request, _offered(found))
    report = group_report(context.cluster, pod, context.seen_by(pod, snap), context.monotonic_s())
    verdict, message = (
        ("deleted", deleted)
        if deleted
        else (verdict_from(context, pod, request, analysis, _asked_at_s(found)))
    )
    annotations = pod.metadata.annotations or {}
    advice = [unnamed(each, sees) for each in analysis.suggestions] if analysis else []
    body = ExplainBody(
        **context.head(snap),
        namespace=pod.metadata.namespace,
        name=pod.metadata.name,
        uid=pod.metadata.uid,
        bound_to=pod.node or None,
        devices=[
            each.device.name
            for each in _devices(snap, pod)
            if any(h.observed and h.uid == pod.metadata.uid for h in each.holders)
        ],
        group=report.sentence if report else None,
        changed=context.cluster.edits.of(pod.metadata.uid) or None,
        annotations={k: v for k, v in annotations.items() if k.startswith(PREFIX)},
        caps=[cap_view(each) for each in caps_of(context.cluster, pod, _devices(snap, pod))],
        overuse=[
            each
            for node in _node(snap, pod)
            for each in overuse_views(context, node)
            if each.uid == pod.metadata.uid
        ],
        overcommitted=overcommitted_views(context.cluster, pod, sees),
        failed_containers=failed_container_views(context.cluster, pod),
        start=start_sentence(context.cluster, pod) or None,
        verdict=verdict,
        message=message,
        request=[],
        memory_class=None,
        fits=0,
        observes=context.observes,
        reasons=[],
        ineligible=[],
        left_out_nodes=0,
        not_checked=[],
        verdict_digest=None,
        nearest=[],
        suggestions=[each.sentence for each in advice],
        advice=list(map(_advice_view, advice)),
        attempts=attempts_of(pod, last, len(snap.nodes), bool(deleted)),
        last_decision=last,
        unanswered=unanswered,
    )
    if body.overuse:
        body.message += ", and uses more memory than it reserved"
    elif trouble := trouble_of(context.cluster, pod, sees):
        body.message += f"; {trouble}"
    if isinstance(request, VramRequest):
        body.request = list(map(ask_view, request.containers))
        body.memory_class = request.memory_class.value if request.asks else None
    if analysis:
        body.fits = analysis.explanation.fits
        body.reasons = [reason_view(*pair) for pair in analysis.explanation.reasons]
        body.ineligible = [obstacle_view(*pair) for pair in analysis.candidates.obstacles]
        body.left_out_nodes = analysis.candidates.left_out
        body.not_checked = list(analysis.candidates.not_checked())
        body.verdict_digest = analysis.digest
        aged, holds = context.activity_age(), context.holds_against(pod)
        body.nearest = [
            nearest_view(node, aged, held, sees, holds.get(node.node, ()))
            for node, held in zip(analysis.explanation.nearest, analysis.blockers, strict=True)
        ]
    return encoded(body)


def analysed(
    context: Context, snap: Snapshot, pod: Pod, request: VramRequest, offered: list[str] | None
) -> Analysis:
    """Fit the pod on all nodes, explain the verdicts, and find suggestions for a pending pod.

    ``offered`` are the nodes of its last filter call, or None if they are not on record.
    """
    cluster = context.cluster
    rows = np.arange(len(snap.nodes), dtype=np.int64)
    newest, snap = snap, context.seen_by(pod, snap)
    on_all_nodes = verdicts_on(cluster, request, snap, rows, context.monotonic_s())
    eligible = eligible_nodes(pod, snap, cluster.node)
    candidates = feasible(pod, eligible, on_all_nodes, offered)
    verdicts = verdicts_on(cluster, request, snap, candidates.rows, on_all_nodes.now_s)
    explanation = explain(verdicts, cluster.rules.weights, market=cluster.market)
    blocking = [blockers(cluster, verdicts, node) for node in explanation.nearest]
    suggestions: list[Suggestion] = []
    if not pod.node:
        suggestions = lower_as_recommended(context, pod, verdicts, candidates)
        suggestions += above_recorded_peaks(
            context, pod, suggest(cluster, pod, verdicts, explanation, blocking, candidates)
        )
    if any(each.recreates for each in suggestions):
        quotas = context.quotas(pod.metadata.namespace)
        suggestions = within_quotas(suggestions, None if quotas is None else exceeded(quotas))
    digest = verdict_digest(fit(request, newest, rows, on_all_nodes.now_s))
    return Analysis(digest, candidates, explanation, blocking, suggestions)


def verdict_from(
    context: Context,
    pod: Pod,
    request: VramRequest | Unreadable,
    analysis: Analysis | None,
    asked_at_s: float | None,
) -> tuple[str, str]:
    """Return the verdict and its message like ``verdict_of``, from an analysis of the pod."""
    explanation = analysis.explanation if analysis else None
    candidates = analysis.candidates if analysis else None
    return verdict_of(
        pod,
        request,
        explanation,
        candidates,
        asked_at_s,
        context.schedulers(),
        context.wall_s(),
        context.observes,
    )


def _asked_at_s(found: Sequence[DecisionView]) -> float | None:
    """Return the time of the last call about the pod, or None if none is on record."""
    return _unix_s(found[0].at) if found else None


def deletion_of(context: Context, pod: Pod, found: Sequence[DecisionView]) -> str:
    """Return the message for a deleted pod, or "" if the pod exists. ``found`` are its decisions.

    A pod that is only known from a filter call may be newer than the watch.
    """
    uid = pod.metadata.uid
    if context.cluster.pod(uid) is not None:
        return ""
    bound = next((each.bind for each in found if each.bind and each.bind.outcome == "bound"), None)
    is_old = bool(found) and context.wall_s() - _unix_s(found[0].at) > WATCH_LAG_S
    is_watched = any(True for _ in context.watches())
    is_deleted = context.cluster.departures.seen(uid) is not None or bound is not None
    if not is_deleted and not (is_watched and is_old):
        return ""
    message = "deleted"
    if bound is None:
        return f"{message} before it was bound"
    removed = (
        each
        for each in context.feed.past()
        if each.uid == uid and each.kind == "reservation_removed" and each.node == bound.node
    )
    if (last := next(removed, None)) is not None:
        message += f" before {moment(last.at_s)}, when its reservation was removed"
    return f"{message}; it was bound to node {bound.node} at {bound.at[:19]}Z"


def _unix_s(stamp: str) -> float:
    return datetime.fromisoformat(stamp).timestamp()


def _node(snap: Snapshot, pod: Pod) -> Sequence[NodeTerms]:
    """Return the pod's node, or nothing if the pod is pending or the node is unknown."""
    row = snap.row_of.get(pod.node)
    return () if row is None else (snap.nodes[row],)


def _devices(snap: Snapshot, pod: Pod) -> Sequence[DeviceTerms]:
    return [terms for node in _node(snap, pod) for terms in node.devices]


def _offered(found: Sequence[DecisionView]) -> list[str] | None:
    """Return the nodes of the last filter call, or None if they are not on record."""
    last = next((each.filter for each in found if each.filter), None)
    return last.offered_nodes if last else None


def _last(found: Sequence[DecisionView]) -> DecisionView | None:
    """Return the last decision. If it has no preemption, add the preemption of an earlier decision.

    kube-scheduler retries the pod after its victims have ended, which makes a new decision. The
    names of the offered nodes are left out, because there can be thousands of them.
    """
    if not found:
        return None
    last = found[0]
    if last.filter is not None:
        filtered = last.filter.model_copy(update={"offered_nodes": None})
        last = last.model_copy(update={"filter": filtered})
    if last.preempt is not None:
        return last
    before = (each.preempt for each in found if each.uid == last.uid and each.preempt is not None)
    return last.model_copy(update={"preempt": next(before, None)})


def _advice_view(one: Suggestion) -> SuggestionsView:
    return SuggestionsView.of(one, wait_for=held_view(one.held) if one.held else None)


def unnamed(advice: Suggestion, sees: Sees) -> Suggestion:
    """Return the suggestion without the name of the pod to wait for if the caller may not see
    it."""
    held = advice.held
    if held is None or sees(held.namespace, held.name):
        return advice
    sentence = (
        f"wait for a pod on node {advice.node} that you may not read: when it ends, the pod fits"
        if advice.kind == "wait"
        else f"pods on node {advice.node} that you may not read use more than they reserved: "
        "without this overuse, the pod fits there"
    )
    return replace(advice, sentence=sentence, held=None)
