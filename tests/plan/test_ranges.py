"""Ranges of a plan: drawn histories, and the interval of their figures."""

import math
import statistics
from dataclasses import replace

import pytest

from extender.plan.demand import demand, drawn_demands
from extender.plan.intervals import (
    interval,
    need_interval,
    part_interval,
    saving_interval,
    spread_ratio,
)
from extender.plan.resampling import quiet_days, resampled
from extender.plan.workload import DAY_S, History, Life, Machine, Vram

COUNTS = [60, 50, 70, 55, 65, 10, 5] * 2


def history() -> History:
    """Pods at 9:00 of each day; a run of 100 s on even days, else of 200 s."""
    lives = [
        Life(f"d{day}-{n}", "w", day * DAY_S + 9 * 3600 + n, 100.0 + day % 2 * 100, 1, None)
        for day, count in enumerate(COUNTS)
        for n in range(count)
    ]
    lives = [Life("first", "w", 0.0, 100.0, 1, None), *lives]
    return History((Machine("a", "L4", 1, 1 << 34),), tuple(lives), ())


def counts(lives: list[Life]) -> list[int]:
    found = [0] * len(COUNTS)
    for life in lives:
        found[int(life.created_s // DAY_S)] += 1
    return found


def test_seed_0_is_the_history_as_it_was() -> None:
    assert resampled(history(), 0) == history().lives
    one_day = replace(history(), lives=history().lives[:5])
    assert resampled(one_day, 3) == one_day.lives


def test_drawn_days_keep_kind_hour_and_runs() -> None:
    drawn = list(resampled(history(), 7))
    assert drawn == list(resampled(history(), 7))
    assert drawn != list(resampled(history(), 8))
    assert drawn == sorted(drawn, key=lambda life: life.created_s)
    for day, count in enumerate(counts(drawn)):
        assert (count < 30) == (day % 7 >= 5), day
    names = {life.name: life for life in history().lives}
    for life in drawn:
        assert life.run_s == names[life.name].run_s
        # A repeated pod arrives up to an hour earlier or later.
        assert abs(life.created_s % DAY_S - names[life.name].created_s % DAY_S) <= 3600


def test_the_number_of_pods_varies_as_that_of_independent_arrivals() -> None:
    totals = [len(resampled(history(), seed)) for seed in range(1, 61)]
    # 631 pods: a standard deviation of 25 by chance, and of 22 because ten busy days are drawn.
    assert statistics.mean(totals) == pytest.approx(sum(COUNTS), rel=0.03)
    assert 27 < statistics.stdev(totals) < 42


def test_quiet_days_have_less_than_half_of_the_median() -> None:
    assert quiet_days(COUNTS[:7]) == [False] * 5 + [True] * 2
    assert quiet_days([3, 3, 3]) == [False] * 3
    assert quiet_days([5]) == [False]


def test_the_interval_is_that_of_another_history() -> None:
    low, high = interval([10, 12, 11, 13])
    assert (low, high) == (pytest.approx(7.204, abs=1e-3), pytest.approx(15.796, abs=1e-3))
    assert interval([36] * 5) == (36, 36)
    assert interval([9, 4, 7]) == (4, 9)  # too few for an interval
    assert interval([5]) == (5, 5)
    wide = interval([float(n % 2) for n in range(100)])
    assert wide[1] == pytest.approx(0.5 + 1.645 * 0.50252 * math.sqrt(2), abs=1e-3)


def test_pods_that_ran_before_the_history_stay_in_each_drawn_one() -> None:
    standing = [Life(f"old-{n}", "w", 0.0, 5 * DAY_S, 1, None) for n in range(20)]
    given = replace(history(), lives=(*standing, *history().lives[1:]))
    for seed in range(1, 9):
        found = [life for life in resampled(given, seed) if life.created_s == 0.0]
        assert sorted(life.name for life in found) == sorted(life.name for life in standing)


def test_the_range_of_a_need_is_wider_for_histories_that_vary() -> None:
    # The centre is (100 + 96) / 2, plus 4 % of growth; half of the range is 10 % of it.
    low, high = need_interval([100, 90, 98], 1e-9)
    assert (low, high) == (pytest.approx(101.92 * 0.9), pytest.approx(101.92 * 1.1))
    # With a spread of 10 %: the root of 0.10² + 0.14².
    low, high = need_interval([100], 0.1)
    assert (low, high) == (pytest.approx(104 * 0.827953), pytest.approx(104 * 1.172047))
    assert need_interval([4, 7], 0.0) == (4, 7)  # too short a history


def test_the_range_of_a_saving_is_that_of_differences() -> None:
    # Drawn savings: mean 20, standard deviation 2, so a spread of 10 %.
    low, high = saving_interval([24, 16], [18, 20, 22])
    # The centre is (24 + 20) / 2 plus 8 %; half of the range is the root of 0.2² + 0.15², 25 %.
    assert (low, high) == (pytest.approx(23.76 * 0.75), pytest.approx(23.76 * 1.25))
    low, high = part_interval([0.5, 0.3], [0.38, 0.40, 0.42])
    # The centre is 0.45; half of the range is the root of 0.06² + 0.045².
    assert (low, high) == (pytest.approx(0.45 - 0.075), pytest.approx(0.45 + 0.075))
    assert saving_interval([4, 7], ()) == (4, 7)  # too short a history
    assert part_interval([0.4, 0.7], ()) == (0.4, 0.7)


def test_the_demand_is_that_of_pods_that_run_at_once() -> None:
    lives = [Life(str(at), "w", at, 100.0, 1, None, 4 << 30) for at in (0.0, 50.0, 100.0)]
    peaks = Vram("peaks")
    # At 100 s the first ends before the third starts.
    assert demand(lives, 1, peaks, 16 << 30) == (2.0, 1.5)
    assert demand(lives, 8, peaks, 16 << 30) == (0.5, 0.375)
    assert demand(lives, 2, peaks, 16 << 30) == (1.0, 0.75)  # a replica is half of a GPU


def test_the_spread_is_that_of_the_busiest_day() -> None:
    lives = [
        Life(f"d{day}-{n}", "w", day * DAY_S + 1 + 9 * 3600, 4 * 3600.0, 1, None)
        for day in range(14)
        for n in range(100)
    ]
    given = History((Machine("a", "L4", 1, 1 << 34),), tuple(lives), ())
    # The largest of 14 numbers with mean 100 and standard deviation 10: 117, varying by 5.6.
    drawn = drawn_demands(given, [1.0] * 1400, [False] * 1400)
    assert spread_ratio(drawn) == pytest.approx(0.048, abs=0.012)
    short = replace(given, lives=tuple(lives[:500]))
    assert drawn_demands(short, [1.0] * 500, [False] * 500) == ()
    assert spread_ratio(()) == 0.0
