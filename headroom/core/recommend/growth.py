"""Detects lives whose memory use grows or jumps after their first day.

Their peaks do not predict the need of the next life. The peak of a leak depends on the length of
the life, and the peak of a server that loads other models into its process depends on these models.
"""

from dataclasses import dataclass
from itertools import pairwise

DAY_S = 86_400.0
#: A peak still grows if it increases by more than this factor on each of two days in a row.
RISE = 1.005
#: A peak has jumped if it increases by more than this factor on one day.
JUMP = 1.15
#: Number of days whose peaks are kept.
_KEPT = 3


@dataclass(frozen=True, slots=True)
class Growth:
    """The peak of a life at the end of each of its days."""

    #: Number of days that have ended.
    days: int = 0
    #: The peaks at the ends of the last days, oldest first.
    peaks_bytes: tuple[int, ...] = ()
    jumped: bool = False
    #: The peak at the end of the first day, or 0 during the first day.
    first_bytes: int = 0

    def until(self, age_s: float, peak_bytes: int) -> "Growth":
        """Return the growth at this age. Days that were not observed end with ``peak_bytes``."""
        days = int(age_s // DAY_S)
        if days <= self.days:
            return self
        more = (peak_bytes,) * min(_KEPT, days - self.days)
        peaks_bytes = (*self.peaks_bytes, *more)[-_KEPT:]
        jumped = any(later > JUMP * earlier for earlier, later in pairwise(peaks_bytes))
        first_bytes = self.first_bytes or peak_bytes
        return Growth(days, peaks_bytes, self.jumped or jumped, first_bytes)

    @property
    def unsettled(self) -> bool:
        """Return whether the use still grows, or has jumped."""
        grows = len(self.peaks_bytes) == _KEPT and all(
            later > RISE * earlier for earlier, later in pairwise(self.peaks_bytes)
        )
        return grows or self.jumped
