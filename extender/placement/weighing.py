"""What each kind of request means for every node, kept until the node changes.

Pods come in few kinds, and between two calls few nodes change: only those are weighed again. What
is kept equals what ``fit`` says about the whole snapshot, node by node.
"""

from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.reasons import Reason
from extender.bounded import Bounded
from extender.placement.fit import Codes, Verdicts, fit
from extender.placement.mix import Market
from extender.placement.request import Kind, VramRequest
from extender.placement.rules import Weights
from extender.placement.score import Ranking, Standing, rank_rows, standing
from extender.placement.snapshot import CODE_OF, Rows, Snapshot
from extender.placement.terms import KEPT

NEVER_STALE_S = float("-inf")
#: Changes to keep for later; each keeps the part of its snapshot that changed.
_MOST_DUE = 16


@dataclass(slots=True, eq=False)
class Weighing:
    """One kind of request on one snapshot; arrays are over the rows of the snapshot.

    It does not keep the snapshot itself in memory, so that is an argument. Where each node stands
    is only reckoned when somebody ranks: filter comes more often, and needs it not.
    """

    weights: Weights
    generation: int
    #: What scores are relative to: (bytes of the largest device, of the largest node).
    scale: tuple[int, int]
    #: Code of the first reason, if all reports were fresh.
    fresh_codes: Codes
    #: As it was before what is due.
    _standing: Standing
    #: Rows, and the verdicts that their standing is reckoned from.
    _due: tuple[tuple[Rows, Verdicts], ...]

    @property
    def standing(self) -> Standing:
        if self._due:
            nodes = len(self.fresh_codes)
            columns = [_of_length(column, nodes) for column in self._standing.columns]
            for rows, verdicts in self._due:
                there = rows < nodes  # the others have gone since
                found = standing(verdicts, self.weights)
                for column, figures in zip(columns, found.columns, strict=True):
                    column[rows[there]] = figures[there]
            self._standing, self._due = Standing.of(columns), ()
        return self._standing

    def after(self, request: VramRequest, snap: Snapshot) -> "Weighing":
        """The same on a newer snapshot."""
        nodes, scale = len(snap.nodes), _scale(snap)
        codes = _of_length(self.fresh_codes, nodes)
        changed = np.flatnonzero(snap.changed_in > self.generation)
        if scale != self.scale:
            changed = np.arange(nodes)
        if not len(changed):
            return replace(self, generation=snap.generation, fresh_codes=codes)
        part = snap if len(changed) == nodes else snap.part(changed)
        verdicts = fit(request, part, np.arange(len(changed)), NEVER_STALE_S)
        codes[changed] = verdicts.codes
        due = (*self._due, (changed, verdicts))
        weighing = Weighing(self.weights, snap.generation, scale, codes, self._standing, due)
        if part is snap or len(due) > _MOST_DUE:
            weighing.standing  # noqa: B018 - reckoned now, so that no more is kept
        return weighing

    def codes(self, snap: Snapshot, rows: Rows, now_s: float) -> Codes:
        """What ``fit`` says about these rows."""
        codes = self.fresh_codes.take(rows)
        stale = snap.fresh_until_s < now_s
        if stale.any():
            stale &= snap.node_reason == 0
            codes[stale.take(rows)] = CODE_OF[Reason.STALE_REPORT]
        return codes

    def rank(
        self,
        request: VramRequest,
        snap: Snapshot,
        rows: Rows,
        now_s: float,
        market: Market | None = None,
    ) -> Ranking:
        """What ``score.rank`` says about these rows, without the terms."""
        fits = self.codes(snap, rows, now_s) == 0
        stands = self.standing.take(rows)
        return rank_rows(request, snap, rows, fits, stands, now_s, self.weights, market)


def _nothing(weights: Weights) -> Weighing:
    """Before there was any node."""
    none = np.empty(0, np.int64)
    standing = Standing(np.empty(0), none, none, tuple(np.empty(0) for _ in KEPT))
    return Weighing(weights, -1, (0, 0), np.empty(0, np.int8), standing, ())


def _scale(snap: Snapshot) -> tuple[int, int]:
    return snap.largest_device_bytes, snap.largest_node_bytes


#: Kinds that are weighed ahead of being asked for again.
AHEAD = 8
AHEAD_FOR_S = 10.0


@dataclass(slots=True)
class _Held:
    request: VramRequest
    weighing: Weighing
    #: When it was last asked for, in seconds of the receiver's monotonic clock.
    asked_s: float


class Weighings:
    """The kinds of request seen last, on the snapshots of one table, which only grow newer."""

    def __init__(self, weights: Weights, capacity: int = 64) -> None:
        self._nothing = _nothing(weights)
        #: The one asked for last comes last.
        self._held: Bounded[Kind, _Held] = Bounded(capacity)

    def weigh(self, request: VramRequest, snap: Snapshot, now_s: float) -> Weighing:
        """Weigh a request that asks for something on every node of the snapshot."""
        held = self._held.pop(request.kind, None)
        before = held.weighing if held else self._nothing
        weighing = before if before.generation == snap.generation else before.after(request, snap)
        self._held[request.kind] = _Held(request, weighing, now_s)
        return weighing

    def ahead(self, snap: Snapshot, now_s: float) -> bool:
        """Weigh one kind that was asked for lately and not yet on this snapshot, as it will be
        asked for again while pods are being placed; false where there is none."""
        for held in islice(reversed(self._held.values()), AHEAD):
            if held.asked_s < now_s - AHEAD_FOR_S:
                return False  # and the others before that
            if held.weighing.generation != snap.generation:
                held.weighing = held.weighing.after(held.request, snap)
                held.weighing.standing  # noqa: B018 - reckoned now
                return True
        return False


def _of_length(array: NDArray[Any], length: int) -> NDArray[Any]:
    """A copy; what is added holds anything."""
    copy = np.empty(length, array.dtype)
    size = min(len(array), length)
    copy[:size] = array[:size]
    return copy
