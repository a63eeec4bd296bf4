"""Orders all nodes for one pod as filter and prioritize would, and compares two of them."""

from collections.abc import Mapping

import numpy as np

from headroom.core.placement.fit import Verdicts
from headroom.core.placement.score import Ranking
from headroom.core.placement.snapshot import Rows

#: A smaller difference between two contributions is not shown, because it is rounded to 0.
_LEAST_SHOWN = 0.005


def in_order(verdicts: Verdicts, ranking: Ranking) -> Rows:
    """Return the positions of all rows of ``verdicts``: the winner, then the other nodes that fit,
    highest score first, then all others by reason. Equal nodes are sorted by name."""
    names = verdicts.snap.name_rank[verdicts.rows]
    order = np.lexsort((names, verdicts.codes, -ranking.scores, ~verdicts.fits))
    if ranking.winner is not None:
        order = np.concatenate(([ranking.winner], order[order != ranking.winner]))
    return order


def difference(
    first: str, second: str, ahead: Mapping[str, float], behind: Mapping[str, float]
) -> str:
    """Return one sentence about the scores of two nodes.

    ``ahead`` and ``behind`` map each term to what it contributes to the scores of ``first`` and of
    ``second``, which is not higher.
    """
    deltas = {name: value - behind.get(name, 0.0) for name, value in ahead.items()}
    shown = {name: delta for name, delta in deltas.items() if abs(delta) >= _LEAST_SHOWN}
    gains = [f"{name} +{delta:.2f}" for name, delta in _largest(shown) if delta > 0]
    losses = [f"{-delta:.2f} by {name}" for name, delta in _largest(shown) if delta < 0]
    if not gains:
        return (
            f"{first} and {second} have equal scores; {first} wins by its free memory or its name"
        )
    loses = f", and loses {' and '.join(losses)}" if losses else ""
    return f"{first} wins over {second} by {' and '.join(gains)}{loses}"


def _largest(deltas: Mapping[str, float]) -> list[tuple[str, float]]:
    return sorted(deltas.items(), key=lambda each: -abs(each[1]))
