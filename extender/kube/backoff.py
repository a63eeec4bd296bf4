"""Pauses between attempts: exponential backoff with full jitter.

Full jitter (a random pause between zero and the limit) spreads replicas and kinds that lost the
same API server at the same moment.
"""

from collections.abc import Callable


class Backoff:
    """Limits of ``base_s``, twice that, and so on up to ``cap_s``; ``random`` returns 0..1."""

    def __init__(self, base_s: float, cap_s: float, random: Callable[[], float]) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._random = random
        self._failures = 0

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Return the seconds to wait after another failure. ``at_least_s`` is the pause that the
        server requested, respected up to the cap."""
        bound_s = min(self._cap_s, self._base_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return min(at_least_s, self._cap_s) + bound_s * self._random()

    def reset(self) -> None:
        self._failures = 0
