"""Computes a request from the peaks of past lives.

The highest of a few peaks is a bad limit for the next one: after ten lives of one distribution, the
next is above all of them once in eleven times. So the margin follows from the spread of the peaks
and from their number. The logarithms of the upper peaks are taken as the upper part of a normal
distribution, and the request is the value that the next life exceeds with probability ``TAIL``:
a prediction bound of Student's t. Only peaks above ``CENTRE`` count for the spread, because lives
that ended early or did less do not show the largest need.

The constants were tuned with ``benchmarks.recommend`` (docs/design/recommendations.md).
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from extender.recommend.histogram import highest, quantile, upper_end

#: The quantile to which the margin is added, and above which peaks count for the spread.
CENTRE = 0.65
#: Accepted probability that the next life exceeds the request.
TAIL = 0.0004
#: The spread is that of about half of the lives.
FREEDOM_PER_LIFE = 0.5
#: Spread that is assumed before the first life (of logarithms: 2 %), and for how many degrees of
#: freedom it counts.
ASSUMED_SPREAD, ASSUMED_FREEDOM = 0.02, 1.0
LEAST_FREEDOM = 2.0
#: A request is at least this much above the highest peak.
LEAST_MARGIN = 0.01
#: The highest peak is the one at and above which lives have this weight: one life after about four
#: half-lives is forgotten.
HIGHEST_WEIGHT = 0.05
#: Requests are rounded up to a multiple of this when they are shown or written.
STEP_BYTES = 64 << 20

_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(CENTRE)
_DENSITY = _NORMAL.pdf(_Z) / (1 - CENTRE)
#: Root mean square of how far the part of a standard normal distribution above ``CENTRE`` is above
#: its lower end.
_RMS_ABOVE = math.sqrt(1 - _Z * _DENSITY + _Z * _Z)


@dataclass(frozen=True, slots=True)
class Estimate:
    #: The quantile ``CENTRE`` of the peaks.
    centre_bytes: int
    highest_bytes: int
    #: The value that the next life exceeds with probability ``TAIL``, and at least the highest with
    #: its margin.
    request_bytes: int


def estimate(weights: Mapping[int, float], lives: int) -> Estimate:
    """Return the estimate from a histogram's weights, which are not empty, of so many lives."""
    centre_bytes = quantile(weights, CENTRE)
    highest_bytes = highest(weights, HIGHEST_WEIGHT)
    log_centre = math.log(centre_bytes)
    squares = total = 0.0
    for bucket, weight in weights.items():
        if (value := upper_end(bucket)) >= centre_bytes:
            squares += weight * (math.log(value) - log_centre) ** 2
            total += weight
    counted = max(1.0, min(lives, sum(weights.values())))
    freedom = max(1.0, (counted - 1) * FREEDOM_PER_LIFE)
    assumed = ASSUMED_FREEDOM * ASSUMED_SPREAD**2
    spread = math.sqrt((freedom * squares / total + assumed) / (freedom + ASSUMED_FREEDOM))
    deviations = student_t(1 - TAIL, max(LEAST_FREEDOM, freedom + ASSUMED_FREEDOM)) - _Z
    above = deviations / _RMS_ABOVE * spread * math.sqrt(1 + 1 / counted)
    # More than the exponent of any device is the same as the largest one.
    bound = centre_bytes * math.exp(min(above, 20.0))
    request = max(bound, highest_bytes * (1 + LEAST_MARGIN))
    return Estimate(centre_bytes, highest_bytes, math.ceil(request))


def rounded(request_bytes: int) -> int:
    """Return a request rounded up to a multiple of ``STEP_BYTES``."""
    return -(-request_bytes // STEP_BYTES) * STEP_BYTES


def student_t(share: float, freedom: float) -> float:
    """Return the quantile of Student's t, by the expansion 26.7.5 of Abramowitz and Stegun.

    Below four degrees of freedom it is too small: 23 instead of 35 for 0.9996 at two.
    """
    z = _NORMAL.inv_cdf(share)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
