"""Ranges of figures: in which range the figure of another history like this one lies.

The figures of replays of drawn histories are a sample. The range is made to contain the figure of
another history with probability 90 %, as if figures were normally distributed: mean ± t · s · √2.
The factor √2 is because both histories vary, the given one and the other.
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
#: With fewer figures the interval would be wider than it is useful.
LEAST = 4


def interval(figures: Sequence[float]) -> tuple[float, float]:
    """Return the range of the figure of another history.

    With fewer than ``LEAST`` figures, it is their lowest and highest.
    """
    count = len(figures)
    if count < LEAST:
        return min(figures), max(figures)
    t = _T95[count - LEAST] if count - LEAST < len(_T95) else _NORMAL95
    half = t * statistics.stdev(figures) * math.sqrt(2)
    mean = statistics.mean(figures)
    return mean - half, mean + half
