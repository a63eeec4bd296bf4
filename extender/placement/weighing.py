"""What each kind of request means for every node, kept until the node changes.

Pods come in few kinds, and between two calls few nodes change: only those are weighed again. What
is kept equals what ``fit`` says about the whole snapshot, node by node.
"""

from collections import OrderedDict
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from contract.annotations import ScoringPolicy
from contract.reasons import Reason
from extender.placement.fit import Codes, fit
from extender.placement.request import Kind, VramRequest
from extender.placement.score import Outcome, Ranking, outcome, rank_rows
from extender.placement.snapshot import CODE_OF, Rows, Snapshot

NEVER_STALE_S = float("-inf")


@dataclass(frozen=True, slots=True, eq=False)
class Weighing:
    """One kind of request on one snapshot; arrays are over the rows of the snapshot.

    It does not keep the snapshot itself in memory, so that is an argument.
    """

    generation: int
    #: Code of the first reason, if all reports were fresh.
    fresh_codes: Codes
    outcome: Outcome

    def codes(self, snap: Snapshot, rows: Rows, now_s: float) -> Codes:
        """What ``fit`` says about these rows."""
        codes = self.fresh_codes.take(rows)
        stale = snap.fresh_until_s < now_s
        if stale.any():
            stale &= snap.node_reason == 0
            codes[stale.take(rows)] = CODE_OF[Reason.STALE_REPORT]
        return codes

    def rank(self, policy: ScoringPolicy, snap: Snapshot, rows: Rows, now_s: float) -> Ranking:
        """What ``score.rank`` says about these rows."""
        fits = self.codes(snap, rows, now_s) == 0
        return rank_rows(policy, snap, rows, fits, self.outcome.take(rows))


class Weighings:
    """The kinds of request seen last, on the snapshots of one table, which only grow newer."""

    def __init__(self, capacity: int = 64) -> None:
        self._capacity = capacity
        self._held: OrderedDict[Kind, Weighing] = OrderedDict()

    def weigh(self, request: VramRequest, snap: Snapshot) -> Weighing:
        """Weigh a request that asks for something on every node of the snapshot."""
        kind = request.kind
        held = self._held.pop(kind, None)
        weighing = _weigh(request, snap, held)
        self._held[kind] = weighing
        if len(self._held) > self._capacity:
            self._held.popitem(last=False)
        return weighing


def _weigh(request: VramRequest, snap: Snapshot, held: Weighing | None) -> Weighing:
    nodes = len(snap.nodes)
    if held is None:
        changed = np.arange(nodes)
        codes = np.empty(0, np.int8)
        columns = [np.empty(0, np.int64)] * len(fields(Outcome))
    else:
        changed = np.flatnonzero(snap.changed_in > held.generation)
        codes, columns = held.fresh_codes, [*held.outcome.columns]
    codes, columns = _of_length(codes, nodes), [_of_length(each, nodes) for each in columns]
    if len(changed):
        part = snap if len(changed) == nodes else snap.part(changed)
        verdicts = fit(request, part, np.arange(len(changed)), NEVER_STALE_S)
        codes[changed] = verdicts.codes
        for column, figures in zip(columns, outcome(verdicts).columns, strict=True):
            column[changed] = figures
    return Weighing(snap.generation, codes, Outcome(*columns))


def _of_length(array: NDArray[Any], length: int) -> NDArray[Any]:
    """A copy; what is added holds anything."""
    copy = np.empty(length, array.dtype)
    size = min(len(array), length)
    copy[:size] = array[:size]
    return copy
