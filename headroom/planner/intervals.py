"""Computes the range in which a figure of another, similar history lies.

The figures of replays of drawn histories are a sample. The range is chosen to contain the figure of
another history with a probability of 90 %, assuming a normal distribution: mean ± t · s · √2. The
factor √2 is needed because both histories vary, the given one and the other.

For *needs* (GPUs and nodes) and for savings, the range also depends on how much the days of the
history differ (``rhythm``). Its constants were chosen with ``benchmarks.plan``, so that the range
contains the need of the next week in 90 % of weeks of several families of clusters
(docs/design/plan.md). Its ends are factors, because a need can double more easily than vanish.
"""

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

#: The 95 % quantiles of Student's t distribution, for 3 and more degrees of freedom.
_T95 = (
    *(2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753),
    *(1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701),
    *(1.699, 1.697),
)
_NORMAL95 = 1.645
#: Minimum number of figures. With fewer, the interval would be too wide to be useful.
LEAST_FIGURES = 4
#: Growth from one history to the next, as a ratio of the need. It raises only the upper end.
GROWTH = 0.04
#: Savings, in GPUs or money, vary more than needs by the factor ``SAVING``. As a ratio of the GPUs,
#: they vary by ``PART`` for each unit of the upper reach.
SAVING, PART = 1.2, 0.35


class Reach(NamedTuple):
    """How far the need of another history can be below and above the given one, as natural
    logarithms."""

    down: float
    up: float


def interval(figures: Sequence[float]) -> tuple[float, float]:
    """Return the range of the figure of another history.

    If there are fewer than ``LEAST_FIGURES`` figures, return the lowest and the highest of them.
    """
    count = len(figures)
    if count < LEAST_FIGURES:
        return min(figures), max(figures)
    at = count - LEAST_FIGURES
    t = _T95[at] if at < len(_T95) else _NORMAL95
    half = t * statistics.stdev(figures) * math.sqrt(2)
    mean = statistics.mean(figures)
    return mean - half, mean + half


def need_interval(
    needs: Sequence[float], reach: Reach | None, step: float = 0.0
) -> tuple[float, float]:
    """Return the range of the need of another history.

    ``needs`` are the needs of the replays, at least one. The first is the need of the unchanged
    history. If ``reach`` is None, no range can be computed, and both ends are the first need. The
    ends are rounded outward to multiples of ``step``, because needs are whole nodes.
    """
    if reach is None:
        return needs[0], needs[0]
    centre = _centre(needs)
    low, high = centre * math.exp(-reach.down), centre * (1 + GROWTH) * math.exp(reach.up)
    if not step:
        return low, high
    return math.floor(low / step) * step, math.ceil(high / step) * step


def wider(one: Reach | None, other: Reach | None) -> Reach | None:
    """Return the reach of a difference of two needs, or None if one of them has no range."""
    return one and other and Reach(max(one.down, other.down), max(one.up, other.up))


def saving_interval(savings: Sequence[float], reach: Reach | None) -> tuple[float, float]:
    """Return the range of what another history saves by sharing, in GPUs or in money.

    ``savings`` are the savings of the replays. The first is the saving of the unchanged history.
    """
    more = reach and Reach(SAVING * reach.down, SAVING * reach.up)
    low, high = sorted(need_interval(savings, more))
    return low, high


def part_interval(
    parts: Sequence[float], reach: Reach | None, step: float = 0.0
) -> tuple[float, float]:
    """Return the range of the ratio of GPUs that another history saves by sharing.

    ``parts`` are the ratios of the replays, in the same order as in ``saving_interval``. ``step``
    is the ratio of one node to the unshared need, because needs are rounded up to whole nodes.
    """
    if reach is None:
        return parts[0], parts[0]
    centre, half = _centre(parts), math.hypot(PART * reach.up, step)
    return centre - half, centre + half


def _centre(figures: Sequence[float]) -> float:
    # Drawing days in another order hides growth within the history, so its own figure counts more.
    return (figures[0] + statistics.mean(figures)) / 2
