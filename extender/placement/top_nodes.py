"""The best of the nodes that were ranked, with the terms of their scores: what a decision keeps."""

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
    #: 0..1, and the named terms of which it is the weighted mean.
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
    """At most so many of the rows that ``ranking`` is about, the winner first, then by score and
    name; nobody who does not fit. ``standing`` is of all nodes, and what they were ranked by."""
    if ranking.winner is None:
        return ()
    scores = ranking.scores
    remaining = scores.copy()
    highest: list[int] = []
    for _ in range(min(most, len(rows))):  # argpartition is slow where many scores are equal
        highest.append(int(remaining.argmax()))
        remaining[highest[-1]] = -1.0
    high = np.array(highest)
    high = high[(scores[high] > 0) & (high != ranking.winner)]
    high = high[np.lexsort((snap.name_rank[rows[high]], -scores[high]))]
    places = np.concatenate(([ranking.winner], high))[:most]
    among = rows[places]
    theirs = Standing.of([column.take(among) for column in standing.columns])
    terms = named_terms(request, snap, among, theirs, now_s, market)
    return tuple(
        Contender(
            snap.nodes[row].name,
            float(scores[place]),
            {name: float(values[i]) for name, values in terms.items()},
        )
        for i, (row, place) in enumerate(zip(among.tolist(), places.tolist(), strict=True))
    )
