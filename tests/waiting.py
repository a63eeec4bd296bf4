"""What a test waits for: asked again and again, and named where it does not come."""

import time
from collections.abc import Callable

PATIENCE_S = 60.0


def until(true: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> None:
    """Returns as soon as it is so; long patience costs nothing where it is not needed."""
    deadline_s = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(0.02)
