"""Draws histories like a given one, to show how far the next one may differ from it.

Busy and quiet days (working days and weekends) are kept apart: a day is quiet if it has less than
half the pods of the median day. Each day of a drawn history takes its pods from a day of its own
kind. The number of pods varies as much as between the days of a kind, at least as independent
arrivals do.
"""

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import replace

from extender.plan.lives import DAY_S, History, Life


def resampled(history: History, seed: int) -> Sequence[Life]:
    """Return the lives of a history of as many days.

    Seed 0 returns the lives as they were. A drawn pod keeps its time of day, its life and its
    request; its day is another one.
    """
    if not seed:
        return history.lives
    by_day: list[list[Life]] = [[] for _ in range(history.days)]
    for life in history.lives:
        by_day[int(life.created_s // DAY_S)].append(life)
    quiet = quiet_days([len(day) for day in by_day])
    alike = {
        kind: [day for day, is_quiet in enumerate(quiet) if is_quiet is kind]
        for kind in (False, True)
    }
    spread = {kind: spread_of([len(by_day[day]) for day in days]) for kind, days in alike.items()}
    lots = random.Random(seed)
    found: list[Life] = []
    for day, kind in enumerate(quiet):
        drawn = lots.choice(alike[kind])
        usual = statistics.mean(len(by_day[other]) for other in alike[kind])
        count = _poisson(usual * lots.lognormvariate(0.0, spread[kind]), lots)
        shift_s = (day - drawn) * DAY_S
        if by_day[drawn]:
            found += [
                replace(life, created_s=life.created_s + shift_s)
                for life in lots.choices(by_day[drawn], k=count)
            ]
    return sorted(found, key=lambda life: life.created_s) or history.lives


def quiet_days(counts: Sequence[int]) -> list[bool]:
    """Return for each day whether it has less than half the pods of the median day."""
    median = statistics.median(counts)
    return [2 * count < median for count in counts]


def spread_of(counts: Sequence[int]) -> float:
    """Return by how much days of a kind differ beyond chance: the standard deviation of the
    logarithm of their number of pods, without the part of independent arrivals."""
    logs = [math.log(count) for count in counts if count]
    if len(logs) < 2:
        return 0.0
    by_chance = statistics.mean(1 / count for count in counts if count)
    return math.sqrt(max(0.0, statistics.variance(logs) - by_chance))


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
