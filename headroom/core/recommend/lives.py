"""Decides which lives count, and records the lives of one program.

A life is *censored* if its peak is only a lower bound of its need. This is the case if it was
OOM-killed, failed or was evicted within a day, has run for less than a day, grew or jumped after
its first day (``growth``), was not measured all the time, or has an unknown end. Censored lives can
only raise a recommendation. They do not count as lives, and their peaks matter only if they are
above the request that follows from the other lives.
"""

import math
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum

from headroom.core.recommend.estimate import (
    LEAST_MARGIN,
    NO_OTHERS,
    NO_SPREAD,
    OTHERS_KNOWN_FREEDOM,
    Estimate,
    Others,
    Spread,
    estimate,
    margin_after,
    spread,
)
from headroom.core.recommend.histogram import Histogram, highest

HOUR_S = 3600.0
DAY_S = 24 * HOUR_S
#: Seconds in which a peak loses half of its weight.
HALF_LIFE_S = 10 * DAY_S
#: A life of this length counts as complete, whether it still runs, failed or was evicted.
MATURE_S = DAY_S
#: Minimum number of complete lives for a recommendation. If the container's other programs have
#: shown how much its peaks differ, one life is enough.
LEAST_LIVES = 3
#: Maximum ratio of a request to the censored peak that raises it.
CENSORED_MARGIN = 1.2
#: A program is unsettled if at least this number and at least this share of its lives are
#: unsettled.
UNSETTLED_LIVES, UNSETTLED_SHARE = 2, 0.2
#: A life has outgrown the others if its peak exceeds their peaks, and its own peak of the first
#: day, by more than this factor. A program is also unsettled if this share of its lives has
#: outgrown others.
OUTGROWN, OUTGROWN_SHARE = 1.1, 0.03
#: If at least ``TOGETHER`` running lives have risen by the factor ``ROSE`` after their first day,
#: to peaks that differ by at most the factor ``SAME_LEVEL``, they rose for the same reason, such as
#: another model. They count as lives that outgrew the others.
ROSE, SAME_LEVEL, TOGETHER = 1.03, 1.01, 3
#: A life is flat if its peak exceeds its startup peak by at most this factor.
FLAT_WITHIN = 1.02


class Ending(Enum):
    """How a life ended."""

    #: The process exited with status 0, or the pod's controller or author deleted the pod.
    COMPLETED = "completed"
    FAILED = "failed"
    EVICTED = "evicted"
    OOM_KILLED = "oom-killed"
    #: The end of the life was not observed.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class Life:
    """One container on one device, from its start to its end, or until now."""

    peak_bytes: int
    started_s: float
    #: When the life ended, or the current time while the container runs.
    until_s: float
    #: How the life ended, or None while the container runs.
    ending: Ending | None = None
    #: Highest use until the use settled, or None if it was not measured.
    startup_peak_bytes: int | None = None
    #: Whether a part of the life was not measured.
    partial: bool = False
    #: Whether the use grew or jumped after the first day of the life.
    unsettled: bool = False
    #: The peak at the end of the first day, or 0 if the life is younger than a day.
    first_day_bytes: int = 0
    #: The request per device that the author of the pod wrote, or 0 if there is none or it is
    #: unknown.
    requested_bytes: int = 0

    @property
    def censored(self) -> bool:
        if self.partial or self.unsettled or self.ending in (Ending.OOM_KILLED, Ending.UNKNOWN):
            return True
        if self.ending is Ending.COMPLETED:
            return False
        return self.until_s - self.started_s < MATURE_S

    @property
    def flat(self) -> bool:
        """Return whether its memory rose once at the start and then stayed constant."""
        startup = self.startup_peak_bytes
        return startup is not None and self.peak_bytes <= startup * FLAT_WITHIN


@dataclass(slots=True)
class Track:
    """The lives of one program of one container on one device model."""

    complete: Histogram = field(default_factory=Histogram)
    censored: Histogram = field(default_factory=Histogram)
    #: Running lives. They are replaced as a whole and do not decay.
    running: Histogram = field(default_factory=Histogram)
    running_censored: Histogram = field(default_factory=Histogram)
    #: Number of complete lives that ended, without decay.
    ended: int = 0
    #: Number of flat lives among them.
    flat: int = 0
    #: Unix time at which the first life started, or 0 if there are no lives.
    first_s: float = 0.0
    #: Unix time at which the last life ended, or 0 if there are no lives.
    last_s: float = 0.0
    #: Number of lives that ended while there was a recommendation.
    tested: int = 0
    #: Number of these lives whose peak was above the recommendation.
    missed: int = 0
    #: Number of lives whose peak was above the recommendation but not above their author's request.
    missed_fitting: int = 0
    #: Number of ended and of running lives whose use grew or jumped after their first day.
    unsettled: int = 0
    running_unsettled: int = 0
    #: Number of ended and of running lives that outgrew all lives that had ended before. The first
    #: number also includes lives that rose to one level.
    outgrown: int = 0
    running_outgrown: int = 0

    @property
    def is_unsettled(self) -> bool:
        """Return whether so many lives grew or jumped late that peaks do not predict the future
        need."""
        lives = self.unsettled + self.running_unsettled
        outgrown = self.outgrown + self.running_outgrown
        every = lives + self.lives
        return (lives >= UNSETTLED_LIVES and lives >= UNSETTLED_SHARE * every) or (
            outgrown > 0 and outgrown >= OUTGROWN_SHARE * every
        )

    @property
    def weighted_misses(self) -> int:
        """Return the number of lives that were above the recommendation. A life that its author's
        request would have fitted counts twice, because only the recommendation harmed it."""
        return self.missed + self.missed_fitting

    @property
    def highest_bytes(self) -> int:
        """Return the highest recorded peak, including censored lives, or 0 if there is none."""
        parts = self.complete, self.censored, self.running, self.running_censored
        return max(highest(each.weights) for each in parts)

    @property
    def lives(self) -> int:
        """Return the number of lives that count, including running lives."""
        return self.ended + round(self.running.total)

    def record(self, life: Life, others: Others = NO_OTHERS) -> None:
        """Add a life that ended. ``others`` describes the container's other programs."""
        self.decay(life.until_s)
        if (found := self.estimate(others, running=False)) is not None:
            self.tested += 1
            missed = life.peak_bytes > found.request_bytes
            self.missed += missed
            self.missed_fitting += missed and life.peak_bytes <= life.requested_bytes
        self.first_s = min(self.first_s or life.started_s, life.started_s)
        self.last_s = max(self.last_s, life.until_s)
        self.outgrown += self._outgrew(life)
        if life.censored:
            self.censored.add(life.peak_bytes, _weight(life, self.censored))
            self.unsettled += life.unsettled
            return
        self.complete.add(life.peak_bytes, _weight(life, self.complete))
        self.ended += 1
        self.flat += life.flat

    def replace_running(self, lives: Iterable[Life]) -> None:
        """Replace the running lives."""
        self.running, self.running_censored = Histogram(), Histogram()
        self.running_unsettled = self.running_outgrown = 0
        risen: list[int] = []
        for life in lives:
            if 0 < ROSE * life.first_day_bytes < life.peak_bytes:
                risen.append(life.peak_bytes)
            self.running_unsettled += life.unsettled
            self.running_outgrown += self._outgrew(life)
            (self.running_censored if life.censored else self.running).add(life.peak_bytes)
            self.first_s = min(self.first_s or life.started_s, life.started_s)
            self.last_s = max(self.last_s, life.until_s)
        # Each of them counts once although it is seen repeatedly, and still counts when it has
        # ended.
        self.outgrown = max(self.outgrown, _at_one_level(risen))

    def decay(self, now_s: float) -> None:
        self.complete.decay(now_s, HALF_LIFE_S)
        self.censored.decay(now_s, HALF_LIFE_S)

    def merge(self, other: "Track") -> None:
        """Add the lives of another track that ended."""
        self.complete.merge(other.complete, HALF_LIFE_S)
        self.censored.merge(other.censored, HALF_LIFE_S)
        self.ended += other.ended
        self.flat += other.flat
        self.first_s = min(self.first_s or other.first_s, other.first_s or self.first_s)
        self.last_s = max(self.last_s, other.last_s)
        self.tested += other.tested
        self.missed += other.missed
        self.missed_fitting += other.missed_fitting
        self.unsettled += other.unsettled
        self.outgrown += other.outgrown

    def _outgrew(self, life: Life) -> bool:
        """Return whether a life needed more after its first day than any life before it."""
        before = max(highest(self.complete.weights), highest(self.censored.weights))
        if not before or not life.first_day_bytes:
            return False
        return life.peak_bytes > OUTGROWN * max(before, life.first_day_bytes)

    def spread(self) -> Spread:
        """Return the spread of the peaks of lives that ended, or ``NO_SPREAD`` if there are too
        few."""
        if self.ended < LEAST_LIVES or not self.complete:
            return NO_SPREAD
        return spread(self.complete.weights, self.ended)

    def estimate(self, others: Others = NO_OTHERS, running: bool = True) -> Estimate | None:
        """Return the estimate as of the last decay, or None if there are too few lives.

        Without ``running``, only lives that ended count.
        """
        lives = self.lives if running else self.ended
        weights = dict(self.complete.weights)
        censored = dict(self.censored.weights)
        if running:
            _add(weights, self.running)
            _add(censored, self.running_censored)
        least_lives = 1 if others.spread.freedom >= OTHERS_KNOWN_FREEDOM else LEAST_LIVES
        if lives < least_lives or not weights:
            return None
        margin = margin_after(self.tested, self.weighted_misses + others.missed)
        found = estimate(weights, lives, others.spread, margin)
        beyond = highest(censored)
        if beyond <= found.request_bytes:
            return found
        # Later lives may also reach the censored peak, so it gets a margin like the centre.
        ratio = found.request_bytes / found.centre_bytes
        factor = min(CENSORED_MARGIN, max(1 + LEAST_MARGIN, ratio))
        return Estimate(found.centre_bytes, max(found.highest_bytes, beyond), int(beyond * factor))


def _at_one_level(peaks_bytes: list[int]) -> int:
    """Return the number of peaks that are equal within ``SAME_LEVEL``, or 0 if there are fewer than
    ``TOGETHER``."""
    ordered = sorted(peaks_bytes)
    counts = (bisect_right(ordered, SAME_LEVEL * low) - at for at, low in enumerate(ordered))
    most = max(counts, default=0)
    return most if most >= TOGETHER else 0


def _weight(life: Life, among: Histogram) -> float:
    """Return the weight of a life, which is less than 1 if it ended before the histogram's time."""
    late_s = max(0.0, among.as_of_s - life.until_s)
    return math.exp(-math.log(2) * late_s / HALF_LIFE_S)


def _add(weights: dict[int, float], more: Histogram) -> None:
    for bucket, weight in more.weights.items():
        weights[bucket] = weights.get(bucket, 0.0) + weight
