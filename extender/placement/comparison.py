"""Compares one node with all others for one pod: every check that fails, or its rank and terms.

All values come from the verdicts and the ranking that decide.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from hashlib import sha256

import numpy as np

from contract.reasons import Reason
from extender.placement.demand_pricing import Market
from extender.placement.explain import NodeExplanation, explain_node
from extender.placement.fit import Verdicts
from extender.placement.policy import Weights
from extender.placement.score import rank
from extender.placement.snapshot import REASONS

#: Code -> text of a verdict in the digest.
_WORDS = [reason.code if reason else "fits" for reason in REASONS]
#: Reason -> less specific reasons that always hold with it.
_IMPLIED = {
    Reason.NO_SUCH_RESOURCE: {Reason.NO_REPLICA, Reason.MEMORY_ON_ANY, Reason.MEMORY_ON_SOME},
    Reason.MEMORY_ON_ANY: {Reason.MEMORY_ON_SOME},
}


@dataclass(frozen=True, slots=True)
class Term:
    """One term of the score, which is the weighted mean of all terms."""

    name: str
    #: 0..1
    value: float
    #: The weight in the settings, and its part of the sum of all weights, 0..1.
    weight: float
    part: float


@dataclass(frozen=True, slots=True)
class Comparison:
    node: NodeExplanation
    #: All reasons against the node, filter's reason first; empty if the pod fits.
    failing: tuple[Reason, ...]
    #: Terms of the score; empty if the pod does not fit.
    terms: tuple[Term, ...]
    #: Nodes on which the pod fits.
    fits: int
    #: 1 plus the number of fitting nodes with a higher score; None if the pod does not fit.
    rank: int | None
    #: Other nodes with an equal score. The least free memory, then a hash, breaks ties.
    tied: int
    #: The node that wins; empty if the pod fits on no node.
    winner: str
    winner_score: float | None


def compare(verdicts: Verdicts, i: int, weights: Weights, market: Market | None) -> Comparison:
    """Compare the i-th node of ``verdicts`` with the others; the pod must request a GPU."""
    ranking = rank(verdicts, weights, market)
    node = explain_node(verdicts, ranking, i)
    scores, fits = ranking.scores, verdicts.fits
    fitting = bool(fits[i])
    winner = ranking.winner
    return Comparison(
        node=node,
        failing=tuple(failing(verdicts, i)),
        terms=tuple(
            Term(name, node.terms[name], weight, weights.parts[name])
            for name, weight in asdict(weights).items()
            if name in node.terms
        ),
        fits=int(fits.sum()),
        rank=1 + int((scores[fits] > scores[i]).sum()) if fitting else None,
        tied=int(np.count_nonzero(scores[fits] == scores[i])) - 1 if fitting else 0,
        winner="" if winner is None else verdicts.snap.nodes[int(verdicts.rows[winner])].name,
        winner_score=None if winner is None else float(scores[winner]),
    )


def verdict_digest(verdicts: Verdicts) -> str:
    """Return a digest of all nodes' verdicts in the order of their names, without the names.

    Processes with equal state return equal digests.
    """
    order = np.argsort(verdicts.snap.name_rank[verdicts.rows], kind="stable")
    words = (_WORDS[code] for code in verdicts.codes[order].tolist())
    return sha256("\n".join(words).encode()).hexdigest()[:16]


def failing(verdicts: Verdicts, i: int) -> Iterator[Reason]:
    """Yield all reasons against the i-th node, filter's reason first.

    For a node without devices these are the reasons that concern the whole node.
    """
    row = int(verdicts.rows[i])
    node = verdicts.snap.nodes[row]
    found: dict[Reason | None, None] = {verdicts.reason(i): None, node.reason: None}
    for reason, where in verdicts.closed.items():
        # A node that has never reported has no stale report.
        if where[i] and (node.devices or reason is not Reason.STALE_REPORT):
            found[reason] = None
    for verdict in verdicts.asks if node.devices else ():
        of_ask = [reason for reason, where in verdict.all_rejected.items() if where[row]]
        implied = {each for reason in of_ask for each in _IMPLIED.get(reason, ())}
        found |= dict.fromkeys(reason for reason in of_ask if reason not in implied)
    yield from (reason for reason in found if reason is not None)
