"""Ranks the nodes that fit by a weighted score of named terms, and chooses a single winner.

Scores are floats in 0..1. A node's score does not depend on which other nodes are offered. Bytes
are only compared as integers. Ties are broken by the best fit. The node with the least free memory
after placement wins, and then the device with the least free memory. With ``spread``, it is the
device with the most free memory. A hash of the pod breaks the remaining ties, so that a burst of
pods does not compete for one of many equal nodes. All replicas of the extender choose the same
winner.

A pod without a GPU takes CPU and host memory, which GPU pods on the node also need. So it is best
placed on a node without GPUs, or otherwise on the node with the least *spare* GPU memory. These
pods fill one node after the other, so that other nodes keep enough CPU and host memory for GPU
pods.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from headroom.contract.annotations import ScoringPolicy
from headroom.core.placement.demand_pricing import Market
from headroom.core.placement.fit import Verdicts
from headroom.core.placement.policy import Weights
from headroom.core.placement.request import VramRequest
from headroom.core.placement.score_terms import KEPT, Scores, report, terms
from headroom.core.placement.snapshot import NO_DEVICE, Mask, Rows, Snapshot

#: Knuth's multiplicative hash constant, which spreads neighbouring numbers over the range.
_SCATTER = 2_654_435_761
_HASH_BITS = (1 << 32) - 1
#: Fraction of ``packing`` that depends on prices, if prices decide. The rest is computed as in
#: policy pack.
_CHEAP = 0.9


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Scores of the n requested rows, in their order."""

    #: (n,) 0..1, or 0 if the pod does not fit.
    scores: Scores
    #: Index of the best node, or None if the pod fits on no node or requests no GPU.
    winner: int | None
    #: Terms by name, each (n,) 0..1, whose weighted mean is the score. Only ``rank`` fills them.
    terms: Mapping[str, Scores] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """The part of the score that is cached for each kind of request and each node of a snapshot."""

    #: Weighted sum of all terms except ``report``, with weights relative to the total weight and
    #: without prices.
    score: Scores
    #: Free memory after placement, on the node and on its fullest candidate device.
    node_left_bytes: Rows
    device_left_bytes: Rows
    #: (nodes, terms) in the order of ``KEPT``, without prices.
    terms: Scores
    #: Whether kube-scheduler allocates the pod's GPUs on the node by DRA. Such a node scores 0,
    #: because no term of its score is known.
    by_dra: Mask

    @classmethod
    def empty(cls) -> "Standing":
        """Return an object without rows."""
        none = np.empty(0, np.int64)
        return cls(np.empty(0), none, none, np.empty((0, len(KEPT))), np.empty(0, bool))

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return (
            *(self.score, self.node_left_bytes, self.device_left_bytes, self.terms),
            self.by_dra,
        )

    def term(self, name: str, rows: Rows) -> Scores:
        values: Scores = self.terms[rows, KEPT.index(name)]
        return values


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
    counts = fits & ~verdicts.by_dra
    return Ranking(ranking.scores, ranking.winner, {n: term * counts for n, term in named.items()})


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

    ``fits`` belongs to ``rows``. Other rows score 0.
    """
    if not fits.any():
        return Ranking(np.zeros(len(rows)), None)
    parts = weights.parts
    score = standing.score.take(rows) + report(snap, rows, now_s) * parts["report"]
    if market is not None and prices_decide(request, market):
        for name, term in _price_terms(snap, rows, standing, market).items():
            score = score + parts[name] * (term - standing.term(name, rows))
    by_dra = standing.by_dra.take(rows)
    scores = score * (fits & ~by_dra)
    sign = -1 if request.policy is ScoringPolicy.SPREAD else 1
    tied = (fits & (scores == scores.max())).nonzero()[0]
    for left_bytes in (standing.node_left_bytes, standing.device_left_bytes):
        values = sign * left_bytes.take(rows[tied])
        tied = tied[values == values.min()]
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
    """Return all terms of the score of each row."""
    named = dict(zip(KEPT, standing.terms[rows].T, strict=True))
    named["report"] = np.full(rows.shape, report(snap, rows, now_s))
    if market is not None and prices_decide(request, market):
        named |= _price_terms(snap, rows, standing, market)
    return named


def prices_decide(request: VramRequest, market: Market) -> bool:
    """Return whether prices change the score. If all prices are equal, the score equals the score
    of policy pack."""
    return request.policy is ScoringPolicy.FRAGMENTATION and not market.uniform


def _price_terms(
    snap: Snapshot, rows: Rows, standing: Standing, market: Market
) -> dict[str, Scores]:
    """Return the terms that prices replace, 0..1 for each row.

    ``packing`` is higher for cheaper memory. ``smallest_device`` is neutral, because prices already
    take the size into account: using both wasted 2 % of a cluster's memory.
    """
    taken_bytes = (snap.node_headroom_bytes - standing.node_left_bytes).take(rows)
    cheap = market.cheap(snap, rows, taken_bytes)
    return {
        "packing": (1 - _CHEAP) * standing.term("packing", rows) + _CHEAP * cheap,
        "smallest_device": np.full(len(rows), 0.5),
    }


def standing(verdicts: Verdicts, weights: Weights) -> Standing:
    """Compute the cached part of the score for each node of the verdicts' snapshot."""
    found = terms(verdicts)
    score = (found.values * [weights.parts[name] for name in KEPT]).sum(axis=1)
    by_dra = np.zeros(len(score), bool)
    by_dra[verdicts.rows] = verdicts.by_dra
    return Standing(score, found.node_left_bytes, found.device_left_bytes, found.values, by_dra)


@dataclass(frozen=True, slots=True, eq=False)
class BestNodes:
    """The n nodes with the highest scores, starting with the winner."""

    names: tuple[str, ...]
    #: (n,) 0..1, the weighted mean of ``terms``.
    scores: Scores
    #: Terms by name, each (n,) 0..1.
    terms: Mapping[str, Scores]


def best(
    request: VramRequest,
    snap: Snapshot,
    rows: Rows,
    ranking: Ranking,
    standing: Standing,
    now_s: float,
    market: Market | None,
    most: int,
) -> BestNodes:
    """Return at most ``most`` nodes, first the winner and then the other nodes with the highest
    scores.

    Names break ties. The result is empty if the pod fits on no node. ``ranking`` belongs to
    ``rows``.
    """
    if ranking.winner is None:
        return BestNodes((), np.empty(0), {})
    scores = ranking.scores
    others = highest(scores, most)
    others = others[(scores[others] > 0) & (others != ranking.winner)]
    order = np.lexsort((snap.name_rank.take(rows[others]), -scores[others]))
    indices = np.append(ranking.winner, others[order])[:most]
    top_rows = rows[indices]
    named = named_terms(request, snap, top_rows, standing, now_s, market)
    return BestNodes(tuple(snap.names[row] for row in top_rows.tolist()), scores[indices], named)


def highest(scores: Scores, most: int) -> Rows:
    """Return the indices of the ``most`` highest scores, highest first. The first of equal scores
    come first."""
    # The highest score of each of ``most`` blocks is at least the lowest of the result, so few
    # scores remain to be sorted. ``argpartition`` takes ten times as long with many equal scores.
    block = len(scores) // most
    least = scores[: most * block].reshape(most, block).max(axis=1).min() if block else 0.0
    among = np.flatnonzero(scores >= least)
    found: Rows = among[np.argsort(-scores[among], kind="stable")[:most]]
    return found


def best_for_non_gpu_pod(snap: Snapshot, rows: Rows) -> Mask:
    """Return the mask (n,) of the best rows for a pod without a GPU.

    If there are nodes without devices, all of them are best. Otherwise only the node with the least
    spare GPU memory is best. Names break ties, so that pods fill one node before they use the next.
    A row of -1 is an unknown node, which is never best.
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
