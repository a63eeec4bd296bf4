"""Ranges of a plan: drawn histories, and the interval of their figures."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import pytest

from extender.plan.demand import Demands, demand, demands_of
from extender.plan.intervals import (
    interval,
    need_half,
    need_interval,
    part_interval,
    saving_interval,
    spread_ratio,
)
from extender.plan.resampling import quiet_days, resampled
from extender.plan.rhythm import Rhythm, rhythm
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
    # The centre is (100 + 96) / 2, plus 4 % of growth; the ends are factors of e^0.1.
    low, high = need_interval([100, 90, 98], need_half([5.0, 5.0], 0.0))
    assert (low, high) == (pytest.approx(101.92 / 1.105171), pytest.approx(101.92 * 1.105171))
    # A spread of 10 % and a swing of 20 %: the root of 0.14² + 0.10² + 0.20².
    assert need_half([0.9, 1.0, 1.1], 0.2) == pytest.approx(0.263818)
    # Needs are whole nodes, here of 4 GPUs.
    assert need_interval([100], 0.1, 4) == (92, 116)
    # Without a range, the need of the history as it was.
    assert need_interval([4, 7, 5, 6], None) == (4, 4)


def test_the_range_of_a_saving_is_that_of_differences() -> None:
    # Drawn savings: mean 20, standard deviation 2, so a spread of 10 %.
    low, high = saving_interval([24, 16], [18, 20, 22])
    # The centre is (24 + 20) / 2 plus 8 %; half of the range is the root of 0.2² + 0.15², 25 %.
    assert (low, high) == (pytest.approx(23.76 * 0.75), pytest.approx(23.76 * 1.25))
    low, high = part_interval([0.5, 0.3], [0.38, 0.40, 0.42])
    # The centre is 0.45; half of the range is the root of 0.06² + 0.045².
    assert (low, high) == (pytest.approx(0.45 - 0.075), pytest.approx(0.45 + 0.075))
    # A node of 5 % of the unshared need adds to it.
    low, high = part_interval([0.5, 0.3], [0.38, 0.40, 0.42], 0.05)
    assert high - low == pytest.approx(2 * math.hypot(0.075, 0.05))
    assert saving_interval([4, 7], ()) == (4, 4)  # no range
    assert part_interval([0.4, 0.7], ()) == (0.4, 0.4)


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
    found = demands_of(given, [1.0] * 1400, [False] * 1400)
    assert spread_ratio(found.drawn) == pytest.approx(0.048, abs=0.012)
    assert (found.swing_ratio, found.missing) == (0.0, "")
    assert spread_ratio(()) == 0.0


def weeks(name: str, by_day: Sequence[int], hours: float = 4.0) -> list[Life]:
    """Return pods of a workload: so many at once on each day, at 9:00."""
    return [
        Life(f"{name}{day}-{n}", name, day * DAY_S + 9 * 3600, hours * 3600.0, 1, None)
        for day, pods in enumerate(by_day)
        for n in range(pods)
    ]


def demands_of_weeks(*workloads: list[Life]) -> Demands:
    lives = sorted((life for some in workloads for life in some), key=lambda life: life.created_s)
    given = History((Machine("a", "L4", 1, 1 << 34),), tuple(lives), ())
    return demands_of(given, [1.0] * len(lives), [False] * len(lives))


def test_a_history_that_is_too_small_for_a_range_says_so() -> None:
    short = demands_of_weeks(weeks("web", [20] * 5))
    assert (short.drawn, short.half_ratio) == ((), None)
    assert short.missing.endswith("the history has 5 days and 100 such pods.")
    few = demands_of_weeks(weeks("web", [3] * 8))
    assert few.missing.endswith("the history has 8 days and 24 such pods.")
    assert demands_of_weeks(weeks("web", [6] * 8)).half_ratio is not None


def test_a_history_that_a_campaign_dominates_has_no_range() -> None:
    steady = weeks("web", [20] * 8)
    found = demands_of_weeks(steady, weeks("sweep", [0, 0, 15, 0, 0, 0, 0, 0]))
    assert found.half_ratio is None
    assert (
        "sweep needs up to 43 % of all GPUs in use, and hardly runs on most days" in found.missing
    )
    # A small one, one of few pods, and one on most days have ranges, which it widens.
    for by_day in ([0, 0, 7, 0, 0, 0, 0, 0], [15, 15, 0, 15, 15, 0, 15, 15]):
        found = demands_of_weeks(steady, weeks("sweep", by_day))
        assert found.missing == ""
    wide, narrow = demands_of_weeks(steady, weeks("sweep", [0, 0, 7])), demands_of_weeks(steady)
    assert wide.half_ratio is not None
    assert narrow.half_ratio is not None
    assert wide.swing_ratio == pytest.approx(7 / 27)
    assert wide.half_ratio > 1.4 * narrow.half_ratio


def test_a_day_of_a_pod_that_runs_for_several_counts_on_each() -> None:
    long = weeks("train", [4, 0, 0, 0, 0, 0, 0, 0], hours=24 * 6)
    lives = [*long, *weeks("web", [6] * 8)]
    given = History((Machine("a", "L4", 1, 1 << 34),), tuple(lives), ())
    assert rhythm(given, [1.0] * len(lives), 10.0) == Rhythm()
    once = weeks("train", [6, 0, 0, 0, 0, 0, 0, 0])
    lives = [*once, *weeks("web", [6] * 8)]
    given = History((Machine("a", "L4", 1, 1 << 34),), tuple(lives), ())
    assert rhythm(given, [1.0] * len(lives), 12.0) == Rhythm(0.5, 0.5, "train")
