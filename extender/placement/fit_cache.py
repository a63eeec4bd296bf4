"""Caches fit and score of each kind of request for every node, until the node changes.

There are few kinds of requests. Few nodes change between two calls, and only changed nodes are
computed again. The cached values equal those of ``fit`` and ``standing`` on the whole snapshot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.reasons import Reason
from extender.bounded import Bounded
from extender.placement.demand_pricing import Market
from extender.placement.fit import Codes, fit
from extender.placement.policy import Weights
from extender.placement.request import Kind, VramRequest
from extender.placement.score import Ranking, Standing, rank_rows, standing
from extender.placement.score_terms import KEPT
from extender.placement.snapshot import CODE_OF, Rows, Snapshot

NEVER_STALE_S = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class CachedFit:
    """The fit and score of one kind of request on every row of one snapshot.

    Methods take the snapshot as an argument, because storing it here would keep it in memory.
    """

    weights: Weights
    generation: int
    #: Bytes of the largest device and of the largest node; scores are relative to them.
    scale: tuple[int, int]
    #: (rows,) code of the first reason, as if no report were stale.
    fresh_codes: Codes
    standing: Standing

    def after(self, request: VramRequest, snap: Snapshot) -> "CachedFit":
        """Return the cached fit for a newer snapshot, computed again only for changed nodes."""
        nodes, scale = len(snap.nodes), (snap.largest_device_bytes, snap.largest_node_bytes)
        changed = np.flatnonzero(snap.changed_in > self.generation)
        if scale != self.scale:
            changed = np.arange(nodes)
        if not len(changed) and nodes == len(self.fresh_codes):
            return replace(self, generation=snap.generation)
        arrays = _resized((self.fresh_codes, *self.standing.columns), nodes)
        if len(changed):
            part = snap if len(changed) == nodes else snap.part(changed)
            verdicts = fit(request, part, np.arange(len(changed)), NEVER_STALE_S)
            found = standing(verdicts, self.weights)
            for array, values in zip(arrays, (verdicts.codes, *found.columns), strict=True):
                array[changed] = values
        return CachedFit(self.weights, snap.generation, scale, arrays[0], Standing.of(arrays[1:]))

    def codes(self, snap: Snapshot, rows: Rows, now_s: float) -> Codes:
        """Return the codes that ``fit`` returns for these rows."""
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
        """Return what ``score.rank`` returns for these rows, without the terms."""
        fits = self.codes(snap, rows, now_s) == 0
        taken = self.standing.take(rows)
        return rank_rows(request, snap, rows, fits, taken, now_s, self.weights, market)


class FitCache:
    """Holds a cached fit for each of the most recent ``capacity`` kinds of requests.

    All snapshots must be from one table.
    """

    def __init__(self, weights: Weights, capacity: int = 64) -> None:
        none = np.empty(0, np.int64)
        standing = Standing(np.empty(0), none, none, tuple(np.empty(0) for _ in KEPT))
        #: A cached fit without nodes.
        self._empty = CachedFit(weights, -1, (0, 0), np.empty(0, np.int8), standing)
        self._held: Bounded[Kind, CachedFit] = Bounded(capacity)

    def weigh(self, request: VramRequest, snap: Snapshot) -> CachedFit:
        """Return the fit of a request for GPUs on every node of the snapshot."""
        kind = request.kind
        cached = self._held.get(kind, self._empty)
        if cached.generation != snap.generation:
            cached = cached.after(request, snap)
        self._held[kind] = cached
        return cached


def _resized(arrays: Sequence[NDArray[Any]], length: int) -> list[NDArray[Any]]:
    """Return copies of the given length; added elements are uninitialised."""
    copies = [np.empty(length, array.dtype) for array in arrays]
    for copy, array in zip(copies, arrays, strict=True):
        copy[: len(array)] = array[:length]
    return copies
