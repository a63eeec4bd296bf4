"""Keeps peaks and idle times of pods in a file on the node, so that they survive restarts."""

import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import structlog

from agent.attribution import Attributed
from agent.idle import IdleTimes, OfPods
from agent.peaks import Lives, Peaks
from agent.probes.state_file import StateFile
from headroom.contract.gpunode import PodUse

_log = structlog.get_logger()

#: Maximum number of seconds between two writes of the file, even if no peak has changed. The file
#: contains the time of the last sample, from which the next agent computes how long no samples were
#: taken.
SAVE_EVERY_S = 15.0


def lives_path(state: Path) -> Path:
    """Return the path of the file with the peaks, beside the state file of the agent."""
    return state.with_suffix(".lives.json")


class PeakRecorder:
    """Measures peaks, and saves them when they change. The class is not thread-safe.

    ``file`` is None if peaks need not survive a restart. ``boot_s`` returns the seconds since boot.
    """

    def __init__(
        self,
        file: StateFile[Lives] | None,
        boot_s: Callable[[], float] = lambda: time.clock_gettime(time.CLOCK_BOOTTIME),
    ) -> None:
        self._file = file
        self._boot_s = boot_s
        before = Lives() if file is None else file.read()
        self._peaks = Peaks(before, boot_s())
        self._idle = IdleTimes(before.idle, boot_s())
        self._saved_s = boot_s()
        self._saved = self._peaks.state
        self._logged = ""
        self._log_trouble()

    def measure(
        self, attributed: Attributed, of_pods: OfPods, observed_at: datetime
    ) -> list[PodUse]:
        """Add a sample, and return its rows with peaks and idle times.

        See ``Peaks.measure`` and ``IdleTimes.measure``.
        """
        now_s = self._boot_s()
        found = self._peaks.measure(
            attributed.rows, attributed.read, of_pods.marks, now_s, observed_at
        )
        found = self._idle.measure(found, of_pods.activity, of_pods.shares, now_s, observed_at)
        if self._peaks.state != self._saved or now_s - self._saved_s >= SAVE_EVERY_S:
            self.save()
        return found

    def save(self) -> None:
        """Write the file. A failure is logged once, and the next call tries again."""
        if self._file is not None:
            lives = self._peaks.lives
            lives.idle = self._idle.idle
            self._file.write(lives)
            self._log_trouble()
        self._saved_s, self._saved = self._boot_s(), self._peaks.state

    def _log_trouble(self) -> None:
        trouble = "" if self._file is None else self._file.trouble
        if trouble and trouble != self._logged:
            _log.warning("peaks_not_kept", reason=trouble)
        self._logged = trouble
