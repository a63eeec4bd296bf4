"""All nodes in the order in which a pod would get them, with the terms of their scores."""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np
from fastapi import HTTPException

from headroom.console.responses import Page, Paged, ReasonView, obstacle_view, reason_view
from headroom.console.times import Time
from headroom.console.view import View
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.explain import certainty
from headroom.core.placement.fit import Verdicts
from headroom.core.placement.node_order import difference, in_order
from headroom.core.placement.request import VramRequest
from headroom.core.placement.score import Ranking, rank
from headroom.core.placement.snapshot import Rows, Snapshot
from headroom.core.rules.eligible_nodes import Eligible, Obstacle
from headroom.core.whatif.held_memory import verdicts_on

#: Number of nodes on a page if the caller does not ask for another number.
USUAL_PAGE = 100


class RankedNodeView(View):
    node: str
    rank: int | None
    """1 plus the number of nodes with a higher score; null if the pod does not fit."""
    eligible: bool
    """Whether the node is eligible by selector, affinity, taints and cordon."""
    fits: bool
    reason: str | None
    """Why the pod does not fit, or why the node is not eligible; null if it fits."""
    message: str | None
    certainty: str | None
    """How certain it is which device the pod would get; null if the node reports none."""
    score_ratio: float | None
    """0 to 1, highest wins: the weighted mean of ``score_terms``. If the pod does not fit, it is
    null and there are no terms."""
    score_terms: dict[str, float]


class RankingBody(Paged):
    """The answer that filter and prioritize would give now if all nodes were offered, or the answer
    that they gave in a decision on record."""

    source: Literal["recomputed", "decision"]
    """"recomputed": computed now. "decision": recorded by the extender that decided; nothing is
    recomputed."""
    decision_id: str | None
    decided_at: Time | None
    """Id and time of the decision; null if the ranking is recomputed."""
    namespace: str
    name: str
    uid: str
    bound_to: str | None
    taken_back: bool
    """Whether the pod is bound. It is then scored as if its memory were free again."""
    not_tried: str | None
    """Why no scheduler that calls Headroom tries the pod: scheduling gates or another scheduler;
    null if one does."""
    not_checked: list[str]
    """Checks of kube-scheduler that this answer does not include."""
    fits: int
    """Number of eligible nodes on which the pod fits."""
    unrecorded: int
    """Number of ranked nodes that the decision does not have on record, because only the best 50
    are recorded; 0 if the ranking is recomputed."""
    reasons: list[ReasonView]
    """Number of nodes by the reason why they cannot take the pod."""
    parts: dict[str, float]
    """The share of each term's weight in the sum of all weights (setting score_weights). Empty for
    a decision that was made with other weights than today's."""
    difference: str | None
    """The difference between the first two nodes; null if the pod fits on fewer nodes."""
    nodes: list[RankedNodeView]
    """Best first. Nodes on which the pod does not fit come last, and those that are not eligible
    after them."""


@dataclass(frozen=True, slots=True)
class Ranked:
    """The ranking of all nodes of a snapshot for one pod."""

    cluster: Cluster
    snap: Snapshot
    eligible: Eligible
    verdicts: Verdicts
    ranking: Ranking

    @classmethod
    def of(
        cls,
        cluster: Cluster,
        request: VramRequest,
        snap: Snapshot,
        eligible: Eligible,
        now_s: float,
    ) -> "Ranked":
        verdicts = verdicts_on(cluster, request, snap, eligible.rows, now_s)
        ranking = rank(verdicts, cluster.rules.weights, cluster.market)
        return cls(cluster, snap, eligible, verdicts, ranking)

    def page(self, page: Page) -> tuple[list[RankedNodeView], int, str | None]:
        """Return the views of one page, the number of nodes after it, and ``continue``."""
        first, limit = before(page.after), page.limit or USUAL_PAGE
        order = in_order(self.verdicts, self.ranking)
        others = sorted(self.eligible.obstacles, key=lambda row: self.snap.nodes[row].name)
        total = len(order) + len(others)
        views = chain(
            self._eligible(order[first : first + limit]),
            self._not_eligible(
                others[max(0, first - len(order)) : max(0, first + limit - len(order))]
            ),
        )
        remaining = max(0, total - first - limit)
        return list(views), remaining, str(first + limit) if remaining else None

    @property
    def matching(self) -> int:
        return len(self.eligible.rows) + len(self.eligible.obstacles)

    @property
    def reasons(self) -> list[ReasonView]:
        """Return the number of nodes by reason, most nodes first."""
        verdicts = self.verdicts
        rejected = Counter(verdicts.reason(i) for i in np.flatnonzero(~verdicts.fits).tolist())
        ineligible = Counter(first for first, *_ in self.eligible.obstacles.values())
        views = [
            *(reason_view(reason, nodes) for reason, nodes in rejected.items() if reason),
            *(obstacle_view(*each) for each in ineligible.items()),
        ]
        return sorted(views, key=lambda each: (-each.nodes, each.reason))

    @property
    def difference(self) -> str | None:
        """Return a sentence about the first two nodes, or None if fewer nodes fit."""
        first, second = (*in_order(self.verdicts, self.ranking)[:2].tolist(), -1, -1)[:2]
        if second < 0 or not self._scored(second):
            return None
        ahead, behind = self._contribution(first), self._contribution(second)
        return difference(self._name(first), self._name(second), ahead, behind)

    def compared(self, one: int, other: int | None) -> str | None:
        """Return a sentence about two rows of the snapshot: which node is better, and why.

        If ``other`` is None, it is the winner, or the second if ``one`` wins. Return None if there
        is no such node.
        """
        if other is None:
            order = in_order(self.verdicts, self.ranking)
            fitting = self.verdicts.rows[order[self.verdicts.fits[order]]].tolist()
            other = next((row for row in fitting[:2] if row != one), None)
            if other is None:
                return None
        at = {int(row): i for i, row in enumerate(self.verdicts.rows)}
        order = in_order(self.verdicts, self.ranking).tolist()
        scored = [row for row in (one, other) if row in at and self._scored(at[row])]
        if len(scored) == 2:
            first, second = sorted((at[one], at[other]), key=order.index)
            ahead, behind = self._contribution(first), self._contribution(second)
            return difference(self._name(first), self._name(second), ahead, behind)
        states = [self._state(row, at.get(row)) for row in (one, other)]
        return f"{states[0]}; {states[1]}"

    def _scored(self, i: int) -> bool:
        return bool(self.verdicts.fits[i]) and not self.verdicts.by_dra[i]

    def _state(self, row: int, i: int | None) -> str:
        """Return whether the pod fits on a node, as a phrase with the reason."""
        name = self.snap.nodes[row].name
        why: Reason | Obstacle | None = None
        if row in self.eligible.obstacles:
            why = self.eligible.obstacles[row][0]
        elif i is not None:
            why = self.verdicts.reason(i)
        return f"{name} fits" if why is None else f"{name} cannot take it: {why.sentence}"

    def _name(self, i: int) -> str:
        return self.snap.nodes[int(self.verdicts.rows[i])].name

    def _contribution(self, i: int) -> dict[str, float]:
        parts = self.cluster.rules.weights.parts
        return {name: parts[name] * float(term[i]) for name, term in self.ranking.terms.items()}

    def _eligible(self, positions: Rows) -> Iterator[RankedNodeView]:
        fitting = np.sort(self.ranking.scores[self.verdicts.fits])
        for i in positions.tolist():
            reason, score = self.verdicts.reason(i), float(self.ranking.scores[i])
            scored = reason is None and not self.verdicts.by_dra[i] and bool(self.ranking.terms)
            higher = len(fitting) - int(np.searchsorted(fitting, score, "right"))
            yield self._view(
                int(self.verdicts.rows[i]),
                reason,
                rank=higher + 1 if reason is None else None,
                score_ratio=score if scored else None,
                score_terms={
                    name: float(term[i]) for name, term in self.ranking.terms.items() if scored
                },
            )

    def _not_eligible(self, rows: Sequence[int]) -> Iterator[RankedNodeView]:
        for row in rows:
            first, *_ = self.eligible.obstacles[row]
            yield self._view(row, first, rank=None, score_ratio=None, score_terms={})

    def _view(
        self,
        row: int,
        why: Reason | Obstacle | None,
        *,
        rank: int | None,
        score_ratio: float | None,
        score_terms: dict[str, float],
    ) -> RankedNodeView:
        node = self.snap.nodes[row]
        return RankedNodeView(
            node=node.name,
            rank=rank,
            eligible=row not in self.eligible.obstacles,
            fits=why is None,
            reason=why.code if why else None,
            message=why.sentence if why else None,
            certainty=certainty(node) if node.devices else None,
            score_ratio=score_ratio,
            score_terms=score_terms,
        )


def before(after: str) -> int:
    """Parse ``continue``: the number of nodes on the earlier pages."""
    if not after.isdecimal() and after:
        raise HTTPException(
            422, f"query continue: {after[:80]!r} is not a number of nodes. Example: continue=100"
        )
    return int(after[:9] or 0)
