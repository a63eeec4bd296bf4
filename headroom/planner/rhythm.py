"""Estimates how far the need of a similar history can be from the need of the given history.

*Short* pods begin and end within the history. Many of them often have a common cause, such as the
traffic or the data of a day, so their number in the next history depends on how much days differ.
Long pods differ by chance, which matters more if they are few and each has many GPUs. Pods that a
workload creates in the same minute have one cause, so they count together as a *batch*. Pods that
run all the time do not differ.

The *swing* of a workload, or of all pods, is how far its largest day is above its median day. If
the swing is large, the load depends on something that one history does not show, such as a
deadline.
Then no range can be computed. A *campaign* is a workload that hardly runs on most days, but runs
several pods together when it does. The next campaign may be several times larger than the last one.

If almost all pods are short, a quiet week before a deadline looks like any other week. Then a range
needs a sign that the load follows the week: two days that are clearly quieter than the other days.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

from headroom.planner.intervals import Reach
from headroom.planner.wording import plural
from headroom.planner.workload import DAY_S, History

#: Histories with fewer days or fewer new pods have no ranges.
LEAST_DAYS, LEAST_PODS = 7, 40
#: There are no ranges above this swing, as a ratio of the largest demand. In long histories, the
#: limit also includes how much independent pods differ by chance, added as a square. A single week
#: does not show whether a load rises or differs by chance.
MOST_SWING, LONG_DAYS = 0.35, 14
#: The reach of short pods is smaller by this factor in a long history, because it shows more days.
LONG_REACH = 0.7
#: If short pods use at least this ratio of the GPU time, ranges need a load that follows the week,
#: unless the history has so many days that it shows most dates. Here, pods that the start or the
#: end of the history cuts are also short if less than a day of them is in it.
MOSTLY_SHORT, DATES_DAYS = 0.9, 28
#: A load follows the week if days are equal within the first factor, or if two days are quiet.
#: Each quiet day has at most the second ratio of the work of every other day. Their mean is
#: below the mean of the other days by the third value, in standard deviations. In several weeks, it
#: is divided by the square root of their number, because the same days are quiet in each of them.
EQUAL, QUIET, CLEARLY = 1.1, 0.8, 3.0
#: Minimum reach. Its square is added to the squares of the other reaches.
LEAST_REACH = 0.05
#: Reach if all GPU time belongs to short pods: a constant part, and a factor for the standard
#: deviation of the largest days.
SHORT_REACH, DAYS_REACH = 0.15, 1.5
#: Pods that a workload creates within this time are a batch, because controllers create the pods of
#: a Job within seconds.
BATCH_S = 60.0
_WEEK = 7
#: Ratio of the days that count as the largest days. It leaves out weekends, which differ.
_WORKING = 5 / 7
#: Number of standard deviations by which the number of GPUs in use can differ by chance.
CHANCE_REACH = 1.65
#: On the median day, a campaign has at most this ratio of its largest demand.
_RARE = 0.25
#: Minimum number of pods that a campaign runs together.
_CAMPAIGN_PODS = 5
#: The next campaign may need more than the last by this multiple of it. If sizes have a Pareto tail
#: with an exponent of 1.6, the next largest is four times as large in 1 of 10 cases.
_CAMPAIGN_GROWTH = 3.0


@dataclass(frozen=True, slots=True)
class Variation:
    """How much the needs of histories similar to a given one vary."""

    #: The reach of the ranges, or None if no range can be computed.
    reach: Reach | None = None
    #: Why no range can be computed, as a sentence. Empty if there is a range.
    missing: str = ""


def variation(history: History, gpus: Sequence[float]) -> Variation:
    """Return how much the needs of similar histories vary. ``gpus`` are the GPUs that each pod of
    this history takes."""
    created_s = np.array([life.created_s for life in history.lives])
    created = int(np.count_nonzero(created_s > 0))
    if history.days < LEAST_DAYS or created < LEAST_PODS:
        return Variation(
            missing=f"Figures have no ranges. Ranges need {LEAST_DAYS} days and {LEAST_PODS} pods "
            "that were created in that time, but the history has "
            f"{plural(history.days, 'day')} and {plural(created, 'such pod')}."
        )
    names = sorted({life.workload for life in history.lives})
    code_of = {name: code for code, name in enumerate(names)}
    codes = np.array([code_of[life.workload] for life in history.lives])
    ended_s = created_s + np.array([life.run_s for life in history.lives])
    taken = np.array(gpus)
    every = np.zeros_like(codes)

    def daily(weights: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return a row for each workload, and a row for all pods together."""
        rows = _daily(codes, created_s, ended_s, weights, history.days, len(names))
        return np.append(rows, _daily(every, created_s, ended_s, weights, history.days, 1), axis=0)

    demand = daily(taken)
    largest = float(demand[-1].max())
    if largest <= 0:
        return Variation(Reach(LEAST_REACH, LEAST_REACH))
    top, median = demand.max(axis=1), _median(demand)
    swing, limit = (top - median) / largest, np.full(len(top), MOST_SWING)
    if history.days >= LONG_DAYS:
        deviation = np.sqrt(daily(taken**2).max(axis=1)) / largest
        limit = np.hypot(limit, _chance(history.days) * deviation)
    if np.any(swing > limit):
        most = int(np.argmax(swing - limit))
        name = names[most] if most < len(names) else "the whole cluster"
        return Variation(
            missing=f"Figures have no ranges, because days differ too much: {name} used up to "
            f"{100 * top[most] / largest:.0f} % of all GPUs in use on its largest day, and "
            f"{100 * median[most] / largest:.0f} % on its median day. Another period may need far "
            "less, or several times more."
        )
    days = history.days
    # Count whole GPUs, so that all configurations agree whether the load follows the week.
    gpus_of = np.array([float(life.gpus) for life in history.lives])
    gpu_s, is_short = _gpu_time(created_s, ended_s, gpus_of, days)
    # Most pods that the history shows for less than a day were cut by its start or its end.
    is_short |= gpu_s < gpus_of * DAY_S
    share = float(gpu_s[is_short].sum() / gpu_s.sum())
    if days < DATES_DAYS and share >= MOSTLY_SHORT:
        run_s, ends_s = ended_s - created_s, np.arange(days + 1) * DAY_S
        until = [gpus_of @ np.clip(end_s - created_s, 0, run_s) for end_s in ends_s]
        if not follows_the_week(np.diff(until)):
            return Variation(
                missing=f"Figures have no ranges, because {100 * share:.0f} % of the GPU time is "
                f"used by pods that begin and end within these {days} days, or run for less than a "
                "day within them, and no two days of the week are clearly quieter than the others. "
                f"Such a load can follow dates, which a history of {DATES_DAYS} days would show."
            )
    half = _reach(codes, created_s, ended_s, taken, demand[-1])
    at_once = daily(np.ones(len(codes))).max(axis=1)
    campaign = (median <= _RARE * top) & (at_once >= _CAMPAIGN_PODS)
    grown = _CAMPAIGN_GROWTH * float(top[campaign].max(initial=0.0)) / largest
    return Variation(Reach(half, math.hypot(half, math.log1p(grown))))


def _gpu_time(
    created_s: NDArray[np.float64],
    ended_s: NDArray[np.float64],
    taken: NDArray[np.float64],
    days: int,
) -> tuple[NDArray[np.float64], NDArray[np.bool_]]:
    """Return the GPU time of each pod within the history, and whether it is a short pod."""
    end_s = _end(created_s, ended_s, days)
    gpu_s = taken * (np.minimum(ended_s, end_s) - created_s)
    return gpu_s, (created_s > 0) & (ended_s < end_s)


def _end(created_s: NDArray[np.float64], ended_s: NDArray[np.float64], days: int) -> float:
    # Days count from the first creation, which may be late on the first day.
    return min(float(ended_s.max()), float(created_s.min()) + days * DAY_S)


def follows_the_week(work: NDArray[np.float64]) -> bool:
    """Return whether all days have about the same work, or two successive days of the week have
    clearly less than the others. ``work`` has the work of each day, for at least a week."""
    if work.max() <= EQUAL * work.min():
        return True
    week = np.array([work[day::_WEEK].mean() for day in range(_WEEK)])
    clearly = CLEARLY / math.sqrt(len(work) // _WEEK)
    for day in range(_WEEK):
        quiet, others = np.split(np.roll(week, -day), [2])
        below = others.mean() - quiet.mean()
        if quiet.max() <= QUIET * others.min() and below > clearly * others.std(ddof=1):
            return True
    return False


def _reach(
    codes: NDArray[np.int64],
    created_s: NDArray[np.float64],
    ended_s: NDArray[np.float64],
    taken: NDArray[np.float64],
    by_day: NDArray[np.float64],
) -> float:
    """Return the reach of a need. ``by_day`` has the largest demand of each day."""
    end_s = _end(created_s, ended_s, len(by_day))
    gpu_s, is_short = _gpu_time(created_s, ended_s, taken, len(by_day))
    short = float(gpu_s[is_short].sum() / gpu_s.sum())
    largest = np.sort(by_day)[-round(_WORKING * len(by_day)) :]
    differ = float(largest.std(ddof=1) / largest.mean())
    # Batches are independent, so the number of them at a time has a Poisson distribution.
    some = (created_s > 0) | (ended_s < end_s)
    squares = _squares(codes[some], created_s[some], np.minimum(ended_s, end_s)[some], taken[some])
    variance = squares / end_s
    chance = math.sqrt(variance) / float(by_day.max())
    of_short = (SHORT_REACH + DAYS_REACH * differ) * short
    if len(by_day) >= LONG_DAYS:
        of_short *= LONG_REACH
    return math.hypot(LEAST_REACH, of_short, CHANCE_REACH * chance)


def _squares(
    codes: NDArray[np.int64],
    created_s: NDArray[np.float64],
    ended_s: NDArray[np.float64],
    taken: NDArray[np.float64],
) -> float:
    """Return the sum over all batches of the integral of the square of the GPUs in use.

    Pods that ran before the history began are not a batch.
    """
    alone = -1.0 - np.arange(len(codes))
    batch = np.where(created_s > 0, created_s // BATCH_S, alone)
    # While a pod runs, the pods of its batch that end later run too. In order of their ends, latest
    # first, each pod adds its own square, and twice its product with the pods before it.
    order = np.lexsort((-ended_s, batch, codes))
    gpus, run_s = taken[order], (ended_s - created_s)[order]
    new = (np.diff(codes[order], prepend=-1) != 0) | (np.diff(batch[order], prepend=0) != 0)
    first = np.flatnonzero(new)
    before = np.cumsum(gpus) - gpus
    before -= np.repeat(before[first], np.diff(first, append=len(order)))
    return float((run_s * gpus * (gpus + 2 * before)).sum())


def _chance(days: int) -> float:
    """Return how far the largest of ``days`` normal values is above their median, in standard
    deviations (Blom)."""
    return NormalDist().inv_cdf((days - 0.375) / (days + 0.25))


def _median(demand: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the demand of the median day. If there are two middle days, return the larger."""
    found: NDArray[np.float64] = np.sort(demand, axis=1)[:, demand.shape[1] // 2]
    return found


def _daily(
    codes: NDArray[np.int64],
    created_s: NDArray[np.float64],
    ended_s: NDArray[np.float64],
    weights: NDArray[np.float64],
    days: int,
    workloads: int,
) -> NDArray[np.float64]:
    """Return the largest sum of the weights at a time, by workload and day."""
    first = np.clip(created_s // DAY_S, 0, days - 1).astype(np.int64)
    last = np.clip(ended_s // DAY_S, first, days - 1).astype(np.int64)
    # Each day on which a pod runs gets one row, with the pod's times on that day.
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
