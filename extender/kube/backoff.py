"""How long to wait before trying again: exponential, with full jitter.

Full jitter (anything from nothing to the bound) spreads the replicas and kinds that lost the same
API server at the same moment.
"""

from collections.abc import Callable


class Backoff:
    """Bounds of ``base_s``, twice that, and so on up to ``cap_s``; ``random`` gives 0..1."""

    def __init__(self, base_s: float, cap_s: float, random: Callable[[], float]) -> None:
        self._base_s = base_s
        self._cap_s = cap_s
        self._random = random
        self._failures = 0

    def next_s(self, at_least_s: float = 0.0) -> float:
        """Seconds to wait after one more failure; ``at_least_s`` is what the server asked for,
        obeyed up to the cap."""
        bound_s = min(self._cap_s, self._base_s * 2.0 ** min(self._failures, 30))
        self._failures += 1
        return min(at_least_s, self._cap_s) + bound_s * self._random()

    def reset(self) -> None:
        self._failures = 0
