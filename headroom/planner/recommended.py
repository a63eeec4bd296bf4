"""Computes the request that Headroom would have recommended for each pod when it was created.

The recommender itself (``core.recommend``) is given the lives that had ended before, and the lives
that had run for a day. A history has one peak for each pod, but neither programs nor exit statuses.
So all pods of a workload count as the same program, and all as successful.
"""

import heapq
from dataclasses import dataclass, field, replace
from itertools import takewhile

from headroom.core.recommend.estimate import rounded
from headroom.core.recommend.lives import MATURE_S, Ending
from headroom.core.recommend.lives import Life as Recorded
from headroom.core.recommend.profile import ContainerProfile
from headroom.planner.workload import History, Life


@dataclass(slots=True)
class _Workload:
    profile: ContainerProfile = field(default_factory=ContainerProfile)
    #: Running pods, by their position in the history.
    running: dict[int, Life] = field(default_factory=dict)


def with_recommendations(history: History) -> History:
    """Return the history with ``recommended_bytes`` set for all pods that would have had a
    recommendation."""
    workloads: dict[str, _Workload] = {}
    #: End times of pods, and the positions of the pods in the history.
    ends: list[tuple[float, int]] = []
    found: list[Life] = []
    for index, life in enumerate(history.lives):
        while ends and ends[0][0] <= life.created_s:
            _end(workloads, history.lives[ends[0][1]], heapq.heappop(ends)[1])
        workload = workloads.setdefault(life.workload, _Workload())
        recommended_bytes = _recommended(workload, life.created_s)
        found.append(replace(life, recommended_bytes=recommended_bytes))
        if life.peak_bytes is not None:
            workload.running[index] = life
            heapq.heappush(ends, (life.created_s + life.run_s, index))
    return replace(history, lives=tuple(found))


def _end(workloads: dict[str, _Workload], life: Life, index: int) -> None:
    workload = workloads[life.workload]
    del workload.running[index]
    ended_s = life.created_s + life.run_s
    workload.profile.record("", _recorded(life, ended_s, Ending.COMPLETED))


def _recommended(workload: _Workload, now_s: float) -> int | None:
    # The running pods are in the order of their creation.
    mature = takewhile(lambda life: now_s - life.created_s >= MATURE_S, workload.running.values())
    workload.profile.replace_running(("", _recorded(life, now_s, None)) for life in mature)
    request_bytes = workload.profile.recommendation("", now_s).request_bytes
    return None if request_bytes is None else rounded(request_bytes)


def _recorded(life: Life, until_s: float, ending: Ending | None) -> Recorded:
    return Recorded(life.peak_bytes or 0, life.created_s, until_s, ending)
