"""Tests the back-test of recommendations: its scores, its runs, and its goal on a few workloads."""

from dataclasses import replace

import pytest

from benchmarks.recommend import families, printed
from benchmarks.recommend.life import DAY, GIB, HOUR, Life, Workload
from benchmarks.recommend.replay import Score, fixed_quantile, headroom, in_order, score
from benchmarks.recommend.workloads import workload


def life(start_h: float, gib: float, hours: float = 1.0, ending: str = "completed") -> Life:
    start_s, end_s = start_h * HOUR, (start_h + hours) * HOUR
    use = ((start_s + 60, int(gib * GIB / 2)), (end_s, int(gib * GIB)))
    return Life(start_s, end_s, use, ending, "p")


def test_the_score_counts_bytes_once_per_run_and_limits_them_by_hindsight() -> None:
    lives = (life(0, 4), life(24, 4), life(48, 6), life(72, 9))
    played = Workload("w", "training", 24 * GIB, ((0.0, 8 * GIB),), lives)
    # The first run does not count. No request below 9 GiB would have been enough, so no memory
    # could have been saved.
    assert score([played], lambda _: [GIB, None, 5 * GIB, 5 * GIB], 1.0).total == Score(
        lives=3,
        recommended=2,
        missed=2,
        missed_fitting=1,
        over_author=1,
        reclaimable=0,
        found=0,
    )
    smaller = Workload("w", "training", 24 * GIB, ((0.0, 8 * GIB),), lives[:3])
    # Each run could have saved 2 GiB. The second run saves 1 GiB, and the third run saves 2 GiB.
    asked = [None, 7 * GIB, GIB]
    assert score([smaller], lambda _: asked, 1.0).total == Score(
        lives=2,
        recommended=2,
        missed=1,
        missed_fitting=1,
        over_author=0,
        reclaimable=4 * GIB,
        found=3 * GIB,
    )
    # Each of these runs lasts an hour.
    hours = score(
        [replace(smaller, lives=(*lives[:2], life(48, 6, 3)))], lambda _: asked, 1.0, True
    )
    assert (hours.total.lives, hours.total.missed, hours.total.found) == (4, 3, 7 * GIB)


def test_a_rule_sees_only_what_happened_before_a_run_starts() -> None:
    lives = (life(0, 4, 10), life(1, 5), life(3, 6))
    played = Workload("w", "training", 24 * GIB, ((0.0, 8 * GIB),), lives)
    seen = [(list(ended), list(running)) for _, ended, running in in_order(played)]
    assert seen == [([], []), ([], [lives[0]]), ([lives[1]], [lives[0]])]
    assert lives[0].peak_until(3 * HOUR) == 2 * GIB
    assert fixed_quantile(1.0, 0.5)(played) == [None, None, int(7.5 * GIB)]


def test_an_amount_below_a_peak_needs_a_statement_with_the_number_of_runs() -> None:
    def outcome(amount: str, text: str = "12 lives, 9 days") -> str:
        return printed.judged(printed.Advice("patch", amount, text), 8 * GIB, 24 * GIB)

    assert (outcome("8Gi"), outcome("8193Mi"), outcome("")) == ("not below", "not below", "none")
    assert (outcome("8191Mi"), outcome("100%")) == ("below, not stated", "a share")
    stated = "12 lives, 9 days; 1 life of other programs used up to 8.0 GiB"
    assert outcome("7Gi", stated) == "below, stated"


def test_printed_patches_and_the_amount_of_auto_are_not_silently_below_a_peak() -> None:
    for name, outcomes in (
        ("rare batches", {"patch: not below": 2, "auto: not below": 2}),
        ("slow leaks", {"patch: none": 2, "auto: a share": 2}),
    ):
        drawn = [families.workload(name, "test", index, 30.0, 2.0) for index in range(2)]
        assert printed.judge_all((each, 30 * DAY) for each in drawn) == outcomes
    # The text must state that another program needs more memory than the newest program.
    large = [replace(life(24 * day, 8), program="large") for day in range(5)]
    small = [life(24 * day, 4) for day in range(5, 10)]
    both = Workload("w", "CI", 24 * GIB, ((0.0, 12 * GIB),), (*large, *small))
    assert printed.judge_all([(both, 10 * DAY)]) == {
        "patch: below, stated": 1,
        "auto: below, stated": 1,
    }


@pytest.mark.slow
def test_headroom_finds_most_of_sixty_workloads_with_few_misses() -> None:
    total = score((workload("tune", n, 90, 2.0) for n in range(60)), headroom, 21).total
    assert total.lives == 20541
    assert total.found / total.reclaimable > 0.8
    assert total.missed / total.recommended < 0.002
    assert total.recommended / total.lives > 0.95
