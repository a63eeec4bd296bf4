"""Collects the state of this process: its memory, event loop and watches."""

import platform
import time
from collections import deque
from collections.abc import Callable, Iterable
from pathlib import Path
from resource import getpagesize

from extender.console.process_bodies import LagView, Machinery, SourceView
from extender.kube.resources import Health
from extender.observability.metrics import LAG_EVERY_S
from extender.version import own_version

#: Number of loop lag samples in one minute.
LAGS = round(60 / LAG_EVERY_S)
_STATM = Path("/proc/self/statm")


class Observed:
    """The state of this process.

    ``health`` returns the state of each watch; ``behind`` returns whether received changes are not
    applied yet.
    """

    def __init__(self, behind: Callable[[], bool]) -> None:
        self.health: Callable[[], Iterable[Health]] = tuple
        self._behind = behind
        self._lags: deque[float] = deque(maxlen=LAGS)
        self._started_at_s = time.time()
        self._version = own_version()

    def lag(self, late_s: float) -> None:
        self._lags.append(late_s)

    def now(self) -> Machinery:
        """Return the current state. Safe to call from any thread."""
        return Machinery(
            version=self._version,
            python=platform.python_version(),
            started_at_s=self._started_at_s,
            sources=[
                SourceView(
                    kind=each.kind,
                    synced=each.synced,
                    contact_age_s=_rounded(each.contact_age_s),
                    reconnects=each.reconnects,
                    lists=each.lists,
                    unreadable=each.unreadable,
                )
                for each in self.health()
            ],
            behind=self._behind(),
            loop_lag=_lag(sorted(self._lags)),
            memory_bytes=_memory_bytes(),
        )


def _lag(late_s: list[float]) -> LagView | None:
    if not late_s:
        return None
    last = len(late_s) - 1
    return LagView(
        p50_s=round(late_s[last // 2], 6),
        p99_s=round(late_s[last * 99 // 100], 6),
        max_s=round(late_s[last], 6),
        window_s=round(len(late_s) * LAG_EVERY_S, 3),
    )


def _memory_bytes() -> int | None:
    """Return the resident memory of the process, None if the system does not report it."""
    try:
        return int(_STATM.read_text(encoding="ascii").split()[1]) * getpagesize()
    except (OSError, ValueError, IndexError):
        return None


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
