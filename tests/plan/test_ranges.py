"""Tests the ranges of a plan: randomly drawn histories, and the interval of their figures."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headroom.planner.demand import demand
from headroom.planner.intervals import (
    Reach,
    interval,
    need_interval,
    part_interval,
    saving_interval,
    wider,
)
from headroom.planner.resampling import quiet_days, resampled
from headroom.planner.rhythm import (
    CHANCE_REACH,
    DAYS_REACH,
    LEAST_REACH,
    LONG_REACH,
    SHORT_REACH,
    Variation,
    follows_the_week,
    variation,
)
from headroom.planner.workload import DAY_S, History, Life, Machine, Vram

COUNTS = [60, 50, 70, 55, 65, 10, 5] * 2


def history() -> History:
    """Return pods at 9:00 of each day, which run for 100 s on even days and for 200 s on odd
    days.
    """
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


def test_seed_0_is_the_recorded_history() -> None:
    assert resampled(history(), 0) == history().lives
    one_day = replace(history(), lives=history().lives[:5])
    assert resampled(one_day, 3) == one_day.lives


def test_drawn_days_keep_the_kind_of_day_the_hour_and_the_runs() -> None:
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


def test_the_number_of_pods_varies_like_independent_arrivals() -> None:
    totals = [len(resampled(history(), seed)) for seed in range(1, 61)]
    # The number of 631 independent pods has a standard deviation of 25. Drawing ten busy days adds
    # a standard deviation of 22.
    assert statistics.mean(totals) == pytest.approx(sum(COUNTS), rel=0.03)
    assert 27 < statistics.stdev(totals) < 42


def test_quiet_days_have_less_than_half_of_the_median() -> None:
    assert quiet_days(COUNTS[:7]) == [False] * 5 + [True] * 2
    assert quiet_days([3, 3, 3]) == [False] * 3
    assert quiet_days([5]) == [False]


def test_the_interval_covers_another_history() -> None:
    low, high = interval([10, 12, 11, 13])
    assert (low, high) == (pytest.approx(7.204, abs=1e-3), pytest.approx(15.796, abs=1e-3))
    assert interval([36] * 5) == (36, 36)
    assert interval([9, 4, 7]) == (4, 9)  # Too few for an interval.
    assert interval([5]) == (5, 5)
    wide = interval([float(n % 2) for n in range(100)])
    assert wide[1] == pytest.approx(0.5 + 1.645 * 0.50252 * math.sqrt(2), abs=1e-3)


def test_pods_that_ran_before_the_history_stay_in_each_drawn_history() -> None:
    standing = [Life(f"old-{n}", "w", 0.0, 5 * DAY_S, 1, None) for n in range(20)]
    given = replace(history(), lives=(*standing, *history().lives[1:]))
    for seed in range(1, 9):
        found = [life for life in resampled(given, seed) if life.created_s == 0.0]
        assert sorted(life.name for life in found) == sorted(life.name for life in standing)


def test_the_range_of_a_need_extends_to_both_sides() -> None:
    # The centre is (100 + 96) / 2. Growth adds 4 % to the upper end.
    low, high = need_interval([100, 90, 98], Reach(0.1, 0.2))
    assert (low, high) == pytest.approx((98 / 1.105171, 101.92 * 1.221403))
    # Needs are whole nodes of 4 GPUs.
    assert need_interval([100], Reach(0.1, 0.1), 4) == (88, 116)
    # Without a range, this is the need of the recorded history.
    assert need_interval([4, 7, 5, 6], None) == (4, 4)


def test_the_range_of_a_saving_is_the_range_of_differences() -> None:
    # The centre is (24 + 20) / 2. Savings vary 1.2 times as much as needs.
    low, high = saving_interval([24, 16], Reach(0.1, 0.2))
    assert (low, high) == pytest.approx((22 * math.exp(-0.12), 22.88 * math.exp(0.24)))
    # The ends of the range of a loss are also in ascending order.
    assert saving_interval([-24, -16], Reach(0.1, 0.2)) == pytest.approx((-high, -low))
    # The centre is 0.45. Half of the range is 0.35 times the upper reach.
    low, high = part_interval([0.5, 0.3], Reach(0.1, 0.2))
    assert (low, high) == (pytest.approx(0.45 - 0.07), pytest.approx(0.45 + 0.07))
    # A node of 5 % of the unshared need is added.
    low, high = part_interval([0.5, 0.3], Reach(0.1, 0.2), 0.05)
    assert high - low == pytest.approx(2 * math.hypot(0.07, 0.05))
    assert saving_interval([4, 7], None) == (4, 4)  # no range
    assert part_interval([0.4, 0.7], None) == (0.4, 0.4)
    assert wider(Reach(0.1, 0.4), Reach(0.2, 0.3)) == Reach(0.2, 0.4)
    assert wider(Reach(0.1, 0.4), None) is wider(None, Reach(0.1, 0.4)) is None


def test_the_demand_counts_concurrent_pods() -> None:
    lives = [Life(str(at), "w", at, 100.0, 1, None, 4 << 30) for at in (0.0, 50.0, 100.0)]
    peaks = Vram("peaks")
    # At 100 s, the first pod ends before the third starts.
    assert demand(lives, 1, peaks, 16 << 30) == (2.0, 1.5)
    assert demand(lives, 8, peaks, 16 << 30) == (0.5, 0.375)
    assert demand(lives, 2, peaks, 16 << 30) == (1.0, 0.75)  # A replica is half of a GPU.


def weeks(name: str, by_day: Sequence[int], hours: float = 4.0) -> list[Life]:
    """Return pods of a workload that creates this number of pods at 9:00 on each day."""
    return [
        Life(f"{name}{day}-{n}", name, day * DAY_S + 9 * 3600, hours * 3600.0, 1, None)
        for day, pods in enumerate(by_day)
        for n in range(pods)
    ]


def variation_of_weeks(*workloads: list[Life]) -> Variation:
    lives = sorted((life for some in workloads for life in some), key=lambda life: life.created_s)
    given = History((Machine("a", "L4", 1, 1 << 34),), tuple(lives), ())
    return variation(given, [1.0] * len(lives))


def test_a_history_too_small_for_a_range_reports_that() -> None:
    short = variation_of_weeks(weeks("web", [20] * 5))
    assert short.reach is None
    assert short.missing.endswith("the history has 5 days and 100 such pods.")
    few = variation_of_weeks(weeks("web", [3] * 8))
    assert few.missing.endswith("the history has 8 days and 24 such pods.")
    assert variation_of_weeks(weeks("web", [6] * 8)).reach is not None


def running(name: str, pods: int, first: float, last: float) -> list[Life]:
    """Return pods that run from one time to another, in days."""
    run_s = (last - first) * DAY_S
    return [Life(f"{name}{n}", name, first * DAY_S, run_s, 1, None) for n in range(pods)]


def half_of(short: float, chance: float, differ: float = 0.0) -> object:
    common = (SHORT_REACH + DAYS_REACH * differ) * short
    return pytest.approx(math.hypot(LEAST_REACH, common, CHANCE_REACH * chance))


def test_the_reach_follows_from_pods_that_begin_or_end_in_the_history() -> None:
    # 60 GPUs are always in use, and 40 short pods use one GPU in turn for 7.2 of 8 days.
    stay = running("web", 60, 0, 8)
    short = [life for n in range(40) for life in running("job", 1, n / 5 + 0.01, n / 5 + 0.19)]
    half = half_of(7.2 / 487.2, math.sqrt(7.2 / 8) / 61)
    assert variation_of_weeks(stay, short) == Variation(Reach(half, half))
    # Pods that start before the history or end after it differ by chance.
    long = running("old", 10, 0, 3.9) + running("new", 10, 4, 8)
    # Pods that are created together count as one pod of their size: 4 days with the square of 10.
    half = half_of(7.2 / 566.2, math.sqrt((7.2 + 39 + 400) / 8) / 71)
    assert variation_of_weeks(stay, short, long) == Variation(Reach(half, half))


def test_the_reach_of_short_pods_depends_on_the_differences_between_the_largest_days() -> None:
    # Each pod runs for 1/6 of a day. The two smallest days of a week do not count.
    pods = [20, 16, 16, 15, 18, 4, 3]
    squares = sum(each**2 for each in pods) / 6
    chance = math.sqrt(squares / (6 + 13 / 24)) / 20  # The last pods end at 13:00.
    differ = statistics.stdev(pods[:5]) / statistics.mean(pods[:5])
    half = half_of(1 - 3 / sum(pods), chance, differ)
    assert variation_of_weeks(weeks("web", pods)) == Variation(Reach(half, half))


def test_two_weeks_have_a_narrower_range_than_one_week() -> None:
    chance = math.sqrt(14 * 7**2 / 6 / (13 + 13 / 24)) / 7
    half = half_of(LONG_REACH * 13 / 14, chance)
    assert variation_of_weeks(weeks("web", [7] * 14)) == Variation(Reach(half, half))


def test_pods_after_the_last_whole_day_count() -> None:
    # The history covers eight days from 9:00 of the first day, so its last pods run on the ninth.
    half = half_of(8 / 8.9, math.sqrt(6 * 8.9 / 8.35) / 6)
    found = variation_of_weeks(weeks("web", [6] * 8), running("last", 6, 8.2, 8.35))
    assert found == Variation(Reach(half, half))


def test_a_few_large_pods_have_a_wider_range_than_many_small_pods() -> None:
    def reach(pods: int, gpus: int) -> Reach:
        stay, jobs = running("web", 40, 0, 8), weeks("job", [6] * 8)
        new = [life for n in range(pods) for life in running("new", 1, 3 + n / 100, 8)]
        long = running("old", pods, 0, 5) + new
        lives = sorted((*stay, *jobs, *long), key=lambda life: life.created_s)
        given = History((Machine("a", "L4", 4, 1 << 34),), tuple(lives), ())
        taken = [float(gpus if life.workload in ("old", "new") else 1) for life in lives]
        found = variation(given, taken).reach
        assert found
        return found

    assert reach(4, 4).up > 1.3 * reach(16, 1).up


def test_pods_that_a_workload_creates_together_have_a_wider_range_than_independent_pods() -> None:
    # Twelve pods a day are created in batches of this size.
    def reach(batch: int, workloads: int = 1) -> float:
        jobs = [
            Life(f"{day}-{n}", f"w{n % workloads}", 0.0, DAY_S / 6, 1, None)
            for day in range(8)
            for n in range(12)
        ]
        lives = [
            replace(job, created_s=(n // 12 + n % 12 // batch / 100) * DAY_S + 60.0)
            for n, job in enumerate(jobs)
        ]
        found = variation_of_weeks(lives).reach
        assert found
        return found.up

    assert reach(4) > 1.2 * reach(1)
    # Four workloads that create a pod at the same time are independent.
    assert reach(4, workloads=4) == pytest.approx(reach(1), rel=0.02)


def test_the_swing_is_the_largest_day_minus_the_median_day() -> None:
    assert variation_of_weeks(weeks("web", [20, 16, 16, 13, 18, 4, 3])).reach is not None
    assert variation_of_weeks(weeks("web", [20, 12, 12, 12, 18, 4, 3])).reach is None
    # One workload varies more than all together.
    one = weeks("a", [18, 6, 6, 6, 6, 6, 6]), weeks("b", [2, 14, 14, 14, 14, 14, 14])
    assert "a used up to 90 %" in variation_of_weeks(*one).missing
    # All workloads together vary more than each of them.
    each = [weeks(name, [10, 6, 6, 6, 6, 6, 6]) for name in "abc"]
    assert "the whole cluster used up to 100 %" in variation_of_weeks(*each).missing


def test_a_history_with_too_different_days_has_no_range() -> None:
    slow, fast = [6, 7, 8, 8, 9, 10, 10], [2, 3, 4, 5, 6, 8, 10]
    stay = running("stay", 3, 0, 8)
    assert variation_of_weeks(weeks("a", slow), weeks("b", slow), stay).reach is not None
    found = variation_of_weeks(weeks("a", fast), weeks("b", fast))
    assert found.reach is None
    assert (
        "days differ too much: the whole cluster used up to 100 % of all GPUs in use on its "
        "largest day, and 50 % on its median day"
    ) in found.missing


def test_two_weeks_of_few_pods_may_vary_as_much_as_by_chance() -> None:
    few = [9, 6, 5, 5, 6, 1, 1]
    assert variation_of_weeks(weeks("web", few)).reach is None
    assert variation_of_weeks(weeks("web", few * 2)).reach is not None
    # Chance explains less of the variation of many pods.
    many = [10 * each for each in few]
    assert variation_of_weeks(weeks("web", many * 2)).reach is None


def test_a_history_dominated_by_a_campaign_has_no_range_and_a_small_campaign_widens_it() -> None:
    steady = [*weeks("web", [10] * 8), *running("stay", 10, 0, 8)]
    found = variation_of_weeks(steady, weeks("sweep", [0, 0, 15, 0, 0, 0, 0, 0]))
    assert found.reach is None
    assert (
        "sweep used up to 43 % of all GPUs in use on its largest day, and 0 % on its median day"
        in found.missing
    )
    small = variation_of_weeks(steady, weeks("sweep", [0, 0, 5, 0, 0, 0, 0, 0])).reach
    assert small
    assert small.up == pytest.approx(math.hypot(small.down, math.log(1.6)))
    # Four pods are too few for a campaign, and a workload that runs on most days is none.
    for by_day in ([0, 0, 4, 0, 0, 0, 0, 0], [5, 2, 2, 2, 2, 2, 2, 2]):
        found = variation_of_weeks(steady, weeks("sweep", by_day))
        assert found.reach is not None
        assert found.reach.down == found.reach.up


def test_a_pod_that_runs_for_several_days_counts_on_each() -> None:
    others = running("stay", 4, 0, 9) + weeks("web", [6] * 8)
    long = weeks("train", [6, 0, 0, 0, 0, 0, 0, 0], hours=24 * 6)
    assert variation_of_weeks(long, others).reach is not None
    once = weeks("train", [6, 0, 0, 0, 0, 0, 0, 0])
    assert "train used" in variation_of_weeks(once, others).missing


def test_short_pods_that_do_not_follow_the_week_have_no_range() -> None:
    def of(by_day: list[int], *more: list[Life]) -> Variation:
        # One pod runs to the end, so all others end before it.
        last = running("last", 1, len(by_day) - 0.4, len(by_day))
        return variation_of_weeks(weeks("web", by_day), last, *more)

    # The last days before a date, for example a deadline. No earlier week shows them.
    before = [10, 10, 11, 10, 12, 11, 13]
    found = of(before)
    assert found.reach is None
    assert (
        "100 % of the GPU time is used by pods that begin and end within these 7 days, or run for "
        "less than a day within them, and no two days of the week are clearly quieter than the "
        "others"
    ) in found.missing
    assert found.missing.endswith("which a history of 28 days would show.")
    assert of(before * 3).reach is None
    assert of(before * 4).reach is not None
    # Pods that run all the time do not follow dates.
    assert of(before, running("stay", 1, 0, 8)).reach is not None
    # At both ends, the history cuts pods of a night. They are as short as the other pods.
    nights = running("first", 3, 0, 0.4), running("night", 3, 6.4, 7)
    assert of(before, *nights).reach is None
    assert of(before, running("old", 4, 0, 1.1)).reach is not None
    # Two quiet days that are far apart are no weekend. The last day and the first one can be.
    assert of([10, 11, 10, 5, 11, 10, 5]).reach is None
    assert of([5, 10, 11, 10, 11, 10, 5]).reach is not None


def test_all_configurations_agree_whether_a_load_follows_the_week() -> None:
    lives = [*weeks("web", [10, 11, 10, 11, 10, 5, 5]), *running("last", 1, 6.6, 7)]
    given = History((Machine("a", "L4", 1, 1 << 34),), tuple(lives), ())
    # In this configuration, pods of the quiet days need more.
    taken = [0.5 if 5 <= life.created_s // DAY_S <= 6 else 0.25 for life in lives]
    assert variation(given, taken).reach is not None


@pytest.mark.parametrize(
    ("work", "follows"),
    [
        ([10, 10, 10, 10, 10, 10, 10], True),
        ([10, 10, 10.9, 10, 10, 10, 10], True),
        ([10, 10, 11.1, 10, 10, 10, 10], False),
        ([10, 11, 10, 11, 10, 7.9, 7.9], True),
        ([10, 11, 10, 11, 10, 8.1, 8.1], False),
        # The other days differ so much that these two may be lower by chance.
        ([10, 16, 11, 15, 10, 7.9, 7.9], False),
        # If the same days are quiet in two weeks, a smaller difference is enough.
        ([10, 14, 11, 14, 10, 6, 6], False),
        ([10, 14, 11, 14, 10, 6, 6] * 2, True),
        # Two weeks: the same days of the week count together.
        ([10, 16, 11, 15, 10, 7, 7, 13, 10, 15, 11, 16, 7, 7], True),
    ],
)
def test_days_follow_the_week_if_they_are_equal_or_two_are_clearly_quieter(
    work: list[float], follows: bool
) -> None:
    assert follows_the_week(np.array(work)) is follows


def test_a_history_whose_pods_use_no_gpu_in_a_configuration_has_a_range() -> None:
    lives = tuple(weeks("web", [6] * 8))
    given = History((Machine("a", "L4", 1, 1 << 34),), lives, ())
    assert variation(given, [0.0] * len(lives)) == Variation(Reach(LEAST_REACH, LEAST_REACH))
