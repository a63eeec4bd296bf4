"""Tests runs whose use grows or jumps after their first day."""

import random

from headroom.core.recommend.growth import DAY_S, Growth

GIB = 1 << 30


def followed(*peaks_gib: float) -> Growth:
    """Return the growth of a run. ``peaks_gib`` are its peaks at the end of each day."""
    growth = Growth()
    for day, peak_gib in enumerate(peaks_gib, 1):
        growth = growth.until(day * DAY_S, int(peak_gib * GIB))
        # This peak does not count, because the day has not ended.
        growth = growth.until((day + 0.5) * DAY_S, int(2 * peak_gib * GIB))
    return growth


def test_a_leak_is_unsettled_from_the_end_of_its_third_day() -> None:
    for a_day in (0.01, 0.05, 0.2):
        assert not followed(8, min(9, 8 * (1 + a_day))).unsettled
        assert followed(8, 8 * (1 + a_day), 8 * (1 + 2 * a_day)).unsettled


def test_a_run_that_reaches_its_peak_once_is_settled() -> None:
    assert not followed(8, 8, 8, 8).unsettled
    assert not followed(8, 9, 9, 9).unsettled
    assert not followed(8, 8.01, 8.02, 8.03).unsettled
    # If all days are alike, two consecutive new peaks after the first day are rare.
    lots, unsettled = random.Random(1), 0
    for _ in range(500):
        peaks, peak = [], 0.0
        for _ in range(lots.randint(3, 12)):
            peak = max(peak, lots.uniform(7, 8))
            peaks.append(peak)
        unsettled += followed(*peaks).unsettled
    assert unsettled < 40


def test_a_jump_after_the_first_day_is_remembered() -> None:
    swapped = followed(8, 8, 11, 11, 11, 11, 11)
    assert swapped.unsettled
    assert swapped.jumped
    assert not followed(8, 9.1, 9.1, 9.1).unsettled
    # A recorder that starts to follow an old run does not know how the run has grown.
    assert not Growth().until(9.2 * DAY_S, 11 * GIB).unsettled
