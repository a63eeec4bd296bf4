"""Measures the state of this process: its watches, the delay of its event loop, and its memory."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from resource import getpagesize

from headroom.runtime.kube.resources import Health
from headroom.runtime.telemetry import LAG_EVERY_S

#: Number of samples of the event loop's delay in one minute.
LAGS = round(60 / LAG_EVERY_S)

_STATM = Path("/proc/self/statm")


class ProcessMonitor:
    """The measurements of this process.

    ``behind`` returns whether received changes are not applied yet.
    """

    def __init__(self, behind: Callable[[], bool]) -> None:
        #: Returns the state of each watch.
        self.health: Callable[[], Iterable[Health]] = tuple
        self.behind = behind
        #: Unix time in seconds.
        self.started_at_s = time.time()
        self._lags: deque[float] = deque(maxlen=LAGS)

    def lag(self, late_s: float) -> None:
        """Record one sample of the delay of the event loop."""
        self._lags.append(late_s)

    def lags_s(self) -> list[float]:
        """Return the samples of the last minute, shortest delay first. May be called from any
        thread."""
        return sorted(self._lags)


def memory_bytes() -> int | None:
    """Return the resident memory of the process, or None if the system does not report it."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * getpagesize()
    except (OSError, ValueError, IndexError):
        return None
