"""Draws the days of a history again, to show how much an answer depends on single days."""

import random
from collections.abc import Sequence
from dataclasses import replace

from extender.plan.lives import DAY_S, History, Life


def resampled(history: History, seed: int) -> Sequence[Life]:
    """Return the lives of a history of as many days, drawn with replacement from its days.

    Seed 0, and a history of a single day, return the lives as they were. A pod keeps its time of
    day, its life and its request.
    """
    days = history.days
    if not seed or days < 2:
        return history.lives
    by_day: list[list[Life]] = [[] for _ in range(days)]
    for life in history.lives:
        by_day[int(life.created_s // DAY_S)].append(life)
    lots = random.Random(seed)
    found: list[Life] = []
    for day in range(days):
        drawn = lots.randrange(days)
        shift_s = (day - drawn) * DAY_S
        found += [replace(life, created_s=life.created_s + shift_s) for life in by_day[drawn]]
    return found if found else history.lives
