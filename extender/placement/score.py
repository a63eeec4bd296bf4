"""Ranks the nodes that fit by a weighted score of named terms, and chooses a single winner.

Scores are floats in 0..1. A node's score does not depend on which other nodes are offered. Bytes
are only compared as integers. The best fit breaks ties: the least free memory on the node after
placement, then on the device (with ``spread``, the most). A hash of the pod breaks remaining ties,
so that a burst of pods does not compete for one of many equal nodes. All replicas of the extender
choose the same winner.

A pod without a GPU takes CPU and host memory, which GPU pods on the node also need. It is best
placed on a node without GPUs, else on the node with the least *spare* GPU memory. Filling nodes one
by one keeps the others whole.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from contract.annotations import ScoringPolicy
from extender.placement.demand_pricing import Market
from extender.placement.fit import Verdicts
from extender.placement.policy import Weights
from extender.placement.request import VramRequest
from extender.placement.score_terms import KEPT, Scores, report, terms
from extender.placement.snapshot import NO_DEVICE, Mask, Rows, Snapshot

#: Knuth's multiplicative hash constant, which spreads neighbouring numbers over the range.
_SCATTER = 2_654_435_761
_HASH_BITS = (1 << 32) - 1
_LARGEST = np.iinfo(np.int64).max
#: Part of ``packing`` that prices determine if they decide. The rest is as with policy pack.
_CHEAP = 0.9


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Scores of the n requested rows, in their order."""

    #: (n,) 0..1; 0 if the pod does not fit.
    scores: Scores
    #: Index of the best node; None if the pod fits on no node or requests no GPU.
    winner: int | None
    #: Named terms, each (n,) 0..1, whose weighted mean is the score. Only ``rank`` fills them.
    terms: Mapping[str, Scores] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """The part of the score that is cached for one kind of request; all arrays are (n,)."""

    #: Weighted sum of all terms but ``report``, with weights relative to the total weight, and
    #: without prices.
    score: Scores
    #: Free after placement, on the node and on its fullest candidate device.
    node_left_bytes: Rows
    device_left_bytes: Rows
    #: In the order of ``KEPT``; empty if ``take`` left them out.
    terms: tuple[Scores, ...] = ()

    @classmethod
    def empty(cls) -> "Standing":
        """Return the values of no rows."""
        none = np.empty(0, np.int64)
        return cls(np.empty(0), none, none, tuple(np.empty(0) for _ in KEPT))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.score, self.node_left_bytes, self.device_left_bytes, *self.terms

    @classmethod
    def of(cls, columns: Sequence[NDArray[Any]]) -> "Standing":
        score, node_left_bytes, device_left_bytes, *terms = columns
        return cls(score, node_left_bytes, device_left_bytes, tuple(terms))

    def take(self, rows: Rows, with_terms: bool = True) -> "Standing":
        """Return the values for these rows; the terms only if they are needed."""
        columns = self.columns if with_terms else self.columns[:3]
        return Standing.of([column.take(rows) for column in columns])


def rank(verdicts: Verdicts, weights: Weights, market: Market | None = None) -> Ranking:
    """Rank the nodes that fit, with the terms of their scores.

    The score and all terms of other nodes are 0. If the request has no GPU, there is no winner.
    """
    request, snap, rows = verdicts.request, verdicts.snap, verdicts.rows
    fits, now_s = verdicts.fits, verdicts.now_s
    if not request.asks:
        return Ranking(np.zeros(len(rows)), None)
    cached = standing(verdicts, weights)
    ranking = rank_rows(request, snap, rows, fits, cached, now_s, weights, market)
    named = named_terms(request, snap, rows, cached, now_s, market)
    return Ranking(ranking.scores, ranking.winner, {n: term * fits for n, term in named.items()})


def rank_rows(
    request: VramRequest,
    snap: Snapshot,
    rows: Rows,
    fits: Mask,
    standing: Standing,
    now_s: float,
    weights: Weights,
    market: Market | None = None,
) -> Ranking:
    """Rank the rows that fit by the cached part of their scores, without returning the terms.

    ``fits`` and ``standing`` belong to ``rows``. Other rows score 0.
    """
    if not fits.any():
        return Ranking(np.zeros(len(rows)), None)
    score = standing.score + report(snap, rows, now_s) * weights.parts["report"]
    if market is not None and prices_decide(request, market):
        by_policy = dict(zip(KEPT, standing.terms, strict=True))
        for name, term in _price_terms(snap, rows, standing, market).items():
            score = score + weights.parts[name] * (term - by_policy[name])
    scores = score * fits
    sign = -1 if request.policy is ScoringPolicy.SPREAD else 1
    best = fits & (scores == scores[fits].max())
    for left_bytes in (standing.node_left_bytes, standing.device_left_bytes):
        # All rows, because to select the few or many that are left takes longer.
        values = np.where(best, sign * left_bytes, _LARGEST)
        best &= values == values.min()
    tied = np.flatnonzero(best)
    if len(tied) > 1:
        offset = crc32(request.uid.encode())
        hashes = (snap.name_rank.take(rows[tied]).astype(np.int64) * _SCATTER + offset) & _HASH_BITS
        tied = tied[hashes.argmin() :]
    return Ranking(scores, int(tied[0]))


def named_terms(
    request: VramRequest,
    snap: Snapshot,
    rows: Rows,
    standing: Standing,
    now_s: float,
    market: Market | None,
) -> dict[str, Scores]:
    """Return all terms of the score of each row.

    ``standing`` belongs to these rows and includes its terms.
    """
    named = dict(zip(KEPT, standing.terms, strict=True))
    named["report"] = np.broadcast_to(report(snap, rows, now_s), rows.shape)
    if market is not None and prices_decide(request, market):
        named |= _price_terms(snap, rows, standing, market)
    return named


def prices_decide(request: VramRequest, market: Market) -> bool:
    """Return whether prices change the score. With equal prices it is that of pack."""
    return request.by_prices and not market.uniform


def _price_terms(
    snap: Snapshot, rows: Rows, standing: Standing, market: Market
) -> dict[str, Scores]:
    """Return the terms that prices replace, 0..1 for each row.

    ``packing``: the cheaper the taken memory, the higher. ``smallest_device`` is neutral: prices
    already cover it, and in addition to them it wasted 2 % of a cluster's memory.
    """
    taken_bytes = snap.node_headroom_bytes.take(rows) - standing.node_left_bytes
    packing = dict(zip(KEPT, standing.terms, strict=True))["packing"]
    cheap = market.cheap(snap, rows, taken_bytes)
    return {
        "packing": (1 - _CHEAP) * packing + _CHEAP * cheap,
        "smallest_device": np.full(len(rows), 0.5),
    }


def standing(verdicts: Verdicts, weights: Weights) -> Standing:
    """Compute the cached part of the score for each row of the verdicts."""
    found = terms(verdicts)
    score = np.zeros(len(verdicts.rows))
    for name, value in found.values.items():
        score += weights.parts[name] * value
    kept = tuple(found.values[name] for name in KEPT)
    return Standing(score, found.node_left_bytes, found.device_left_bytes, kept)


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
    """Return the winner, and then the other nodes with the highest scores, at most ``most`` nodes.

    Names break ties. Empty if the pod fits on no node. ``ranking`` belongs to ``rows``;
    ``standing`` has all nodes of the snapshot.
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
    top_standing = standing.take(top_rows)
    terms = named_terms(request, snap, top_rows, top_standing, now_s, market)
    return tuple(
        Contender(
            snap.nodes[row].name,
            float(scores[index]),
            {name: float(values[i]) for name, values in terms.items()},
        )
        for i, (row, index) in enumerate(zip(top_rows.tolist(), indices.tolist(), strict=True))
    )


def best_for_non_gpu_pod(snap: Snapshot, rows: Rows) -> Mask:
    """Return the mask (n,) of the best rows for a pod without a GPU.

    If there are nodes without devices, all of them are best. Else the best is the one node with the
    least spare GPU memory. Its name breaks ties, so that pods fill one node before they use the
    next. A row of -1, an unknown node, is never best.
    """
    best = np.zeros(len(rows), bool)
    known = np.flatnonzero(rows >= 0)
    if not len(known):
        return best
    spare = snap.spare_bytes.take(rows[known])
    least = known[spare == spare.min()]
    if spare.min() == NO_DEVICE:
        best[least] = True
    else:
        best[least[snap.name_rank.take(rows[least]).argmin()]] = True
    return best
