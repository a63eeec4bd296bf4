"""The verdict on one pod, and the list of pending GPU pods with the memory that each pod lacks."""

from collections.abc import Sequence
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from starlette.responses import Response

from headroom.console.facts.group_report import MOST_PLACED, group_report
from headroom.console.facts.scheduler_reports import waits_elsewhere
from headroom.console.facts.suggestions import but_not_checked
from headroom.console.responses import (
    AskedPage,
    AskView,
    InNamespace,
    Paged,
    ReasonView,
    Recomputed,
    ask_view,
    counted,
    listed,
    obstacle_view,
    reason_view,
)
from headroom.console.times import Time
from headroom.console.view import View
from headroom.console.view_context import Context, InContext, Newest
from headroom.console.views.attempts import scheduler_silence
from headroom.console.views.pod_recommendation import recommended, recommended_text
from headroom.contract.kube import Pod
from headroom.contract.quantity import gib
from headroom.contract.reasons import Reason
from headroom.core.cluster.dra_allocation import claim_name
from headroom.core.groups.membership import Group, named_group_of
from headroom.core.journal.journal import scheduler_of
from headroom.core.placement.explain import Explanation, explain
from headroom.core.placement.request import Unreadable, VramRequest
from headroom.core.placement.snapshot import Snapshot
from headroom.core.rules.eligible_nodes import (
    Eligible,
    Feasible,
    eligibility_key,
    eligible_nodes,
    feasible,
)
from headroom.core.whatif.held_memory import verdicts_on
from headroom.core.whatif.steering_whatif import Gain, steering_gain

#: Default page size. It is small because each pod is checked against all nodes.
PODS = 50


class PendingGroupView(View):
    """The group of a pending pod. All its pods are bound together."""

    name: str
    waiting: int
    """Number of pods of the group that wait."""
    requests: str
    """The requests of the waiting pods, such as "5 x 12Gi"."""
    message: str
    """A sentence with the numbers of bound and waiting pods, and the nodes on which they fit."""


class PendingView(Recomputed):
    namespace: str
    name: str
    uid: str
    since: Time | None
    """When the pod was created; null if that is not known."""
    request: list[AskView]
    """Empty if the request cannot be read. Then ``message`` has the reason."""
    fits: int
    """Number of eligible nodes that can take the pod now."""
    reasons: list[ReasonView]
    ineligible: list[ReasonView]
    """Nodes that are not eligible because of a selector, affinity, taint or cordon."""
    verdict: str
    """As in the explanation of the pod: fits, waits (for something that is no GPU memory),
    not_scheduled, rejected, gated, other_scheduler, not_ours or unreadable."""
    message: str
    """A sentence that states whether the pod fits, or why it does not."""
    nearest: str | None
    """The best node if the pod fits, otherwise the node on which it lacks the least memory; null
    if kube-scheduler would offer no node."""
    short_bytes: int | None
    """Memory that the pod lacks on that node; null if it fits, or if memory is not the reason."""
    asked: bool
    """Whether a scheduling attempt of kube-scheduler is on record."""
    recommended: str | None
    """The request recommended from past lives of its workload; null if there is none."""
    group: PendingGroupView | None


class SteeringView(View):
    """Pending pods that, in a simulation, wait only because the device plugin chooses the
    device."""

    sentence: str
    waiting_pods: int
    waiting_bytes: int
    placed_pods: int
    """Number of pods that would be placed if the nodes were steered."""
    placed_bytes: int
    nodes: list[str]
    to_do: str
    """The steps to steer the first of these nodes."""


class PendingBody(Paged):
    pods: list[PendingView]
    steering: SteeringView | None = None
    """Null unless ``steering=true`` is requested and steering would place pods."""


Steering = Annotated[bool, Query(description="Simulate steering too.", examples=["true"])]

#: The message for a pod that fits on no node, if the mode is observe.
OBSERVED = "Headroom passes the pod, because it only observes; mode enforce would keep it waiting"

routes = APIRouter()


@routes.get("/v1/pending", response_model=PendingBody)
def pending(
    context: InContext,
    snap: Newest,
    page: AskedPage,
    namespace: InNamespace = "",
    steering: Steering = False,
) -> Response:
    """List pending pods that request a managed GPU, by namespace and name; 50 by default.

    With ``steering=true``, also simulate which of all pending pods would be placed if nodes were
    steered.
    """
    waiting = {
        _key(pod): pod
        for pod in context.cluster.unbound()
        if namespace in ("", pod.metadata.namespace)
    }
    after = sorted(key for key in waiting if key > page.after)
    shown = after[: page.limit or PODS]
    remaining = len(after) - len(shown)
    more = shown[-1] if remaining else None
    body = PendingBody(
        **context.head(snap), matching=len(waiting), remaining=remaining, continue_=more, pods=[]
    )
    if steering and (gain := steering_gain(context.cluster, snap, context.monotonic_s())):
        body.steering = _steering_view(gain)
    # The key is ``eligibility_key``, because pods of one Deployment have the same eligible nodes.
    eligible: dict[bytes, Eligible] = {}
    groups = _Groups(context, snap)
    views = (_view(waiting[key], context, snap, eligible, groups) for key in shown)
    return listed(body, "pods", views)


class _Groups:
    """The groups of one answer, each described once. ``MOST_PLACED`` limits the pods of all groups
    together for which a node is searched."""

    def __init__(self, context: Context, snap: Snapshot) -> None:
        self._context = context
        self._snap = snap
        self._found: dict[Group, PendingGroupView] = {}
        self._most_placed = MOST_PLACED

    def view(self, pod: Pod) -> PendingGroupView | None:
        group, context = named_group_of(pod), self._context
        if group is None or group in self._found:
            return self._found[group] if group else None
        seen, now_s = context.seen_by(pod, self._snap), context.monotonic_s()
        report = group_report(context.cluster, pod, seen, now_s, self._most_placed)
        if report is None:
            return None
        self._most_placed -= report.tried
        waiting = sum(report.waiting.values())
        self._found[group] = found = PendingGroupView(
            name=group.name, waiting=waiting, requests=report.requests, message=report.sentence
        )
        return found


def _steering_view(gain: Gain) -> SteeringView:
    nodes = [each.node for each in gain.nodes]
    return SteeringView.of(gain, nodes=nodes, to_do=gain.nodes[0].to_do)


def _key(pod: Pod) -> str:
    return f"{pod.metadata.namespace}/{pod.metadata.name}"


def _view(
    pod: Pod,
    context: Context,
    snap: Snapshot,
    eligible: dict[bytes, Eligible],
    groups: _Groups,
) -> PendingView:
    """Return the view of one pod, and add its eligible nodes to the cache ``eligible``."""
    cluster, metadata = context.cluster, pod.metadata
    request, decision = cluster.understand(pod), context.journal.of_uid(metadata.uid)
    view = PendingView(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        since=metadata.creation_timestamp,
        request=[],
        fits=0,
        reasons=[],
        ineligible=[],
        verdict="unreadable",
        message="",
        nearest=None,
        short_bytes=None,
        asked=decision is not None,
        recommended=None,
        group=groups.view(pod),
    )
    if not isinstance(request, VramRequest):
        view.message = request.message
        return view
    view.recommended = recommended_text(recommended(context, pod, request, snap))
    rows = np.arange(len(snap.nodes), dtype=np.int64)
    snap = context.seen_by(pod, snap)
    on_all_nodes = verdicts_on(cluster, request, snap, rows, context.monotonic_s())
    if (key := eligibility_key(pod)) not in eligible:
        eligible[key] = eligible_nodes(pod, snap, cluster.node)
    offered = decision.offered_nodes.names() if decision and decision.offered_nodes else None
    candidates = feasible(pod, eligible[key], on_all_nodes, offered)
    verdicts = verdicts_on(cluster, request, snap, candidates.rows, on_all_nodes.now_s)
    found = explain(verdicts, cluster.rules.weights, nearest=1, market=cluster.market)
    nearest = next(iter(found.nearest), None)
    asked_at_s = decision.at_s if decision else None
    view.verdict, view.message = verdict_of(
        pod,
        request,
        found,
        candidates,
        asked_at_s,
        context.schedulers(),
        context.wall_s(),
        context.observes,
    )
    view.request = [ask_view(ask) for ask in request.containers]
    view.fits = found.fits
    view.reasons = [reason_view(*each) for each in found.reasons]
    view.ineligible = [obstacle_view(*each) for each in candidates.obstacles]
    view.nearest = nearest.node if nearest else None
    view.short_bytes = nearest.short_bytes if nearest and not found.fits else None
    return view


def verdict_of(
    pod: Pod,
    request: VramRequest | Unreadable,
    explanation: Explanation | None,
    candidates: Feasible | None,
    asked_at_s: float | None,
    schedulers: Sequence[str],
    wall_s: float,
    observes: bool,
) -> tuple[str, str]:
    """Return the verdict of ``ExplainBody`` and its message.

    ``explanation`` and ``candidates`` are None if the request cannot be read. ``asked_at_s`` is the
    Unix time of the last filter call for the pod, or None if none is on record. ``schedulers`` are
    the schedulers that are known to call Headroom. ``wall_s`` is the current Unix time.
    ``observes`` is whether the mode is observe.
    """
    if isinstance(request, Unreadable):
        return "unreadable", request.message
    if pod.node:
        claim = f"; ResourceClaim {name} holds its devices" if (name := claim_name(pod)) else ""
        if pod.ended and pod.status is not None:
            return "ended", f"ended on node {pod.node} in phase {pod.status.phase}"
        return "bound", f"bound to node {pod.node}{claim}"
    if not request.asks:
        return "not_ours", "the pod requests no GPU that Headroom manages"
    if found := not_tried(pod, asked_at_s is not None, schedulers):
        return found
    cannot = OBSERVED if observes else "no node can take the pod"
    if explanation is None or candidates is None:
        return "rejected", cannot
    verdict, message = _fits_or_not(explanation, candidates, cannot)
    if verdict != "fits":
        return verdict, message
    if elsewhere := waits_elsewhere(pod):
        has = "1 node has" if explanation.fits == 1 else f"{explanation.fits:,} nodes have"
        return "waits", f"{elsewhere}; {has} GPU memory for the pod"
    if silence := scheduler_silence(pod, asked_at_s, wall_s):
        return "not_scheduled", f"{silence}: is it running? {message[0].upper()}{message[1:]}"
    return verdict, message


def not_tried(
    pod: Pod, asked: bool, schedulers: Sequence[str], fix: str = "create the pod again with"
) -> tuple[str, str] | None:
    """Return verdict and message if no scheduler that calls Headroom tries the pod, otherwise None.

    ``asked`` is whether a filter call for the pod is on record. ``fix`` is the verb phrase before
    the scheduler to set.
    """
    if gates := [gate.name for gate in pod.spec.scheduling_gates or ()]:
        they_are = "it is" if len(gates) == 1 else "they are"
        return "gated", (
            f"the pod has {counted(len(gates), 'scheduling gate')} ({', '.join(gates[:3])}) "
            f"and is not scheduled until {they_are} removed"
        )
    if not asked and (scheduler := scheduler_of(pod)) not in schedulers:
        return "other_scheduler", (
            f"spec.schedulerName is {scheduler}, which is not known to call Headroom; "
            f"{fix} spec.schedulerName: {schedulers[0]}"
        )
    return None


def _fits_or_not(explanation: Explanation, candidates: Feasible, cannot: str) -> tuple[str, str]:
    """Return verdict and message. ``cannot`` is the message for a pod that fits on no node."""
    if explanation.fits:
        nodes_text, unchecked = counted(explanation.fits, "node"), candidates.not_checked()
        if not unchecked:
            return "fits", f"{nodes_text} can take the pod"
        has = "has" if explanation.fits == 1 else "have"
        return "fits", f"{nodes_text} {has} GPU memory for the pod{but_not_checked(unchecked)}"
    if not len(candidates.eligible.rows) and not candidates.obstacles:
        return "rejected", "no node can take the pod: Headroom has seen no nodes yet"
    if not len(candidates.eligible.rows):
        ((obstacle, nodes), *others) = candidates.obstacles
        more = f", and {len(others)} more reasons" if len(others) > 1 else ""
        if len(others) == 1:
            more = f"; {counted(others[0][1], 'node')}: {others[0][0].sentence}"
        return "rejected", (
            f"no node is eligible: {counted(nodes, 'node')}: {obstacle.sentence}{more}"
        )
    if not len(candidates.rows):
        return "rejected", (
            "no node can take the pod: kube-scheduler left out all "
            f"{counted(candidates.left_out, 'eligible node')} for other resources, volumes or "
            "affinity"
        )
    if explanation.too_large is not None:
        needs, has_bytes = explanation.too_large
        return "rejected", (
            f"{cannot}: it needs {gib(needs, up=True)}, larger than any GPU that "
            f"it may use ({gib(has_bytes)})"
        )
    if held := dict(explanation.reasons).get(Reason.HELD):
        on = f"GPU memory of {counted(held, 'node')} is held for other pods, which go first"
        return "rejected", f"{cannot}: {on}" if cannot == OBSERVED else f"{cannot} now: {on}"
    return "rejected", cannot
