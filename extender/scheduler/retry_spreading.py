"""Which refused pods are asked to come again a little later, so that not all are tried at once.

kube-scheduler tries a refused pod again after seconds, as long as anything changes anywhere. Pods
that were refused together come back together, and whoever comes then waits for all of them. An
Error in place of a refusal has a pod tried again after a second, or two, or four: so those of a
crowd are moved apart until each second has its share, and there they stay.
"""

from collections import deque
from typing import NamedTuple
from zlib import crc32

from extender.bounded import Bounded

#: The share of a second is what came in so long, on average: longer than kube-scheduler has any
#: pod wait (podMaxBackoffSeconds).
REMEMBERED_S = 40.0
#: Pods and attempts that are remembered.
MAX_REMEMBERED = 65_536
#: kube-scheduler looks once a second for whom to try again, and tries them one after the other.
TOGETHER_S = 0.6
#: So many at once are no crowd; and so many times its share a second may have.
FEW, SLACK = 5, 1.1
#: Who was refused less often is told the reason each time: it is new to its author, and
#: kube-scheduler looks for victims only then.
REJECTED_OFTEN = 3
#: So often in a row a pod is asked to come again, at most: by then 31 s have passed. How often is
#: drawn for each, as those who are put off together would else meet again.
MOST_IN_A_ROW = 5


class _Tried(NamedTuple):
    #: How often it was refused, and how often since then it was asked to come again.
    rejected: int
    spread_retries: int
    last_s: float


class RetrySpreader:
    """All times are seconds of one monotonic clock."""

    def __init__(self) -> None:
        #: By uid; who was tried last comes last.
        self._tried: Bounded[str, _Tried] = Bounded(MAX_REMEMBERED)
        #: When pods were refused.
        self._lately: deque[float] = deque(maxlen=MAX_REMEMBERED)
        self._together: deque[float] = deque(maxlen=MAX_REMEMBERED)

    def reject(self, uid: str, now_s: float) -> bool:
        """Whether the pod is to be refused now, which is then counted; else it is to come again."""
        while self._tried and next(iter(self._tried.values())).last_s < now_s - REMEMBERED_S:
            self._tried.popitem(last=False)
        for at, kept_s in ((self._lately, REMEMBERED_S), (self._together, TOGETHER_S)):
            while at and at[0] < now_s - kept_s:
                at.popleft()
        tried = self._tried.pop(uid, _Tried(0, 0, now_s))
        since_s = now_s - self._lately[0] if self._lately else 0.0
        share = SLACK * len(self._lately) / max(1.0, since_s)
        crowded = len(self._together) >= max(FEW, share)
        # Who is back within a moment does not back off at all (SchedulerPopFromBackoffQ), and an
        # Error would only hide from autoscalers that it waits.
        backs_off = now_s > tried.last_s + TOGETHER_S
        drawn = 1 + crc32(f"{uid} {tried.rejected}".encode()) % MOST_IN_A_ROW
        known = tried.rejected >= REJECTED_OFTEN and tried.spread_retries < drawn
        if crowded and backs_off and known:
            self._tried[uid] = _Tried(tried.rejected, tried.spread_retries + 1, now_s)
            return False
        self._tried[uid] = _Tried(tried.rejected + 1, 0, now_s)
        self._lately.append(now_s)
        self._together.append(now_s)
        return True
