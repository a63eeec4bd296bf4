"""The decaying histogram of peaks.

Bucket sizes grow exponentially as in the Vertical Pod Autoscaler's recommender, but by 1 % instead
of 5 %, because GPU memory is scarce. A bucket is identified by its index. Its value is its upper
end, so that rounding never lowers a recommendation. A weight halves every half-life. Decay
multiplies all weights by the same factor, so they are stored as of ``as_of_s`` and need no timer.
"""

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Upper end of bucket 0.
SMALLEST_BYTES = 32 << 20
GROWTH = 1.01
#: The last bucket, of about 2 TiB, contains all larger values.
LAST_BUCKET = 1120
#: Buckets by their name in a checkpoint.
_BUCKETS = {str(bucket): bucket for bucket in range(LAST_BUCKET + 1)}
#: Maximum number of buckets with a weight. If there are more, the lightest bucket is merged into
#: the next higher bucket.
MAX_BUCKETS = 64
#: Maximum weight of a bucket that is read from a checkpoint, and maximum number of lives. Larger
#: numbers cannot be real, and sums of smaller numbers stay below the maximum of the schema.
MAX_WEIGHT = 1_000_000_000
#: Smaller weights are dropped. The weight of one life falls to this value after ten half-lives.
NEGLIGIBLE = 0.001


def bucket_of(peak_bytes: int) -> int:
    """Return the index of the smallest bucket whose upper end is at least ``peak_bytes``."""
    if peak_bytes <= SMALLEST_BYTES:
        return 0
    # Despite rounding, the tolerance keeps the upper end of a bucket in that bucket.
    steps = math.log(peak_bytes / SMALLEST_BYTES) / math.log(GROWTH) - 1e-6
    return min(LAST_BUCKET, math.ceil(steps))


@functools.cache
def upper_end(bucket: int) -> int:
    """Return the largest value of a bucket, in bytes."""
    return math.ceil(SMALLEST_BYTES * GROWTH**bucket)


@functools.cache
def log_upper_end(bucket: int) -> float:
    return math.log(upper_end(bucket))


@dataclass(slots=True)
class Histogram:
    """Weights of peaks by bucket at a point in time."""

    #: Weights by bucket.
    weights: dict[int, float] = field(default_factory=dict)
    #: Time of the weights in seconds since the epoch, which never goes back.
    as_of_s: float = 0.0

    def __bool__(self) -> bool:
        return bool(self.weights)

    @property
    def total(self) -> float:
        return sum(self.weights.values())

    def decay(self, now_s: float, half_life_s: float) -> None:
        """Reduce all weights to their values at ``now_s``. An earlier time has no effect."""
        if now_s <= self.as_of_s:
            return
        factor = 0.5 ** ((now_s - self.as_of_s) / half_life_s)
        self.as_of_s = now_s
        self.weights = {
            bucket: weight * factor
            for bucket, weight in self.weights.items()
            if weight * factor >= NEGLIGIBLE
        }

    def add(self, peak_bytes: int, weight: float = 1.0) -> None:
        """Add a peak with this weight at the time ``as_of_s``."""
        bucket = bucket_of(peak_bytes)
        self.weights[bucket] = self.weights.get(bucket, 0.0) + weight
        self._bound()

    def merge(self, other: "Histogram", half_life_s: float) -> None:
        """Add the weights of another histogram. Both first decay to the later of their times."""
        now_s = max(self.as_of_s, other.as_of_s)
        self.decay(now_s, half_life_s)
        other.decay(now_s, half_life_s)
        for bucket, weight in other.weights.items():
            self.weights[bucket] = self.weights.get(bucket, 0.0) + weight
        self._bound()

    def checkpoint(self) -> dict[str, int]:
        """Return the weights in thousandths by bucket, for an object of the API server."""
        thousandths = {b: round(weight * 1000) for b, weight in sorted(self.weights.items())}
        return {str(bucket): weight for bucket, weight in thousandths.items() if weight}

    @classmethod
    def restored(cls, checkpoint: Mapping[str, int], as_of_s: float) -> "Histogram":
        """Return the histogram of a checkpoint.

        Entries whose name is not a bucket, or whose weight is not positive, are dropped.
        """
        weights = {
            bucket: min(weight / 1000, MAX_WEIGHT)
            for name, weight in checkpoint.items()
            if (bucket := _BUCKETS.get(name)) is not None and weight > 0
        }
        histogram = cls(weights, as_of_s)
        histogram._bound()
        return histogram

    def _bound(self) -> None:
        while len(self.weights) > MAX_BUCKETS:
            *below, _ = sorted(self.weights)
            lightest = min(below, key=lambda bucket: (self.weights[bucket], bucket))
            weight = self.weights.pop(lightest)
            above = min(bucket for bucket in self.weights if bucket > lightest)
            self.weights[above] += weight


def quantile(weights: Mapping[int, float], share: float) -> int:
    """Return the upper end of the bucket in which this share (0..1) of the weight is reached.

    If there is no weight, return 0.
    """
    if not weights:
        return 0
    wanted = share * sum(weights.values())
    reached = 0.0
    for bucket in sorted(weights):
        reached += weights[bucket]
        # Sums of floats may miss the whole by a rounding error.
        if reached >= wanted - 1e-9:
            return upper_end(bucket)
    return upper_end(max(weights))


def highest(weights: Mapping[int, float]) -> int:
    """Return the upper end of the highest bucket with a weight, or 0 if there is none.

    A single high peak is forgotten only after ten half-lives, when its weight is negligible,
    because a request below a known peak would not be safe.
    """
    return upper_end(max(weights)) if weights else 0


def weight_above(weights: Mapping[int, float], amount_bytes: int) -> float:
    """Return the weight of the buckets that are entirely above ``amount_bytes``."""
    return sum(w for bucket, w in weights.items() if upper_end(bucket - 1) >= amount_bytes)
