"""Which of the nodes that fit is best: BestFit, decided by us down to a single winner.

The tightest of the devices that the pod could end on counts: it decides what the node can take
next. Beside it, a node is better the more alike its devices stay (``placement.evenness``).

Scores are floats in 0..1 on a scale that does not depend on who else is offered; bytes are only
compared as integers. Equal scores are settled by the least memory left, then by name, so that the
same question has the same answer on every replica.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.annotations import ScoringPolicy
from contract.gpunode import MAX_DEVICE_BYTES
from extender.placement.candidates import Mask
from extender.placement.evenness import more_wasted
from extender.placement.fit import Verdicts
from extender.placement.request import VramRequest
from extender.placement.snapshot import Rows, Snapshot

Scores = NDArray[np.float64]

#: The most that kube-scheduler takes from an extender; the winner alone gets it.
MAX_WIRE_SCORE = 10
#: Measured with ``benchmarks.device_truth``; a node's own fullness settles what these leave.
_PACK = {"device_full": 4, "devices_even": 4, "node_full": 1}
_SPREAD = {"device_empty": 1, "node_empty": 1}


@dataclass(frozen=True, slots=True, eq=False)
class Ranking:
    """Scores of the nodes asked about, in their order."""

    #: (n,) 0..1; 0 where the pod does not fit.
    scores: Scores
    #: Named terms, each (n,) 0..1, whose weighted mean is the score.
    terms: Mapping[str, Scores]
    #: Place of the best node among those asked about; None when none fits, or any would do.
    winner: int | None

    def wire(self) -> NDArray[np.int64]:
        """0..10 for kube-scheduler: 10 for the winner, at most 9 for everybody else.

        Not stretched between the worst and the best: that makes near-equal nodes ties, and
        kube-scheduler breaks ties at random.
        """
        scores = np.floor(self.scores * (MAX_WIRE_SCORE - 1)).astype(np.int64)
        if self.winner is not None:
            scores[self.winner] = MAX_WIRE_SCORE
        return scores


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What the pod would do to each node; all (n,) bytes."""

    #: Left on the fullest device that it could end on.
    left_bytes: Rows
    taken_bytes: Rows
    #: As ``evenness.more_wasted`` says.
    wasted_bytes: Rows

    def take(self, rows: Rows) -> "Outcome":
        return Outcome(*(column.take(rows) for column in self.columns))

    @property
    def columns(self) -> tuple[Rows, Rows, Rows]:
        return self.left_bytes, self.taken_bytes, self.wasted_bytes


def rank(request: VramRequest, snap: Snapshot, verdicts: Verdicts) -> Ranking:
    """Rank the nodes that fit; the others score 0."""
    if not request.asks:
        return Ranking(np.zeros(len(verdicts.rows)), {}, None)
    return rank_rows(request.policy, snap, verdicts.rows, verdicts.fits, outcome(verdicts))


def rank_rows(
    policy: ScoringPolicy, snap: Snapshot, rows: Rows, fits: Mask, outcome: Outcome
) -> Ranking:
    """The same, from the outcome of each of the rows."""
    if not fits.any():
        return Ranking(np.zeros(len(rows)), {}, None)
    device_left = np.where(fits, outcome.left_bytes, 0)
    taken = np.where(fits, outcome.taken_bytes, 0)
    node_left = np.maximum(snap.node_headroom_bytes.take(rows) - taken, 0)
    device_empty = device_left / snap.largest_device_bytes
    node_empty = node_left / snap.largest_node_bytes
    if policy is ScoringPolicy.SPREAD:
        weights, terms = _SPREAD, {"device_empty": device_empty, "node_empty": node_empty}
        device_left, node_left = -device_left, -node_left
    else:
        uneven = outcome.wasted_bytes / (2 * snap.largest_device_bytes)
        even = np.minimum(np.maximum(0.5 - uneven, 0), 1)
        weights = _PACK
        terms = {"device_full": 1 - device_empty, "devices_even": even, "node_full": 1 - node_empty}
    scores = np.zeros(len(rows))
    for name, term in terms.items():
        term *= fits  # others score 0
        scores += weights[name] * term
    scores /= sum(weights.values())
    return Ranking(
        scores, terms, _first(~fits, -scores, node_left, device_left, snap.name_rank.take(rows))
    )


def _first(*keys: NDArray[Any]) -> int:
    """Place of the smallest by the first key; ties are settled by the next one."""
    left = np.arange(len(keys[0]))
    for key in keys:
        values = key[left]
        left = left[values == values.min()]
    return int(left[0])


def outcome(verdicts: Verdicts) -> Outcome:
    """Of each of the rows asked about."""
    rows = verdicts.rows
    left = np.full(len(rows), MAX_DEVICE_BYTES)
    taken, wasted = np.zeros((2, len(rows)), np.int64)
    for verdict in verdicts.asks:
        could, needed = verdict.all_candidates, verdict.all_need_bytes
        after = np.where(could, verdict.all_room_bytes - needed, MAX_DEVICE_BYTES)
        left = np.minimum(left, after.min(axis=1, initial=MAX_DEVICE_BYTES)[rows])
        # Beyond any memory it fits nowhere, and counts for nothing.
        need = np.where(could, np.minimum(needed, MAX_DEVICE_BYTES), 0).max(axis=1, initial=0)
        taken += need[rows] * verdict.ask.count
        wasted += more_wasted(verdict, verdicts.snap)[rows]
    return Outcome(left, taken, wasted)
