"""Finds how much the days of a history differ, those of each workload and those of all together.

The next week may be without its busiest day, or have a busier one. If all days were alike, the
largest of the next 7 to 14 days would be below the fourth-largest of as many given ones in about 1
of 25 cases. So the difference between the largest and the fourth-largest day is a part of the width
of ranges. A *campaign* is a workload that hardly runs on most days, and then with several pods at
once: its next size does not follow from its last one.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from extender.plan.workload import DAY_S, History

#: Rank of the day with which the largest is compared.
_LOW_DAY = 4
#: On the middle day, a campaign has at most this part of its largest demand.
_RARE = 0.25
#: Pods that a campaign has at once, at least.
_CAMPAIGN_PODS = 5


@dataclass(frozen=True, slots=True)
class Rhythm:
    """Differences between days, as parts of the largest demand."""

    #: The most by which the largest day exceeds the fourth-largest, of a workload or of all pods.
    swing_ratio: float = 0.0
    #: The largest demand of a campaign, and its workload; 0 without campaigns.
    campaign_ratio: float = 0.0
    campaign: str = ""


def rhythm(history: History, gpus: Sequence[float], largest: float) -> Rhythm:
    """Return the rhythm of a history whose pods take these GPUs.

    ``largest``: the most GPUs that all pods take at once.
    """
    names = sorted({life.workload for life in history.lives})
    code_of = {name: code for code, name in enumerate(names)}
    codes = np.array([code_of[life.workload] for life in history.lives])
    created_s = np.array([life.created_s for life in history.lives])
    ended_s = created_s + np.array([life.run_s for life in history.lives])
    taken = np.array(gpus)
    demand = _daily(codes, created_s, ended_s, taken, history.days, len(names))
    every = _daily(np.zeros_like(codes), created_s, ended_s, taken, history.days, 1)
    pods = _daily(codes, created_s, ended_s, np.ones(len(codes)), history.days, len(names))
    if largest <= 0:
        return Rhythm()
    top = demand.max(axis=1)
    swings = [top - _nth(demand, _LOW_DAY), every.max(axis=1) - _nth(every, _LOW_DAY)]
    swing_ratio = float(np.concatenate(swings).max()) / largest
    is_rare = _nth(demand, history.days // 2 + 1) <= _RARE * top
    is_campaign = is_rare & (pods.max(axis=1) >= _CAMPAIGN_PODS)
    campaign = int(np.argmax(np.where(is_campaign, top, -1.0)))
    if not is_campaign[campaign]:
        return Rhythm(swing_ratio)
    return Rhythm(swing_ratio, float(top[campaign]) / largest, names[campaign])


def _nth(demand: NDArray[np.float64], rank: int) -> NDArray[np.float64]:
    """Return the demand of the day with this rank: 1 is the largest, and the last the smallest."""
    found: NDArray[np.float64] = -np.sort(-demand, axis=1)[:, min(rank, demand.shape[1]) - 1]
    return found


def _daily(
    codes: NDArray[np.int64],
    created_s: NDArray[np.float64],
    ended_s: NDArray[np.float64],
    weights: NDArray[np.float64],
    days: int,
    workloads: int,
) -> NDArray[np.float64]:
    """Return the largest sum of the weights at once, by workload and day."""
    first = np.clip(created_s // DAY_S, 0, days - 1).astype(np.int64)
    last = np.clip(ended_s // DAY_S, first, days - 1).astype(np.int64)
    # One row for each day on which a pod runs, with its time of that day.
    counts = last - first + 1
    pod = np.repeat(np.arange(len(codes)), counts)
    day = first[pod] + np.arange(len(pod)) - np.repeat(np.cumsum(counts) - counts, counts)
    begin_s = np.maximum(created_s[pod], day * DAY_S)
    end_s = np.maximum(begin_s, np.minimum(ended_s[pod], (day + 1) * DAY_S))
    group = codes[pod] * days + day
    groups = np.concatenate([group, group])
    times = np.concatenate([begin_s, end_s])
    changes = np.concatenate([weights[pod], -weights[pod]])
    order = np.lexsort((changes, times, groups))
    # The changes of each group add up to 0, so the sum begins at 0 in each group.
    running, groups = np.cumsum(changes[order]), groups[order]
    starts = np.flatnonzero(np.diff(groups, prepend=-1))
    found = np.zeros(workloads * days)
    found[groups[starts]] = np.maximum.reduceat(running, starts)
    return found.reshape(workloads, days)
