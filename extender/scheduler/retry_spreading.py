"""Spreads the retries of unschedulable pods over time, so that kube-scheduler does not try all of
them in the same second.

kube-scheduler retries an unschedulable pod after a few seconds, as long as anything in the cluster
changes. Pods that were rejected together are retried together, and each new pod waits for all of
them. If filter returns an Error instead of a rejection, kube-scheduler waits for a backoff of 1
second after the first Error in a row, and then of 2 seconds, 4 seconds and so on. So if filter
rejects more pods at the same time than it rejects on average per second, it returns Errors for
additional pods.
"""

from collections import deque
from typing import NamedTuple
from zlib import crc32

from headroom.bounded_dict import Bounded

#: Number of seconds over which the average number of rejections per second is computed. This is
#: longer than the maximum backoff in Headroom's kube-scheduler configuration
#: (podMaxBackoffSeconds).
REMEMBERED_S = 40.0
#: Maximum number of recorded pods, and of recorded rejections.
MAX_REMEMBERED = 65_536
#: Rejections within this many seconds count as simultaneous. kube-scheduler requeues pods once a
#: second and then tries them one after the other.
TOGETHER_S = 0.6
#: Pods are delayed if there are at least FEW simultaneous rejections, and at least SLACK times the
#: average number per second.
FEW, SLACK = 5, 1.1
#: Number of rejections before a pod can get its first Error. An Error hides the reason from the
#: pod's owner, and kube-scheduler searches for victims only after a rejection.
REJECTED_OFTEN = 3
#: Maximum number of Errors in a row for one pod, which delay it by 31 s in total. A hash of the pod
#: decides its limit, from 1 to this number, because with equal limits, pods that were delayed
#: together would be retried together again.
MOST_IN_A_ROW = 5


class _Tried(NamedTuple):
    #: Number of rejections.
    rejected: int
    #: Number of Errors since the last rejection.
    spread_retries: int
    last_s: float


class RetrySpreader:
    """Decides which rejections to replace with an Error. Times are monotonic seconds."""

    def __init__(self) -> None:
        #: The attempts of each pod, by uid, in the order of the last attempts.
        self._tried: Bounded[str, _Tried] = Bounded(MAX_REMEMBERED)
        #: Times of the rejections in the last REMEMBERED_S and in the last TOGETHER_S seconds.
        self._lately: deque[float] = deque(maxlen=MAX_REMEMBERED)
        self._together: deque[float] = deque(maxlen=MAX_REMEMBERED)

    def reject(self, uid: str, now_s: float) -> bool:
        """Return True if filter is to reject the pod, and False if it must return an Error that
        delays the pod's retry.

        Counts the rejection or the Error.
        """
        while self._tried and next(iter(self._tried.values())).last_s < now_s - REMEMBERED_S:
            self._tried.popitem(last=False)
        for times, window_s in ((self._lately, REMEMBERED_S), (self._together, TOGETHER_S)):
            while times and times[0] < now_s - window_s:
                times.popleft()
        tried = self._tried.pop(uid, _Tried(0, 0, now_s))
        recorded_s = now_s - self._lately[0] if self._lately else 0.0
        limit_per_s = SLACK * len(self._lately) / max(1.0, recorded_s)
        crowded = len(self._together) >= max(FEW, limit_per_s)
        # A pod that is retried within TOGETHER_S was not delayed by the backoff
        # (SchedulerPopFromBackoffQ). So an Error would not delay it either, and would only hide
        # from autoscalers that the pod is unschedulable.
        backs_off = now_s > tried.last_s + TOGETHER_S
        errors_limit = 1 + crc32(f"{uid} {tried.rejected}".encode()) % MOST_IN_A_ROW
        may_get_error = tried.rejected >= REJECTED_OFTEN and tried.spread_retries < errors_limit
        if crowded and backs_off and may_get_error:
            self._tried[uid] = _Tried(tried.rejected, tried.spread_retries + 1, now_s)
            return False
        self._tried[uid] = _Tried(tried.rejected + 1, 0, now_s)
        self._lately.append(now_s)
        self._together.append(now_s)
        return True
