"""Draws histories like a given one, to show how far the next one may differ from it.

Each day of a drawn history is one of the given days, drawn with replacement. Busy and quiet days
(working days and weekends) are kept apart: a day is quiet if it has less than half the pods of the
median day. The number of pods of a drawn day varies as that of independent arrivals: some of its
pods are left out, or repeated at another minute. So a drawn history can need more than any of the
given days.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

from extender.plan.lives import DAY_S, History, Life

#: A repeated pod arrives at most this much earlier or later.
_SHIFT_S = 3600.0


def resampled(history: History, seed: int) -> Sequence[Life]:
    """Return the lives of a history of as many days.

    Seed 0, and a history of a single day, return the lives as they were. A drawn pod keeps its time
    of day, its life and its request.
    """
    if not seed or history.days < 2:
        return history.lives
    by_day: list[list[Life]] = [[] for _ in range(history.days)]
    for life in history.lives:
        by_day[int(life.created_s // DAY_S)].append(life)
    quiet = quiet_days([len(day) for day in by_day])
    alike = {
        kind: [day for day, is_quiet in enumerate(quiet) if is_quiet is kind]
        for kind in (False, True)
    }
    lots = random.Random(seed)
    found: list[Life] = []
    for day, kind in enumerate(quiet):
        drawn = lots.choice(alike[kind])
        shift_s = (day - drawn) * DAY_S
        moved = [replace(life, created_s=life.created_s + shift_s) for life in by_day[drawn]]
        found += _varied(moved, day, lots)
    return sorted(found, key=lambda life: life.created_s) or history.lives


def _varied(lives: Sequence[Life], day: int, lots: random.Random) -> list[Life]:
    """Return another number of these pods of a day: some are left out, or repeated."""
    count = _poisson(len(lives), lots)
    if count <= len(lives):
        return lots.sample(lives, count)
    first_s, last_s = day * DAY_S, (day + 1) * DAY_S - 1
    repeated = []
    for life in lots.choices(lives, k=count - len(lives)):
        created_s = life.created_s + lots.uniform(-_SHIFT_S, _SHIFT_S)
        repeated.append(replace(life, created_s=min(max(created_s, first_s), last_s)))
    return [*lives, *repeated]


def _poisson(mean: float, lots: random.Random) -> int:
    """Return the number of independent arrivals: Knuth's method, in parts against underflow."""
    total = 0
    while mean > 0:
        part = min(mean, 50.0)
        mean -= part
        limit, product = math.exp(-part), lots.random()
        while product > limit:
            total += 1
            product *= lots.random()
    return total


def quiet_days(counts: Sequence[int]) -> list[bool]:
    """Return for each day whether it has less than half the pods of the median day."""
    median = statistics.median(counts)
    return [2 * count < median for count in counts]
