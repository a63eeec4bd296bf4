"""A store that is far away."""

import time


class Latency:
    """A fault that only takes time, half of it on the way there."""

    def __init__(self, latency_s: float) -> None:
        self._half_s = latency_s / 2

    def __call__(self, operation: str, when: str) -> None:
        time.sleep(self._half_s)
