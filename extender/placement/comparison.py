"""One node beside all others, for one pod: every check that fails there, or how it is ranked and by
which terms. Read from the verdicts and the ranking that decide."""

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

#: Code -> how a verdict is written.
_WORDS = [reason.code if reason else "fits" for reason in REASONS]
#: What holds wherever the other does, and says less.
_IMPLIED = {
    Reason.NO_SUCH_RESOURCE: {Reason.NO_REPLICA, Reason.MEMORY_ON_ANY, Reason.MEMORY_ON_SOME},
    Reason.MEMORY_ON_ANY: {Reason.MEMORY_ON_SOME},
}


@dataclass(frozen=True, slots=True)
class Term:
    """One of those that the score is the weighted mean of."""

    name: str
    #: 0..1
    value: float
    #: As the settings have it; and as a part of all weights, 0..1.
    weight: float
    part: float


@dataclass(frozen=True, slots=True)
class Comparison:
    node: NodeExplanation
    #: All that stands in the way, the reason that filter tells before all; empty where it fits.
    failing: tuple[Reason, ...]
    #: Of the score; empty where the pod does not fit.
    terms: tuple[Term, ...]
    #: Nodes on which the pod fits.
    fits: int
    #: 1 and the number of them with a higher score; None where it does not fit.
    rank: int | None
    #: The others of the same score, which the least memory left and then a hash put in order.
    tied: int
    #: Empty where none fits.
    winner: str
    winner_score: float | None


def compare(verdicts: Verdicts, i: int, weights: Weights, market: Market | None) -> Comparison:
    """The i-th node of ``verdicts``, of a pod that asks for something."""
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
    """Of what is said of every node, in the order of their names, and of no name: another process
    that knows the same says the same."""
    order = np.argsort(verdicts.snap.name_rank[verdicts.rows], kind="stable")
    words = (_WORDS[code] for code in verdicts.codes[order].tolist())
    return sha256("\n".join(words).encode()).hexdigest()[:16]


def failing(verdicts: Verdicts, i: int) -> Iterator[Reason]:
    """All that stands in the way on the i-th node, the reason that filter tells before all; of a
    node without devices what is said of it as a whole."""
    row = int(verdicts.rows[i])
    node = verdicts.snap.nodes[row]
    found: dict[Reason | None, None] = {verdicts.reason(i): None, node.reason: None}
    for reason, where in verdicts.closed.items():
        # What has never reported is not late with it.
        if where[i] and (node.devices or reason is not Reason.STALE_REPORT):
            found[reason] = None
    for verdict in verdicts.asks if node.devices else ():
        of_ask = [reason for reason, where in verdict.all_rejected.items() if where[row]]
        implied = {each for reason in of_ask for each in _IMPLIED.get(reason, ())}
        found |= dict.fromkeys(reason for reason in of_ask if reason not in implied)
    yield from (reason for reason in found if reason is not None)
