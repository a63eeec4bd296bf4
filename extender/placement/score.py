"""Which of the nodes that fit is best: named terms, weighted, decided by us to a single winner.

Scores are floats in 0..1 on a scale that does not depend on who else is offered; bytes are only
compared as integers. Equal scores are settled by the best fit: the least memory left on the node,
then on the device (with ``spread``, the most); then by a hash of the pod, so that pods of one burst
do not all ask for the same of many equal nodes. So the same question has the same answer on every
replica.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

import numpy as np
from numpy.typing import NDArray

from contract.annotations import ScoringPolicy
from extender.placement.candidate_devices import Mask
from extender.placement.demand_pricing import Market
from extender.placement.fit import Verdicts
from extender.placement.policy import Weights
from extender.placement.request import VramRequest
from extender.placement.score_terms import CHEAP, KEPT, Scores, report, terms
from extender.placement.snapshot import Rows, Snapshot

#: Odd, and far from small multiples of a power of two: spreads neighbouring numbers.
_SCATTER = 2_654_435_761
_HASHES = 1 << 32


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Scores of the nodes asked about, in their order."""

    #: (n,) 0..1; 0 where the pod does not fit.
    scores: Scores
    #: Place of the best node among those asked about; None when none fits, or any would do.
    winner: int | None
    #: Named terms, each (n,) 0..1, whose weighted mean is the score; only where they were asked
    #: for.
    terms: Mapping[str, Scores] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class Standing:
    """Where each node stands for one kind of request, whoever else is offered; all (n,)."""

    #: Weighted mean of all terms but ``report``, each with its part of the whole weight, and
    #: without what prices say.
    score: Scores
    node_left_bytes: Rows
    device_left_bytes: Rows
    #: In the order of ``KEPT``; empty where nobody asks for more than an order.
    terms: tuple[Scores, ...] = ()

    @property
    def columns(self) -> tuple[NDArray[Any], ...]:
        return self.score, self.node_left_bytes, self.device_left_bytes, *self.terms

    @classmethod
    def of(cls, columns: Sequence[NDArray[Any]]) -> "Standing":
        score, node_left_bytes, device_left_bytes, *terms = columns
        return cls(score, node_left_bytes, device_left_bytes, tuple(terms))

    def take(self, rows: Rows) -> "Standing":
        """What puts these rows in order."""
        left = self.node_left_bytes.take(rows), self.device_left_bytes.take(rows)
        return Standing(self.score.take(rows), *left)


def rank(verdicts: Verdicts, weights: Weights, market: Market | None = None) -> Ranking:
    """Rank the nodes that fit; the others score 0. With the terms, for who wants to know why."""
    request, snap, rows = verdicts.request, verdicts.snap, verdicts.rows
    fits, now_s = verdicts.fits, verdicts.now_s
    if not request.asks:
        return Ranking(np.zeros(len(rows)), None)
    stands = standing(verdicts, weights)
    ranking = rank_rows(request, snap, rows, fits, stands, now_s, weights, market)
    named = named_terms(request, snap, rows, stands, now_s, market)
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
    """The same without the terms, from where each of the rows stands."""
    if not fits.any():
        return Ranking(np.zeros(len(rows)), None)
    score = standing.score + report(snap, rows, now_s) * weights.parts["report"]
    if request.by_prices:
        part = CHEAP * weights.parts["packing"]
        score = score + part * _cheap(snap, rows, standing, market)
    scores = score * fits
    sign = -1 if request.policy is ScoringPolicy.SPREAD else 1
    left = np.flatnonzero(fits)
    for key in (-scores, sign * standing.node_left_bytes, sign * standing.device_left_bytes):
        values = key[left]
        left = left[values == values.min()]
    if len(left) > 1:
        offset = crc32(request.uid.encode())
        hashes = (snap.name_rank.take(rows[left]).astype(np.int64) * _SCATTER + offset) % _HASHES
        left = left[hashes.argmin() :]
    return Ranking(scores, int(left[0]))


def named_terms(
    request: VramRequest,
    snap: Snapshot,
    rows: Rows,
    standing: Standing,
    now_s: float,
    market: Market | None,
) -> dict[str, Scores]:
    """What the score of each row is the weighted mean of; ``standing`` is of these rows, with its
    terms."""
    named = dict(zip(KEPT, standing.terms, strict=True))
    named["report"] = np.broadcast_to(report(snap, rows, now_s), rows.shape)
    if request.by_prices:
        named["packing"] = named["packing"] + CHEAP * _cheap(snap, rows, standing, market)
    return named


def _cheap(snap: Snapshot, rows: Rows, standing: Standing, market: Market | None) -> Scores | float:
    if market is None:
        return 1.0
    taken = snap.node_headroom_bytes.take(rows) - standing.node_left_bytes
    return market.cheap(snap, rows, taken)


def standing(verdicts: Verdicts, weights: Weights) -> Standing:
    """Of each of the rows asked about."""
    found = terms(verdicts)
    score = np.zeros(len(verdicts.rows))
    for name, value in found.values.items():
        score += weights.parts[name] * value
    kept = tuple(found.values[name] for name in KEPT)
    return Standing(score, found.node_left_bytes, found.device_left_bytes, kept)
