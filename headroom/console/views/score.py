"""The score of one pod on all nodes, or on one node compared with all others."""

from collections.abc import Iterator, Sequence
from typing import Annotated

import numpy as np
from fastapi import APIRouter, Query
from starlette.responses import Response

from headroom.console.facts.device_occupants import Held, blockers
from headroom.console.responses import (
    UNKNOWN,
    AskedPage,
    Body,
    Recomputed,
    encoded,
    stamp,
    unknown_node,
)
from headroom.console.view import View
from headroom.console.view_context import InContext, Newest, Visible
from headroom.console.views.decision_bodies import DecisionView, Unanswered
from headroom.console.views.decisions import Sought, decisions
from headroom.console.views.devices import Aged, DeviceView, HeldView, device_view, held_view
from headroom.console.views.pending import not_tried
from headroom.console.views.ranked_nodes import Ranked, RankingBody
from headroom.console.views.requested_pods import pod_named, understood
from headroom.contract.quantity import gib
from headroom.core.cluster.holds import Hold
from headroom.core.placement.explain import Comparison, NodeExplanation, compare
from headroom.core.placement.explanation_text import explanation_lines
from headroom.core.rules.eligible_nodes import (
    AMOUNTS,
    DRA_DEVICES,
    Obstacle,
    eligible_nodes,
    not_modeled,
)
from headroom.core.whatif.held_memory import verdicts_on
from headroom.core.whatif.simulation import Simulation
from headroom.runtime.server.auth import Sees, everything

#: Maximum number of blocking pods shown for a node. The largest are shown.
MOST_BLOCKERS = 10


class CandidateView(View):
    device: DeviceView
    need_bytes: int
    free_bytes: int
    short_bytes: int


class HoldView(View):
    """A pod that has precedence. Memory of the node is held for it, but it is not bound yet."""

    namespace: str
    name: str
    uid: str
    until: str | None
    """Latest time at which the hold ends, or null if the time is unknown."""


class NearestView(View):
    node: str
    fits: bool
    reason: str | None
    message: str | None
    detail: str | None
    """Evidence for the message, if the message does not include any."""
    unmeasured: str | None
    """"not measured" and the source of the capacity; null if an agent reports the node."""
    short_bytes: int | None
    """Memory that the pod lacks on its fullest candidate device; null if memory is not the
    reason."""
    candidates: list[CandidateView]
    score_ratio: float | None
    """Score from 0 to 1, highest wins: the weighted mean of ``score_terms`` (setting
    score_weights). If the pod does not fit, it is null and there are no terms."""
    score_terms: dict[str, float]
    holds: list[HoldView]
    """Pods with precedence on the node, at most 10. Pods that the caller is not authorized to get
    are left out."""
    blockers: list[HeldView]
    """Pods that hold the memory or the replicas that the pod needs, largest first, at most 10."""
    hidden_blockers: int
    """Number of such pods that the caller is not authorized to get, and the memory that they hold
    in total."""
    hidden_blockers_bytes: int
    lines: list[str]
    """The same facts as lines of text."""


class CheckView(View):
    reason: str
    message: str
    evictable: bool


class TermView(View):
    name: str
    value_ratio: float
    """0 to 1; higher is better."""
    weight: float
    """Weight in the settings (score_weights), and its share of the sum of all weights."""
    part_ratio: float
    contribution_ratio: float
    """value_ratio times part_ratio. The sum over all terms is the score."""


class LiveScoreView(Recomputed):
    """The answer that filter and prioritize would give now if all eligible nodes were offered."""

    node: NearestView
    eligible: bool
    """Whether the node is eligible by selector, affinity, taints and cordon."""
    not_tried: str | None
    """Why no scheduler that calls Headroom tries the pod: scheduling gates or another scheduler;
    null if one does."""
    not_checked: list[str]
    """Checks of kube-scheduler that this answer does not include."""
    failing: list[CheckView]
    """All failed checks, starting with the reason that filter returns; empty if the pod fits."""
    score_ratio: float | None
    terms: list[TermView]
    fits: int
    """Number of eligible nodes on which the pod fits."""
    rank: int | None
    """1 plus the number of nodes with a higher score; null if the node is not eligible or the
    pod does not fit."""
    tied: int
    """Number of other nodes with the same score. Among equal scores, the node with the least free
    memory wins, or with policy spread the node with the most."""
    wins: bool
    """Whether this node is the winner and a scheduler tries the pod."""
    winner: str | None
    """The best eligible node. It and its score are null if the pod fits on no node, or if ``node``
    is not eligible."""
    winner_score_ratio: float | None


class ScoreBody(Body):
    namespace: str
    name: str
    uid: str
    bound_to: str | None
    taken_back: bool
    """Whether the pod is bound. It is then scored as if its memory were free again."""
    live: LiveScoreView
    stored: DecisionView | None
    """The last attempt to place the pod, with its best nodes; null if none is on record."""
    unanswered: list[Unanswered]


PodKey = Annotated[
    str,
    Query(
        pattern="^[^/]+/[^/]+$",
        max_length=512,
        description="Namespace and name of the pod.",
        examples=["default/trainer-0"],
    ),
]
NodeName = Annotated[
    str,
    Query(
        max_length=256,
        description="Only this node, also if the pod does not fit there.",
        examples=["gpu-a"],
    ),
]

routes = APIRouter()


@routes.get("/v1/score", response_model=ScoreBody | RankingBody, responses=UNKNOWN)
def score(
    context: InContext,
    pod: PodKey,
    snap: Newest,
    sees: Visible,
    page: AskedPage,
    node: NodeName = "",
) -> Response:
    """Rank all nodes for this pod, with every term, reason and certainty; 100 unless ``limit`` is
    given. With ``node``, explain why the pod would go to this node or not: all failed checks, or
    the terms of the score and the rank among all nodes. Both are recomputed now; with ``node``, the
    recorded decision is also returned."""
    cluster = context.cluster
    namespace, _, name = pod.partition("/")
    found_pod = pod_named(context, namespace, name)
    request = understood(cluster, found_pod, f"pod {pod}")
    now_s = context.monotonic_s()
    snap = context.seen_by(found_pod, snap)
    if found_pod.node:
        simulation = Simulation(cluster, snap, now_s)
        simulation.release(found_pod.metadata.uid)
        snap = simulation.snapshot()
    if node and node not in snap.row_of:
        raise unknown_node(node)
    eligible = eligible_nodes(found_pod, snap, cluster.node)
    sought = Sought(uid=found_pod.metadata.uid)
    stored, unanswered = decisions(context, sought, 1, sees)
    untried = None
    if not found_pod.node:
        untried = not_tried(found_pod, bool(stored), context.schedulers())
    about = {
        **context.head(snap),
        "namespace": namespace,
        "name": name,
        "uid": found_pod.metadata.uid,
        "bound_to": found_pod.node or None,
        "taken_back": bool(found_pod.node),
    }
    if not node:
        ranked = Ranked.of(cluster, request, snap, eligible, now_s)
        nodes, remaining, continue_ = ranked.page(page)
        return encoded(
            RankingBody(
                **about,
                matching=ranked.matching,
                remaining=remaining,
                continue_=continue_,
                not_tried=untried[1] if untried else None,
                not_checked=[AMOUNTS, *not_modeled(found_pod)],
                fits=int(ranked.verdicts.fits.sum()),
                parts=dict(cluster.rules.weights.parts),
                difference=ranked.difference,
                nodes=nodes,
            )
        )
    row = snap.row_of[node]
    # Compare the node with all eligible nodes, even if it is not eligible itself.
    rows = np.union1d(eligible.rows, [row])
    verdicts = verdicts_on(cluster, request, snap, rows, now_s)
    weights, market = cluster.rules.weights, cluster.market
    comparison = compare(verdicts, int(np.searchsorted(rows, row)), weights, market)
    blocking = blockers(cluster, verdicts, comparison.node)
    return encoded(
        ScoreBody(
            **about,
            live=_live_view(
                comparison,
                eligible.obstacles.get(row, ()),
                untried[1] if untried else None,
                [
                    AMOUNTS,
                    *([DRA_DEVICES] if comparison.node.by_dra else []),
                    *not_modeled(found_pod),
                ],
                nearest_view(
                    comparison.node,
                    context.activity_age(),
                    blocking,
                    sees,
                    context.holds_against(found_pod).get(node, ()),
                ),
            ),
            stored=stored[0] if stored else None,
            unanswered=unanswered,
        )
    )


def _live_view(
    comparison: Comparison,
    obstacles: Sequence[Obstacle],
    untried: str | None,
    not_checked: list[str],
    node: NearestView,
) -> LiveScoreView:
    eligible = not obstacles
    winner = comparison.winner if eligible else ""
    return LiveScoreView(
        node=node,
        eligible=eligible,
        not_tried=untried,
        not_checked=not_checked,
        failing=[
            *(
                CheckView(reason=each.code, message=each.sentence, evictable=False)
                for each in obstacles
            ),
            *(
                CheckView(reason=r.code, message=r.sentence, evictable=r.evictable)
                for r in comparison.failing
            ),
        ],
        score_ratio=comparison.node.score,
        terms=[
            TermView(
                name=term.name,
                value_ratio=term.value,
                weight=term.weight,
                part_ratio=term.part,
                contribution_ratio=term.value * term.part,
            )
            for term in comparison.terms
        ],
        # The comparison counts this node even if it is not eligible.
        fits=comparison.fits - int(not eligible and comparison.node.reason is None),
        rank=comparison.rank if eligible else None,
        tied=comparison.tied if eligible else 0,
        wins=bool(winner) and not untried and winner == comparison.node.node,
        winner=winner or None,
        winner_score_ratio=comparison.winner_score if eligible else None,
    )


def nearest_view(
    node: NodeExplanation,
    aged: Aged,
    blockers: Sequence[Held] = (),
    sees: Sees = everything,
    holds: Sequence[Hold] = (),
) -> NearestView:
    """Return the view of one node. ``holds`` are the pods that have precedence on it."""
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
        candidates=[
            CandidateView(
                device=device_view(device.terms, aged, sees),
                need_bytes=device.need_bytes,
                free_bytes=device.free_bytes,
                short_bytes=device.short_bytes,
            )
            for device in node.candidates
        ],
        holds=[
            _hold_view(hold)
            for hold in holds[:MOST_BLOCKERS]
            if sees(hold.pod.metadata.namespace, hold.pod.metadata.name)
        ],
        blockers=[held_view(held) for held in shown],
        hidden_blockers=len(hidden),
        hidden_blockers_bytes=sum(held.charged_bytes for held in hidden),
        lines=[
            *explanation_lines(node),
            *_hold_lines(holds, sees),
            *map(_blocker_line, shown),
            *_hidden_blocker_lines(hidden),
        ],
    )


def _hold_lines(holds: Sequence[Hold], sees: Sees) -> Iterator[str]:
    for hold in holds[:MOST_BLOCKERS]:
        metadata = hold.pod.metadata
        shown = sees(metadata.namespace, metadata.name)
        name = f"pod {metadata.namespace}/{metadata.name}" if shown else "a pod you may not read"
        yield f"  memory is held for {name} {hold.until_text}"


def _hold_view(hold: Hold) -> HoldView:
    metadata, until_s = hold.pod.metadata, hold.until_s
    return HoldView(
        namespace=metadata.namespace,
        name=metadata.name,
        uid=metadata.uid,
        until=None if until_s is None else stamp(until_s),
    )


def _blocker_line(held: Held) -> str:
    since = f" since {held.since[:19]}Z" if held.since else ""
    holds = f"holds {gib(held.charged_bytes)}{since}, {held.phase}"
    return f"  pod {held.namespace}/{held.name} {holds}"


def _hidden_blocker_lines(hidden: Sequence[Held]) -> list[str]:
    if not hidden:
        return []
    pods_hold = "1 pod that you may not read holds"
    if len(hidden) > 1:
        pods_hold = f"{len(hidden)} pods that you may not read hold"
    return [f"  {pods_hold} {gib(sum(held.charged_bytes for held in hidden))}"]
