"""Limits the rate of events for each key with a token bucket."""

from collections.abc import Callable

#: Maximum number of keys in memory. If there are more, the least recently used key is dropped.
MAX_KEYS = 1024


class RateLimit:
    """Allows a burst of ``burst`` events of a key, and then ``rate_per_s`` events of the key per
    second.

    ``monotonic`` returns seconds.
    """

    def __init__(self, rate_per_s: float, burst: int, monotonic: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._monotonic = monotonic
        #: Remaining tokens of each key and when they were counted, least recently used first.
        self._left: dict[str, tuple[float, float]] = {}

    def allows(self, key: str) -> bool:
        """Count one more event of the key if it is allowed now, and return whether it is."""
        now_s = self._monotonic()
        left, at_s = self._left.pop(key, (float(self._burst), now_s))
        left = min(float(self._burst), left + (now_s - at_s) * self._rate_per_s)
        allowed = left >= 1.0
        self._left[key] = left - allowed, now_s
        if len(self._left) > MAX_KEYS:
            del self._left[next(iter(self._left))]
        return allowed
