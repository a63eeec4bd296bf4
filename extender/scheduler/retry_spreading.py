"""Spreads the retries of unschedulable pods over time, so that not all are tried at once.

kube-scheduler retries an unschedulable pod after seconds, as long as anything in the cluster
changes. Pods rejected together are retried together, and any new pod waits for all of them. If
filter returns an Error instead of a rejection, kube-scheduler retries the pod after 1, 2 or 4
seconds. So pods of a crowd get Errors until every second has its share of retries.
"""

from collections import deque
from typing import NamedTuple
from zlib import crc32

from extender.bounded import Bounded

#: Seconds over which rejections are averaged to get the share of one second. Longer than the
#: longest back-off of kube-scheduler (podMaxBackoffSeconds).
REMEMBERED_S = 40.0
#: Maximum number of pods and of attempts on record.
MAX_REMEMBERED = 65_536
#: Seconds within which attempts count as one crowd. kube-scheduler requeues pods once a second and
#: then tries them one after the other.
TOGETHER_S = 0.6
#: Fewer pods than FEW at once are no crowd; one second may have SLACK times its share.
FEW, SLACK = 5, 1.1
#: Rejections that every pod gets with their reason before it can be spread. Its owner has not seen
#: the reason yet, and kube-scheduler looks for victims only after a rejection.
REJECTED_OFTEN = 3
#: Maximum number of Errors in a row for one pod; 31 s have passed by then. The number is drawn for
#: each pod, because pods delayed together would otherwise meet again.
MOST_IN_A_ROW = 5


class _Tried(NamedTuple):
    #: Number of rejections, and of Errors since the last one.
    rejected: int
    spread_retries: int
    last_s: float


class RetrySpreader:
    """Decides which rejections to replace with an Error. Times are monotonic seconds."""

    def __init__(self) -> None:
        #: By uid; the pod tried last comes last.
        self._tried: Bounded[str, _Tried] = Bounded(MAX_REMEMBERED)
        #: Times of rejections in the last REMEMBERED_S, and in the last TOGETHER_S seconds.
        self._lately: deque[float] = deque(maxlen=MAX_REMEMBERED)
        self._together: deque[float] = deque(maxlen=MAX_REMEMBERED)

    def reject(self, uid: str, now_s: float) -> bool:
        """Return whether to reject the pod now; False: answer with an Error, to retry it later.

        A rejection is counted.
        """
        while self._tried and next(iter(self._tried.values())).last_s < now_s - REMEMBERED_S:
            self._tried.popitem(last=False)
        for at, kept_s in ((self._lately, REMEMBERED_S), (self._together, TOGETHER_S)):
            while at and at[0] < now_s - kept_s:
                at.popleft()
        tried = self._tried.pop(uid, _Tried(0, 0, now_s))
        since_s = now_s - self._lately[0] if self._lately else 0.0
        share = SLACK * len(self._lately) / max(1.0, since_s)
        crowded = len(self._together) >= max(FEW, share)
        # A pod that is retried within a moment does not back off (SchedulerPopFromBackoffQ). An
        # Error would not delay it, only hide from autoscalers that it is unschedulable.
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
