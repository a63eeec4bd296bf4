"""The score of one pod on all nodes, or on one node compared with all others."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, HTTPException, Query
from pydantic import ConfigDict
from starlette.responses import Response

from headroom.console.facts.device_occupants import blockers
from headroom.console.responses import (
    BAD_BODY,
    UNKNOWN,
    AskedPage,
    Page,
    PodKey,
    encoded,
    unknown_node,
)
from headroom.console.view_context import Context, InContext, Newest, Visible
from headroom.console.views.decision_bodies import DecisionView, Unanswered
from headroom.console.views.decisions import Sought, decisions
from headroom.console.views.pending import not_tried
from headroom.console.views.ranked_nodes import Ranked, RankingBody
from headroom.console.views.recorded_ranking import recorded_ranking
from headroom.console.views.requested_pods import (
    StrictModel,
    new_not_tried,
    of_manifest,
    of_size,
    pod_named,
    understood,
)
from headroom.console.views.score_bodies import (
    CheckView,
    LiveScoreView,
    NearestView,
    ScoreBody,
    TermView,
    nearest_view,
)
from headroom.contract.kube import Pod
from headroom.core.placement.explain import Comparison, compare
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import Snapshot
from headroom.core.rules.eligible_nodes import (
    AMOUNTS,
    DRA_DEVICES,
    Obstacle,
    eligible_nodes,
    not_modeled,
)
from headroom.core.whatif.held_memory import verdicts_on
from headroom.core.whatif.simulation import Simulation
from headroom.runtime.server.auth import Sees

NodeName = Annotated[
    str,
    Query(
        max_length=256,
        description="Only this node, also if the pod does not fit there.",
        examples=["gpu-a"],
    ),
]
Against = Annotated[
    str,
    Query(
        max_length=256,
        description="Compare ``node`` with this node; default: with the winner, or if ``node`` "
        "wins, with the second.",
        examples=["gpu-b"],
    ),
]
DecisionId = Annotated[
    str,
    Query(
        max_length=512,
        description="The ranking of this decision about the pod, from its record: an id, or last.",
        examples=["last"],
    ),
]


class NewPodAsked(StrictModel):
    """A pod that does not exist yet."""

    model_config = ConfigDict(
        json_schema_extra={
            "examples": [
                {
                    "manifest": {
                        "metadata": {"annotations": {"headroom.gpu/vram": "8Gi"}},
                        "spec": {
                            "containers": [
                                {"name": "main", "resources": {"limits": {"nvidia.com/gpu": "1"}}}
                            ]
                        },
                    }
                }
            ]
        }
    )

    manifest: dict[str, Any]
    """A pod as kubectl get pod -o json prints it, without spec.nodeName."""


@dataclass(frozen=True, slots=True)
class _Asked:
    """The pod whose score is asked for."""

    pod: Pod
    request: VramRequest
    not_tried: str | None
    #: Checks of kube-scheduler that concern only this kind of question.
    not_checked: tuple[str, ...] = ()
    stored: DecisionView | None = None
    unanswered: Sequence[Unanswered] = ()


routes = APIRouter()


@routes.get("/v1/score", response_model=ScoreBody | RankingBody, responses=UNKNOWN)
def score(
    context: InContext,
    pod: PodKey,
    snap: Newest,
    sees: Visible,
    page: AskedPage,
    node: NodeName = "",
    against: Against = "",
    decision: DecisionId = "",
) -> Response:
    """Rank all nodes for this pod, with every term, reason and certainty; 100 unless ``limit`` is
    given. With ``node``, explain why the pod would go to this node or not: all failed checks, or
    the terms of the score and the rank among all nodes. Both are recomputed now; with ``node``, the
    recorded decision is also returned. With ``decision``, return the ranking of a past decision:
    the terms of its best 50 nodes."""
    namespace, _, name = pod.partition("/")
    if decision:
        if node or against:
            raise HTTPException(
                422,
                "query decision: a decision on record has only the ranking; remove query "
                f"{'node' if node else 'against'}. Example: pod={pod}&decision=last",
            )
        return encoded(recorded_ranking(context, snap, (namespace, name), decision, page))
    found_pod = pod_named(context, namespace, name)
    request = understood(context.cluster, found_pod, f"pod {pod}")
    sought = Sought(uid=found_pod.metadata.uid)
    stored, unanswered = decisions(context, sought, 1, sees)
    untried = None
    if not found_pod.node:
        untried = not_tried(found_pod, bool(stored), context.schedulers())
    asked = _Asked(
        found_pod,
        request,
        untried[1] if untried else None,
        stored=stored[0] if stored else None,
        unanswered=unanswered,
    )
    return _scored(context, asked, snap, sees, page, node, against)


@routes.post("/v1/score", response_model=ScoreBody | RankingBody, responses=UNKNOWN | BAD_BODY)
def score_of_new_pod(
    context: InContext,
    asked: NewPodAsked,
    snap: Newest,
    sees: Visible,
    page: AskedPage,
    node: NodeName = "",
    against: Against = "",
) -> Response:
    """Rank all nodes for a pod that does not exist yet, or explain one node, like GET. Nothing is
    created. The answer does not include changes that the webhook would make to the pod, except its
    gate and its scheduler."""
    pod = of_manifest(asked.manifest, "body manifest", "new")
    request = of_size(understood(context.cluster, pod, "body manifest"))
    untried = new_not_tried(context.cluster, pod, context.schedulers())
    new = _Asked(pod, request, untried or None, ("ResourceQuotas",))
    return _scored(context, new, snap, sees, page, node, against)


def _scored(
    context: Context,
    asked: _Asked,
    snap: Snapshot,
    sees: Sees,
    page: Page,
    node: str,
    against: str,
) -> Response:
    """Return the ranking of all nodes, or the answer about one node."""
    cluster, pod, now_s = context.cluster, asked.pod, context.monotonic_s()
    snap = context.seen_by(pod, snap)
    if pod.node:
        simulation = Simulation(cluster, snap, now_s)
        simulation.release(pod.metadata.uid)
        snap = simulation.snapshot()
    for each in filter(None, (node, against)):
        if each not in snap.row_of:
            raise unknown_node(each)
    if against and not node:
        raise HTTPException(
            422, f"query against: also name the other node. Example: node=gpu-a&against={against}"
        )
    if against and against == node:
        raise HTTPException(
            422, f"query against: {against} is also the value of query node; name two nodes"
        )
    eligible = eligible_nodes(pod, snap, cluster.node)
    about = {
        **context.head(snap),
        "namespace": pod.metadata.namespace,
        "name": pod.metadata.name,
        "uid": pod.metadata.uid,
        "bound_to": pod.node or None,
        "taken_back": bool(pod.node),
    }
    if not node:
        ranked = Ranked.of(cluster, asked.request, snap, eligible, now_s)
        nodes, remaining, continue_ = ranked.page(page)
        return encoded(
            RankingBody(
                **about,
                source="recomputed",
                decision_id=None,
                decided_at=None,
                matching=ranked.matching,
                remaining=remaining,
                continue_=continue_,
                not_tried=asked.not_tried,
                not_checked=[AMOUNTS, *asked.not_checked, *not_modeled(pod)],
                fits=int(ranked.verdicts.fits.sum()),
                unrecorded=0,
                reasons=ranked.reasons,
                parts=dict(cluster.rules.weights.parts),
                difference=ranked.difference,
                nodes=nodes,
            )
        )
    row = snap.row_of[node]
    # Compare the node with all eligible nodes, even if it is not eligible itself.
    rows = np.union1d(eligible.rows, [row])
    verdicts = verdicts_on(cluster, asked.request, snap, rows, now_s)
    weights, market = cluster.rules.weights, cluster.market
    comparison = compare(verdicts, int(np.searchsorted(rows, row)), weights, market)
    blocking = blockers(cluster, verdicts, comparison.node)
    of_dra = [DRA_DEVICES] if comparison.node.by_dra else []
    ranked = Ranked.of(cluster, asked.request, snap, eligible, now_s)
    return encoded(
        ScoreBody(
            **about,
            live=_live_view(
                comparison,
                eligible.obstacles.get(row, ()),
                asked.not_tried,
                [AMOUNTS, *asked.not_checked, *of_dra, *not_modeled(pod)],
                ranked.compared(row, snap.row_of[against] if against else None),
                nearest_view(
                    comparison.node,
                    context.activity_age(),
                    blocking,
                    sees,
                    context.holds_against(pod).get(node, ()),
                ),
            ),
            stored=asked.stored,
            unanswered=list(asked.unanswered),
        )
    )


def _live_view(
    comparison: Comparison,
    obstacles: Sequence[Obstacle],
    untried: str | None,
    not_checked: list[str],
    difference: str | None,
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
        difference=difference,
    )
