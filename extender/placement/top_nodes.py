"""Selects the best ranked nodes, with the terms of their scores, for the record of a decision."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from extender.placement.demand_pricing import Market
from extender.placement.request import VramRequest
from extender.placement.score import Ranking, Standing, named_terms
from extender.placement.snapshot import Rows, Snapshot


@dataclass(frozen=True, slots=True)
class Contender:
    node: str
    #: 0..1, the weighted mean of ``terms``.
    score: float
    terms: Mapping[str, float]


def best(
    request: VramRequest,
    snap: Snapshot,
    rows: Rows,
    ranking: Ranking,
    standing: Standing,
    now_s: float,
    market: Market | None,
    most: int,
) -> tuple[Contender, ...]:
    """Return at most ``most`` nodes on which the pod fits, ranked by score and name.

    The winner comes first. ``ranking`` belongs to ``rows``; ``standing`` has all nodes of the
    snapshot.
    """
    if ranking.winner is None:
        return ()
    scores = ranking.scores
    remaining = scores.copy()
    highest: list[int] = []
    for _ in range(min(most, len(rows))):  # argpartition is slow with many equal scores
        highest.append(int(remaining.argmax()))
        remaining[highest[-1]] = -1.0
    high = np.array(highest)
    high = high[(scores[high] > 0) & (high != ranking.winner)]
    high = high[np.lexsort((snap.name_rank[rows[high]], -scores[high]))]
    indices = np.concatenate(([ranking.winner], high))[:most]
    top_rows = rows[indices]
    top_standing = Standing.of([column.take(top_rows) for column in standing.columns])
    terms = named_terms(request, snap, top_rows, top_standing, now_s, market)
    return tuple(
        Contender(
            snap.nodes[row].name,
            float(scores[index]),
            {name: float(values[i]) for name, values in terms.items()},
        )
        for i, (row, index) in enumerate(zip(top_rows.tolist(), indices.tolist(), strict=True))
    )
