"""Computes the range in which a figure of another, similar history lies.

The figures of replays of drawn histories are a sample. The range is made to contain the figure of
another history with probability 90 %, as if figures were normally distributed: mean ± t · s · √2.
The factor √2 is because both histories vary, the given one and the other.

The range of a *need* (GPUs and nodes) uses more: the spread of the largest demand over many drawn
histories, and how much the days of one workload differ. Its constants were chosen with
``benchmarks.plan`` so that the range contains the need of the next week in 90 % of weeks of several
families of clusters (docs/design/plan.md). Its ends are factors, because a need can double more
easily than vanish.
"""

import math
import statistics
from collections.abc import Sequence

#: The 95 % quantiles of Student's t distribution, for 3 and more degrees of freedom.
_T95 = (
    *(2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753),
    *(1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701),
    *(1.699, 1.697),
)
_NORMAL95 = 1.645
#: With fewer figures the interval would be too wide to be useful.
LEAST_FIGURES = 4
#: Half the width of a need's range, as a logarithm, has three parts whose squares are added:
#: ``CHANCE`` times the spread of drawn histories (chance within the history), ``SWING`` times the
#: most by which the largest day exceeds the fourth-largest (``rhythm``), and ``SEASON``
#: (differences from week to week).
CHANCE, SWING, SEASON = 1.4, 1.0, 0.10
#: Growth from one history to the next, as a part of the need.
GROWTH = 0.04
#: The same for what sharing saves, in GPUs or money, and for the part of the GPUs that this is.
#: They vary more than needs, and a part does not grow.
SAVING_CHANCE, SAVING_SEASON, SAVING_GROWTH = 2.0, 0.15, 0.08
PART_CHANCE, PART_SEASON = 3.0, 0.10


def interval(figures: Sequence[float]) -> tuple[float, float]:
    """Return the range of the figure of another history.

    With fewer than ``LEAST_FIGURES`` figures, it is their lowest and highest.
    """
    count = len(figures)
    if count < LEAST_FIGURES:
        return min(figures), max(figures)
    at = count - LEAST_FIGURES
    t = _T95[at] if at < len(_T95) else _NORMAL95
    half = t * statistics.stdev(figures) * math.sqrt(2)
    mean = statistics.mean(figures)
    return mean - half, mean + half


def spread_ratio(drawn: Sequence[float]) -> float:
    """Return the standard deviation of the figures of drawn histories, as a part of their mean; 0
    if there are none, or their mean is not positive."""
    mean = statistics.fmean(drawn) if drawn else 0.0
    return statistics.stdev(drawn) / mean if mean > 0 else 0.0


def need_half(drawn: Sequence[float], swing_ratio: float) -> float:
    """Return half the width of a need's range, as a natural logarithm.

    ``drawn``: the largest demands of drawn histories.
    """
    return math.hypot(CHANCE * spread_ratio(drawn), SWING * swing_ratio, SEASON)


def need_interval(
    needs: Sequence[float], half_ratio: float | None, step: float = 0.0
) -> tuple[float, float]:
    """Return the range of the need of another history.

    ``needs``: those of the replays, at least one; the first is that of the history as it was.
    ``half_ratio``: the result of ``need_half``; None if no range can be had: then both ends are the
    need of the history as it was. ``step``: the ends are moved outward to multiples of it, because
    needs are whole nodes.
    """
    if half_ratio is None:
        return needs[0], needs[0]
    centre = _centre(needs) * (1 + GROWTH)
    low, high = centre * math.exp(-half_ratio), centre * math.exp(half_ratio)
    if not step:
        return low, high
    return math.floor(low / step) * step, math.ceil(high / step) * step


def saving_interval(savings: Sequence[float], drawn: Sequence[float]) -> tuple[float, float]:
    """Return the range of what another history saves by sharing, in GPUs or in money.

    ``savings``: those of the replays; the first is that of the history as it was. ``drawn``: the
    savings of drawn histories, computed from their largest demands; without any, no range can be
    had.
    """
    if not drawn:
        return savings[0], savings[0]
    ratio = spread_ratio(drawn)
    centre = _centre(savings) * (1 + SAVING_GROWTH)
    half = abs(centre) * math.hypot(SAVING_CHANCE * ratio, SAVING_SEASON)
    return centre - half, centre + half


def part_interval(
    parts: Sequence[float], drawn: Sequence[float], step: float = 0.0
) -> tuple[float, float]:
    """Return the range of the part of its GPUs that another history saves by sharing.

    The arguments are those of ``saving_interval``, as parts. ``step``: the part that a node is of
    the unshared need, which is rounded up to whole nodes.
    """
    if not drawn:
        return parts[0], parts[0]
    centre = _centre(parts)
    half = math.hypot(PART_CHANCE * statistics.stdev(drawn), PART_SEASON * centre, step)
    return centre - half, centre + half


def _centre(figures: Sequence[float]) -> float:
    # Days drawn in another order hide growth within the history, so its own figure counts more.
    return (figures[0] + statistics.mean(figures)) / 2
