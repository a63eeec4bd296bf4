"""Computes a request from the peaks of past lives.

The highest of a few peaks is a bad limit for the next life, because after ten lives of one
distribution, the next peak is above all of them once in eleven times. So the margin depends on the
spread of the peaks and on their number. The logarithms of the upper peaks are treated as the upper
part of a normal distribution. The request is the value that the next life exceeds with probability
``TAIL``, which is a prediction bound of Student's t. Only peaks above ``CENTRE`` count for the
spread, because lives that ended early or did less do not show the largest need.

Programs of one container usually differ in size, but vary to a similar degree between lives. So the
spread of the container's other programs counts for a new program.

The constants were tuned with ``benchmarks.recommend`` (docs/design/recommendations.md).
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import NormalDist
from typing import NamedTuple

from headroom.core.recommend.histogram import highest, log_upper_end, quantile, upper_end

#: The quantile to which the margin is added, and above which peaks count for the spread.
CENTRE = 0.65
#: Accepted probability that the next life exceeds the request.
TAIL = 0.0007
#: Degrees of freedom of the spread per life, because about half of the lives count for it.
FREEDOM_PER_LIFE = 0.5
#: Spread of logarithms that is assumed before the first life (2 %), and the weight of this
#: assumption in degrees of freedom.
ASSUMED_SPREAD, ASSUMED_FREEDOM = 0.02, 1.0
LEAST_FREEDOM = 2.0
#: Maximum degrees of freedom of the other programs' spread, and the minimum with which it is known
#: well enough to recommend a request after one life.
OTHERS_FREEDOM, OTHERS_KNOWN_FREEDOM = 12.0, 4.0
#: Minimum margin of a request above the highest peak. A new release of an engine usually changes
#: its peak by about this much.
LEAST_MARGIN = 0.02
#: Accepted share of lives above the recommendation. Each life beyond this share adds
#: ``MISS_MARGIN`` to the minimum margin above the centre, up to ``MOST_MARGIN``, which the first
#: such life almost reaches.
ACCEPTED, MISS_MARGIN, MOST_MARGIN = 0.001, 0.20, 0.20
#: Requests are rounded up to a multiple of this value when they are shown or written.
STEP_BYTES = 64 << 20

_NORMAL = NormalDist()
_Z = _NORMAL.inv_cdf(CENTRE)
_DENSITY = _NORMAL.pdf(_Z) / (1 - CENTRE)
#: Root mean square of the distance above ``CENTRE``, for the upper part of a standard normal
#: distribution.
_RMS_ABOVE = math.sqrt(1 - _Z * _DENSITY + _Z * _Z)


class Spread(NamedTuple):
    """The spread of peaks, which is the mean square of the distance of their logarithms from the
    centre."""

    variance: float
    freedom: float


#: The spread of too few lives.
NO_SPREAD = Spread(0.0, 0.0)


class Others(NamedTuple):
    """Figures of the container's other programs."""

    spread: Spread = NO_SPREAD
    #: Number of their lives that were above the recommendation, weighted as in
    #: ``Track.weighted_misses``.
    missed: int = 0


NO_OTHERS = Others()


@dataclass(frozen=True, slots=True)
class Estimate:
    #: The quantile ``CENTRE`` of the peaks.
    centre_bytes: int
    highest_bytes: int
    #: The value that the next life exceeds with probability ``TAIL``, but at least the highest peak
    #: with its margin.
    request_bytes: int


def spread(weights: Mapping[int, float], lives: int) -> Spread:
    """Return the spread of the peaks of this number of lives. ``weights`` must not be empty."""
    centre_bytes = quantile(weights, CENTRE)
    log_centre = math.log(centre_bytes)
    squares = total = 0.0
    for bucket, weight in weights.items():
        if upper_end(bucket) >= centre_bytes:
            squares += weight * (log_upper_end(bucket) - log_centre) ** 2
            total += weight
    return Spread(squares / total, max(0.0, (lives - 1) * FREEDOM_PER_LIFE))


def pooled(spreads: Iterable[Spread]) -> Spread:
    """Return the common spread of several programs, with at most ``OTHERS_FREEDOM``."""
    squares = freedom = 0.0
    for each in spreads:
        squares += each.variance * each.freedom
        freedom += each.freedom
    if not freedom:
        return NO_SPREAD
    return Spread(squares / freedom, min(OTHERS_FREEDOM, freedom))


def estimate(
    weights: Mapping[int, float],
    lives: int,
    others: Spread = NO_SPREAD,
    centre_margin: float = 0.0,
) -> Estimate:
    """Return the estimate from the histogram of this number of lives. ``weights`` must not be
    empty.

    ``others`` is the spread of the container's other programs. ``centre_margin`` is the result of
    ``margin_after``.
    """
    centre_bytes = quantile(weights, CENTRE)
    highest_bytes = highest(weights)
    counted = max(1.0, min(lives, sum(weights.values())))
    freedom = max(1.0, (counted - 1) * FREEDOM_PER_LIFE)
    known = freedom * spread(weights, lives).variance
    assumed = ASSUMED_FREEDOM * ASSUMED_SPREAD**2 + others.freedom * others.variance
    freedom += ASSUMED_FREEDOM + others.freedom
    deviation = math.sqrt((known + assumed) / freedom)
    deviations = student_t(1 - TAIL, max(LEAST_FREEDOM, freedom)) - _Z
    above = deviations / _RMS_ABOVE * deviation * math.sqrt(1 + 1 / counted)
    # Limit the exponent, because exp() overflows. e^20 times the centre is more than any device
    # has.
    bound = centre_bytes * math.exp(min(above, 20.0))
    request = max(bound, highest_bytes * (1 + LEAST_MARGIN), centre_bytes * (1 + centre_margin))
    return Estimate(centre_bytes, highest_bytes, math.ceil(request))


def margin_after(tested: int, missed: int) -> float:
    """Return the minimum margin above the centre, as a fraction of the centre.

    ``tested`` lives of the program ended while there was a recommendation. ``missed`` lives were
    above the recommendation, weighted as in ``Track.weighted_misses``. Lives of the container's
    other programs are included, because what makes one of them grow, such as a library or a data
    set, often makes all of them grow. Each life beyond the accepted number adds ``MISS_MARGIN``,
    because needs that have grown in steps will grow again. If peaks vary a lot, the request exceeds
    this margin anyway.
    """
    return min(MOST_MARGIN, MISS_MARGIN * max(0.0, missed - ACCEPTED * tested))


def rounded(request_bytes: int) -> int:
    """Return a request rounded up to a multiple of ``STEP_BYTES``."""
    return -(-request_bytes // STEP_BYTES) * STEP_BYTES


def fitting(request_bytes: int, most_bytes: int | None) -> int:
    """Return the rounded request, but at most ``most_bytes`` rounded down (no maximum if None).

    No device takes a larger request. The memory of a device smaller than ``STEP_BYTES`` is not
    rounded.
    """
    if most_bytes is None:
        return rounded(request_bytes)
    return min(rounded(request_bytes), most_bytes // STEP_BYTES * STEP_BYTES or most_bytes)


def placeable(amounts: Mapping[str, int], largest: Mapping[str, int]) -> int | None:
    """Return the largest recommended amount that fits on some device, in bytes.

    ``amounts`` contains the amount of each device model, and ``largest`` the allocatable bytes of
    the largest device of each model that the container could get. Models without such a device
    count only if no other model has an amount. Return None if there is no amount.
    """
    present = [
        fitting(amount, largest[model]) for model, amount in amounts.items() if model in largest
    ]
    if present or not amounts:
        return max(present, default=None)
    return fitting(max(amounts.values()), max(largest.values(), default=None))


def student_t(share: float, freedom: float) -> float:
    """Return the quantile of Student's t by the expansion 26.7.5 of Abramowitz and Stegun.

    Below four degrees of freedom the result is too small. For example, for a share of 0.9996 and
    two degrees of freedom it is 23 instead of 35.
    """
    z = _NORMAL.inv_cdf(share)
    terms = (
        z,
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
    )
    return sum(term / freedom**power for power, term in enumerate(terms))
