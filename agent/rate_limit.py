"""Limits how often something happens, for each key, by a token bucket."""

from collections.abc import Callable

#: Maximum number of keys that are remembered. The one that was used longest ago is forgotten first.
MAX_KEYS = 1024


class RateLimit:
    """Allows ``burst`` events of a key at once, and ``rate_per_s`` of them per second afterwards.

    ``monotonic`` returns seconds.
    """

    def __init__(self, rate_per_s: float, burst: int, monotonic: Callable[[], float]) -> None:
        self._rate_per_s = rate_per_s
        self._burst = burst
        self._monotonic = monotonic
        #: Key -> events that are still allowed, and when they were counted; least recent first.
        self._left: dict[str, tuple[float, float]] = {}

    def allows(self, key: str) -> bool:
        """Return whether one more event of the key is allowed now, and count it."""
        now_s = self._monotonic()
        left, at_s = self._left.pop(key, (float(self._burst), now_s))
        left = min(float(self._burst), left + (now_s - at_s) * self._rate_per_s)
        allowed = left >= 1.0
        self._left[key] = left - allowed, now_s
        if len(self._left) > MAX_KEYS:
            del self._left[next(iter(self._left))]
        return allowed
