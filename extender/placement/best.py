"""The best of the nodes that were ranked, with the terms of their scores: what a decision keeps."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from extender.placement.fit import fit
from extender.placement.mix import Market
from extender.placement.request import VramRequest
from extender.placement.rules import Weights
from extender.placement.score import Ranking, rank
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
    now_s: float,
    weights: Weights,
    market: Market | None,
    most: int,
) -> tuple[Contender, ...]:
    """At most so many of the rows that ``ranking`` is about, the winner first, then by score and
    name; nobody who does not fit."""
    if ranking.winner is None:
        return ()
    scores = ranking.scores
    high = np.arange(len(rows))
    if len(rows) > most:
        high = np.argpartition(-scores, most - 1)[:most]
    high = high[(scores[high] > 0) & (high != ranking.winner)]
    high = high[np.lexsort((snap.name_rank[rows[high]], -scores[high]))]
    places = np.concatenate(([ranking.winner], high))[:most]
    part = snap.part(rows[places])
    verdicts = fit(request, part, np.arange(len(places)), now_s)
    terms = rank(verdicts, weights, market).terms
    return tuple(
        Contender(
            node.name,
            float(scores[place]),
            {name: float(values[i]) for name, values in terms.items()},
        )
        for i, (node, place) in enumerate(zip(part.nodes, places.tolist(), strict=True))
    )
