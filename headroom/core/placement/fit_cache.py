"""Caches the fit and the score of each kind of request on every node, until the node changes.

There are few kinds of requests, and few nodes change between two calls. Only changed nodes are
computed again. The cached values equal the results of ``fit`` and ``standing`` for the whole
snapshot.
"""

from dataclasses import dataclass, field

import numpy as np

from headroom.bounded_dict import Bounded
from headroom.contract.reasons import Reason
from headroom.core.placement.demand_pricing import Market
from headroom.core.placement.fit import Codes, fit
from headroom.core.placement.policy import Weights
from headroom.core.placement.request import Kind, VramRequest
from headroom.core.placement.score import Ranking, Standing, rank_rows, standing
from headroom.core.placement.snapshot import CODE_OF, Mask, Rows, Snapshot

NEVER_STALE_S = float("-inf")
#: Maximum number of kinds of requests whose fit is cached, unless a caller sets another limit.
MOST_KINDS = 64


@dataclass(slots=True, eq=False)
class CachedFit:
    """The fit and score of one kind of request on every row of one snapshot.

    The next call of ``FitCache.weigh`` changes it. Methods take the snapshot as an argument,
    because storing it here would keep it in memory.
    """

    weights: Weights
    generation: int = -1
    #: (rows,) code of the first reason, as if no report were stale.
    fresh_codes: Codes = field(default_factory=lambda: np.empty(0, np.int8))
    #: (rows,) results of ``Verdicts.large_enough``.
    large_enough: Mask = field(default_factory=lambda: np.empty(0, bool))
    standing: Standing = field(default_factory=Standing.empty)

    def update(self, request: VramRequest, snap: Snapshot) -> None:
        """Compute the values of nodes that have changed since the last snapshot."""
        nodes = len(snap.nodes)
        changed = (snap.changed_in > self.generation).nonzero()[0]
        if nodes != len(self.fresh_codes):
            self.fresh_codes = np.resize(self.fresh_codes, nodes)
            self.large_enough = np.resize(self.large_enough, nodes)
            columns = self.standing.columns
            self.standing = Standing(*(np.resize(c, (nodes, *c.shape[1:])) for c in columns))
        if len(changed):
            part = snap if len(changed) == nodes else snap.part(changed)
            verdicts = fit(request, part, np.arange(len(changed)), NEVER_STALE_S)
            self.fresh_codes[changed] = verdicts.codes
            self.large_enough[changed] = verdicts.large_enough()
            if verdicts.fits.any():  # the score of other nodes is never read
                found = standing(verdicts, self.weights)
                for array, values in zip(self.standing.columns, found.columns, strict=True):
                    array[changed] = values
        self.generation = snap.generation

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
        fits: Mask | None = None,
    ) -> Ranking:
        """Return the same ranking as ``score.rank`` for these rows, without the terms.

        ``fits`` (n,) is whether ``codes`` returns 0 for each row, if the caller has called it.
        """
        if fits is None:
            fits = self.codes(snap, rows, now_s) == 0
        return rank_rows(request, snap, rows, fits, self.standing, now_s, self.weights, market)


class FitCache:
    """Holds a cached fit for each of the most recent ``capacity`` kinds of requests.

    All snapshots must come from the same table.
    """

    def __init__(self, weights: Weights, capacity: int = MOST_KINDS) -> None:
        self._weights = weights
        self._held: Bounded[Kind, CachedFit] = Bounded(capacity)

    def weigh(self, request: VramRequest, snap: Snapshot) -> CachedFit:
        """Return the fit of a request for GPUs on every node of the snapshot."""
        kind = request.kind
        cached = self._held.get(kind)
        if cached is None:
            cached = self._held[kind] = CachedFit(self._weights)
        else:
            self._held.move_to_end(kind)
        if cached.generation != snap.generation:
            cached.update(request, snap)
        return cached
