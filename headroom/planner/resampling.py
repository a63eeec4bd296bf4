"""Draws histories that are similar to a given one, to show how much the next one may differ.

Each day of a drawn history is one of the given days, drawn with replacement. Busy days are replaced
by busy days, and quiet days (such as weekends) by quiet days. A day is quiet if it has less than
half as many pods as the median day. The number of pods of a drawn day varies like independent
arrivals: some of its pods are left out, or repeated at another minute. So a drawn history can need
more than any of the given days. Pods that already ran at the start stay unchanged.
"""

import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from headroom.planner.workload import DAY_S, History, Life

#: Maximum time by which a repeated pod arrives earlier or later.
_SHIFT_S = 3600.0


def resampled(history: History, seed: int) -> Sequence[Life]:
    """Return the lives of a drawn history, in the order of their creation.

    With seed 0, and for a history of a single day, the lives are unchanged. A drawn pod keeps its
    run time, its request and its time of day. A repeated pod is moved by up to ``_SHIFT_S``.
    """
    if not seed or history.days < 2:
        return history.lives
    rng = np.random.default_rng(seed)
    created_s = np.array([life.created_s for life in history.lives])
    day_of = np.where(created_s > 0, created_s // DAY_S, -1).astype(np.int64)
    by_day = [np.flatnonzero(day_of == day) for day in range(history.days)]
    quiet = quiet_days([len(pods) for pods in by_day])
    found = [life for life in history.lives if life.created_s <= 0]
    for day, kind in enumerate(quiet):
        drawn = int(rng.choice([each for each in range(history.days) if quiet[each] is kind]))
        pods, moved_s = _varied(by_day[drawn], rng)
        first_s = day * DAY_S
        at_s = created_s[pods] + first_s - drawn * DAY_S + moved_s
        at_s = np.clip(at_s, first_s, first_s + DAY_S - 1)
        for index, created in zip(pods.tolist(), at_s.tolist(), strict=True):
            found.append(replace(history.lives[index], created_s=created))
    return sorted(found, key=lambda life: life.created_s) or history.lives


def _varied(
    pods: NDArray[np.int64], rng: np.random.Generator
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return a drawn selection of these pods, in which some are left out or repeated, and by how
    many seconds each is moved."""
    count = int(rng.poisson(len(pods)))
    if count <= len(pods):
        return rng.choice(pods, count, replace=False), np.zeros(count)
    more = count - len(pods)
    moved_s = np.concatenate([np.zeros(len(pods)), rng.uniform(-_SHIFT_S, _SHIFT_S, more)])
    return np.concatenate([pods, rng.choice(pods, more)]), moved_s


def quiet_days(counts: Sequence[int]) -> list[bool]:
    """Return for each day whether it has less than half as many pods as the median day."""
    median = statistics.median(counts)
    return [2 * count < median for count in counts]
