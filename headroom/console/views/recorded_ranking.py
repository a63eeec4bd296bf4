"""The nodes that a decision on record ranked, with the terms of their scores."""

from collections.abc import Mapping

from fastapi import HTTPException

from headroom.console.responses import Page, reason_view, stamp
from headroom.console.view_context import Context
from headroom.console.views.ranked_nodes import USUAL_PAGE, RankedNodeView, RankingBody, before
from headroom.core.journal.decision_records import (
    Candidate,
    Candidates,
    Filtered,
    P,
    Ranked,
    Record,
)
from headroom.core.placement.node_order import difference
from headroom.core.placement.snapshot import REASONS, Snapshot

#: Scores and terms are recorded in thousandths, so their sum can differ by this much.
_ROUNDED = 0.005


def recorded_ranking(
    context: Context, snap: Snapshot, pod: tuple[str, str], decision_id: str, page: Page
) -> RankingBody:
    """Return the ranking of a decision about this pod.

    ``decision_id`` is an id, or "last". ``snap`` is the newest snapshot. Raises ``HTTPException``
    404 if the decision is not on record, or is about another pod.
    """
    if decision_id == "last":
        decision_id = _last(context, pod)
    parts = [record for _, record in context.journal.of_id(decision_id)]
    records = [record for record in parts if (record.namespace, record.name) == pod]
    if not records:
        raise HTTPException(
            404,
            f"decision {decision_id} about pod {'/'.join(pod)} is unknown or no longer on record; "
            f"GET /v1/decisions?pod={'/'.join(pod)} lists its decisions",
        )
    records.sort(key=lambda record: record.at_s)
    filtered, ranked = _newest(records, Filtered), _newest(records, Ranked)
    kept = _newest(records, Candidates)
    best = kept.first() if kept else []
    node = records[-1].node
    fits = filtered.fits if filtered else ranked.offered if ranked else 0
    first, limit = before(page.after), page.limit or USUAL_PAGE
    nodes = [_view(best, each) for each in best]
    if not best and node and fits == 1:  # filter returned only this node, so none was ranked
        nodes = [_view(best, Candidate(node, 0.0, {}))]
    remaining = max(0, len(nodes) - first - limit)
    weights = _weights(context, best)
    return RankingBody(
        **context.head(snap),
        source="decision",
        decision_id=decision_id,
        decided_at=stamp(records[-1].at_s),
        namespace=pod[0],
        name=pod[1],
        uid=records[-1].uid,
        bound_to=None,
        taken_back=False,
        matching=len(nodes),
        remaining=remaining,
        continue_=str(first + limit) if remaining else None,
        not_tried=None,
        not_checked=[],
        fits=fits,
        unrecorded=max(0, fits - len(nodes)),
        reasons=[
            reason_view(reason, nodes)
            for code, nodes in (filtered.rejected.items() if filtered else ())
            if (reason := REASONS[code])
        ],
        parts=weights,
        difference=_difference(best, weights),
        nodes=nodes[first : first + limit],
    )


def _newest(records: list[Record], kind: type[P]) -> P | None:
    """Return the newest part of this kind. ``records`` are the parts of a decision by time."""
    return next((part for record in reversed(records) if (part := record.part(kind))), None)


def _last(context: Context, pod: tuple[str, str]) -> str:
    """Return the id of the pod's last decision, or "last" if none is on record."""
    newest = (
        next(
            (r for r in journal.records.newest_first() if (r.namespace, r.name) == pod),
            None,
        )
        for _, journal in context.journal.each()
    )
    found = [record for record in newest if record is not None]
    return max(found, key=lambda record: record.at_s).decision_id if found else "last"


def _weights(context: Context, best: list[Candidate]) -> dict[str, float]:
    """Return the current share of each term, or nothing if the scores were not computed with it."""
    parts = context.cluster.rules.weights.parts
    for each in best:
        total = sum(parts[name] * value for name, value in each.score_terms.items())
        if abs(total - each.score_ratio) > _ROUNDED:
            return {}
    return dict(parts)


def _difference(best: list[Candidate], parts: Mapping[str, float]) -> str | None:
    if len(best) < 2 or not parts:
        return None
    first, second = (
        {name: parts[name] * value for name, value in each.score_terms.items()} for each in best[:2]
    )
    return difference(best[0].node, best[1].node, first, second)


def _view(best: list[Candidate], each: Candidate) -> RankedNodeView:
    """Return the view of a node. A node without terms was the only node, so it has no score."""
    return RankedNodeView(
        node=each.node,
        rank=1 + sum(other.score_ratio > each.score_ratio for other in best),
        eligible=True,
        fits=True,
        reason=None,
        message=None,
        certainty=None,
        score_ratio=each.score_ratio if each.score_terms else None,
        score_terms=dict(each.score_terms),
    )
