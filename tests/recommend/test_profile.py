"""Tests recommendations from runs: their amounts, censored runs, programs, and limits."""

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headroom.core.recommend.estimate import estimate, margin_after, student_t
from headroom.core.recommend.histogram import Histogram, bucket_of
from headroom.core.recommend.lives import DAY_S, HOUR_S, Ending, Life, Track
from headroom.core.recommend.profile import ANY_PROGRAM, ContainerProfile, Missing, Profile

MAX_PROGRAMS = 8
MAX_CONTAINERS = 16

GIB = 1 << 30
MIB = 1 << 20


def life(
    peak_gib: float,
    hours: float = 1.0,
    ending: Ending | None = Ending.COMPLETED,
    started_s: float = DAY_S,
    **more: object,
) -> Life:
    return Life(int(peak_gib * GIB), started_s, started_s + hours * HOUR_S, ending, **more)  # type: ignore[arg-type]


def recorded(*lives: Life) -> ContainerProfile:
    profile = ContainerProfile()
    for each in lives:
        profile.record("p", each)
    return profile


def asked_gib(profile: ContainerProfile) -> float | None:
    found = profile.recommendation("p", 2 * DAY_S)
    return None if found.request_bytes is None else round(found.request_bytes / GIB, 2)


def test_students_t_is_computed_for_many_and_few_degrees_of_freedom() -> None:
    assert student_t(0.9996, 1e9) == pytest.approx(3.353, abs=0.001)
    assert student_t(0.975, 10) == pytest.approx(2.228, abs=0.001)
    assert student_t(0.9996, 10) == pytest.approx(4.72, abs=0.05)


def test_the_margin_shrinks_with_the_number_of_runs_and_grows_with_their_spread() -> None:
    def asked(spread: float) -> list[float | None]:
        rng = random.Random(1)
        peaks = [8 * rng.lognormvariate(0, spread) for _ in range(100)]
        return [asked_gib(recorded(*(life(peak) for peak in peaks[:n]))) for n in (3, 10, 30, 100)]

    assert asked(0.0) == [11.49, 8.57, 8.24, 8.22]
    assert asked(0.05) == [13.9, 9.73, 9.07, 9.35]
    assert asked(0.2) == [47.79, 16.69, 13.41, 15.15]


def test_fewer_than_three_runs_give_no_recommendation() -> None:
    two = recorded(life(4), life(4, 3))
    found = two.recommendation("p", 2 * DAY_S)
    assert (found.request_bytes, found.missing, found.lives) == (None, Missing.FEW_LIVES, 2)
    assert found.span_s == 3 * HOUR_S
    empty = ContainerProfile().recommendation("p", 0.0)
    assert (empty.missing, empty.lives) == (Missing.NO_LIVES, 0)
    other = two.recommendation("another", 2 * DAY_S)
    assert (other.missing, other.lives) == (Missing.NEW_PROGRAM, 0)


def programs(first: list[float], second: list[float]) -> ContainerProfile:
    """Record runs of program o and then runs of program p, with these peaks in GiB."""
    profile = ContainerProfile()
    for program, peaks in (("o", first), ("p", second)):
        for peak in peaks:
            profile.record(program, life(peak))
    return profile


def test_the_spread_of_other_programs_counts_for_a_new_program() -> None:
    """One run is enough if runs of other programs show how much peaks vary."""

    def asked(spread: float) -> list[float | None]:
        rng = random.Random(3)
        others = [4 * rng.lognormvariate(0, spread) for _ in range(16)]
        return [asked_gib(programs(others, [8.0] * lives)) for lives in (0, 1, 3)]

    assert asked(0.01) == [None, 8.65, 8.54]
    assert asked(0.1) == [None, 13.64, 12.43]


def test_a_few_runs_of_other_programs_are_not_sufficient() -> None:
    few = programs([4.0] * 8, [8, 8])
    found = few.recommendation("p", 2 * DAY_S)
    assert (found.request_bytes, found.missing, found.lives) == (None, Missing.FEW_LIVES, 2)
    assert asked_gib(programs([4.0] * 9, [8, 8])) is not None


def test_runs_of_a_new_program_are_tested_from_the_second_on() -> None:
    found = programs([4.0] * 9, [8, 8, 16]).recommendation("p", 2 * DAY_S)
    assert (found.tested, found.missed) == (2, 1)


@pytest.mark.parametrize("ending", [each for each in Ending if each is not Ending.COMPLETED])
def test_censored_runs_can_only_raise_the_recommendation(ending: Ending) -> None:
    complete = [life(8), life(8.1), life(7.9)]
    before = asked_gib(recorded(*complete))
    assert before is not None
    assert asked_gib(recorded(*complete, *[life(0.5, ending=ending)] * 50)) == before
    raised = asked_gib(recorded(*complete, life(14, ending=ending)))
    assert raised is not None
    assert raised >= 14 * 1.01
    assert asked_gib(recorded(*[life(8, ending=ending)] * 5)) is None


def test_a_run_evicted_after_a_day_is_complete_but_an_oom_killed_run_is_not() -> None:
    assert not life(8, 24, Ending.EVICTED).censored
    assert life(8, 23.9, Ending.EVICTED).censored
    assert life(8, 48, Ending.OOM_KILLED).censored
    assert life(8, 48, Ending.COMPLETED, partial=True).censored
    assert not life(8, 24, None).censored
    assert life(8, 1, None).censored


def test_active_runs_count_after_a_day_and_can_raise_before() -> None:
    profile = recorded(life(8), life(8))
    profile.replace_running([("p", life(8, 25, None))])
    first = profile.recommendation("p", 2 * DAY_S)
    assert first.lives == 3
    assert first.request_bytes is not None
    profile.replace_running([("p", life(8, 25, None)), ("p", life(12, 0.1, None))])
    second = profile.recommendation("p", 2 * DAY_S)
    assert second.lives == 3
    assert second.request_bytes is not None
    assert second.request_bytes >= 12 * GIB * 1.01
    profile.replace_running([])
    assert profile.recommendation("p", 2 * DAY_S).missing is Missing.FEW_LIVES


def test_the_misses_of_past_recommendations_are_counted() -> None:
    profile = recorded(life(8), life(8), life(8), life(8), life(12), life(8, ending=Ending.FAILED))
    found = profile.recommendation("p", 2 * DAY_S)
    # The first three runs had no recommendation. The run of 12 GiB exceeded the recommendation from
    # 8 GiB.
    assert (found.tested, found.missed, found.lives) == (3, 1, 5)
    assert found.above_ratio == 0.0


def test_old_peaks_are_forgotten() -> None:
    profile = recorded(life(20), life(20))
    for _ in range(20):
        profile.record("p", life(8, started_s=121 * DAY_S))
    found = profile.recommendation("p", 122 * DAY_S)
    assert found.request_bytes is not None
    assert found.request_bytes < 9 * GIB


def test_a_run_that_is_recorded_late_has_its_decayed_weight() -> None:
    track = Track()
    track.record(life(8, started_s=21 * DAY_S))
    track.record(life(4, started_s=11 * DAY_S))
    assert list(track.complete.weights.values()) == [1.0, pytest.approx(0.5)]
    assert (track.first_s, track.last_s) == (11 * DAY_S, 21 * DAY_S + HOUR_S)


def test_a_request_is_at_most_the_memory_of_the_device() -> None:
    """Otherwise, the pod would fit on no node."""
    profile = recorded(life(4), life(11), life(5), life(9))
    found = profile.recommendation("p", 2 * DAY_S)
    assert found.request_bytes is not None
    assert found.request_bytes > 24 * GIB
    assert not found.whole_device
    profile.memory_bytes = 24 * GIB - MIB
    found = profile.recommendation("p", 2 * DAY_S)
    # The request is rounded down to a multiple of 64 MiB, because rounding up would exceed the
    # device's memory.
    assert found.request_bytes == 24 * GIB - 64 * MIB
    assert found.whole_device
    profile.memory_bytes = 1 << 42
    assert not profile.recommendation("p", 2 * DAY_S).whole_device


def test_self_sized_programs_are_recognised_by_one_jump_and_equal_peaks() -> None:
    flat = [life(18 + n / 100, startup_peak_bytes=18 * GIB) for n in range(5)]
    assert recorded(*flat).recommendation("p", 2 * DAY_S).self_sized
    growing = [life(18 + n / 100, startup_peak_bytes=9 * GIB) for n in range(5)]
    assert not recorded(*growing).recommendation("p", 2 * DAY_S).self_sized
    unmeasured = [life(18 + n / 100) for n in range(5)]
    assert not recorded(*unmeasured).recommendation("p", 2 * DAY_S).self_sized
    different = [life(4 * n, startup_peak_bytes=4 * n * GIB) for n in range(1, 6)]
    assert not recorded(*different).recommendation("p", 2 * DAY_S).self_sized


def test_a_changed_program_gets_no_recommendation_from_the_old_one() -> None:
    profile = recorded(life(8), life(8), life(8))
    for _ in range(3):
        profile.record("larger", life(20))
    assert profile.recommendation("larger", 2 * DAY_S).highest_bytes >= 20 * GIB
    assert profile.recommendation("p", 2 * DAY_S).highest_bytes < 9 * GIB


def test_programs_that_change_with_every_run_are_merged() -> None:
    profile = ContainerProfile()
    for n in range(MAX_PROGRAMS + 1):
        profile.record(f"lr={n}", life(8))
    assert profile.varies
    assert list(profile.tracks) == [ANY_PROGRAM]
    assert profile.recommendation("lr=99", 2 * DAY_S).lives == MAX_PROGRAMS + 1
    profile.replace_running([("lr=100", life(8, 25, None)), ("lr=101", life(8, 25, None))])
    assert profile.recommendation("lr=99", 2 * DAY_S).lives == MAX_PROGRAMS + 3


def test_merged_tracks_have_the_runs_of_both() -> None:
    both, tracks = Track(), (Track(), Track())
    for track, gib in zip(tracks, (4, 10), strict=True):
        for factor in (1, 1, 1, 2):
            track.record(life(factor * gib, startup_peak_bytes=factor * gib * GIB))
        track.record(life(gib, ending=Ending.OOM_KILLED))
        both.merge(track)
    assert (both.ended, both.flat, both.tested, both.missed) == (8, 8, 4, 2)
    for found, parts in (
        (both.complete, [track.complete for track in tracks]),
        (both.censored, [track.censored for track in tracks]),
    ):
        assert found.weights == {**parts[0].weights, **parts[1].weights}
        assert found.total == pytest.approx(parts[0].total + parts[1].total)


@pytest.mark.parametrize("days", [range(1, MAX_PROGRAMS + 2), range(MAX_PROGRAMS + 1, 0, -1)])
def test_merged_programs_keep_the_time_of_all_their_runs(days: range) -> None:
    profile = ContainerProfile()
    for day in days:
        profile.record(f"lr={day}", life(8, started_s=day * DAY_S))
    found = profile.recommendation("lr=99", (MAX_PROGRAMS + 2) * DAY_S)
    assert found.span_s == MAX_PROGRAMS * DAY_S + HOUR_S


def test_programs_with_enough_runs_stay_separate_and_the_oldest_is_dropped() -> None:
    profile = ContainerProfile()
    for n in range(MAX_PROGRAMS + 1):
        for _ in range(3):
            profile.record(f"release-{n}", life(8))
    assert not profile.varies
    assert list(profile.tracks) == [f"release-{n}" for n in range(1, MAX_PROGRAMS + 1)]


def test_many_concurrent_programs_are_merged() -> None:
    profile = ContainerProfile()
    profile.replace_running((f"lr={n}", life(8, 25, None)) for n in range(50))
    assert profile.varies
    assert profile.recommendation("lr=1", 2 * DAY_S).lives == 50


def test_the_number_of_containers_in_a_profile_is_limited() -> None:
    profile = Profile()
    for n in range(MAX_CONTAINERS + 5):
        profile.container(f"c{n}", "L4").record("p", life(8, started_s=n * DAY_S))
    assert len(profile.containers) == MAX_CONTAINERS
    assert ("c4", "L4") not in profile.containers
    assert ("c5", "L4") in profile.containers


PEAKS = st.lists(st.integers(64 * MIB, 80 * GIB), min_size=3, max_size=60)


@given(PEAKS, st.lists(st.integers(64 * MIB, 80 * GIB), max_size=20))
def test_a_request_covers_all_peaks_and_censored_runs_never_lower_it(
    peaks: list[int], censored: list[int]
) -> None:
    track = Track()
    for peak in peaks:
        track.record(Life(peak, 0.0, HOUR_S, Ending.COMPLETED))
    before = track.estimate()
    assert before is not None
    assert before.request_bytes >= max(peaks)
    assert before.centre_bytes <= before.highest_bytes <= before.request_bytes
    for peak in censored:
        track.record(Life(peak, 0.0, HOUR_S, Ending.FAILED))
    after = track.estimate()
    assert after is not None
    assert after.request_bytes >= max([before.request_bytes, *censored])


def test_an_estimate_from_very_different_peaks_is_finite() -> None:
    histogram = Histogram()
    for peak in (1, 1, 1 << 44):
        histogram.add(peak)
    assert estimate(histogram.weights, 3).request_bytes > 1 << 40


def test_a_request_below_a_recorded_peak_is_marked() -> None:
    """Test random runs of up to three programs. The request covers all peaks of its own program,
    and higher peaks of other programs are counted.
    """
    said = 0
    for seed in range(300):
        lots = random.Random(seed)
        profile, peaks = ContainerProfile(memory_bytes=80 * GIB), dict[str, list[float]]()
        for number in range(lots.randint(1, 40)):
            program = lots.choice("opq")
            peak = min(79.0, lots.uniform(2, 6) * lots.lognormvariate(0, lots.choice((0.02, 0.7))))
            ending = lots.choice([Ending.COMPLETED] * 4 + [Ending.OOM_KILLED, Ending.FAILED])
            started_s = (1 + number * lots.uniform(0.1, 2)) * DAY_S
            profile.record(program, life(peak, started_s=started_s, ending=ending))
            peaks.setdefault(program, []).append(peak)
        for program, own in peaks.items():
            found = profile.recommendation(program, 82 * DAY_S)
            if found.request_bytes is None:
                continue
            request_gib = found.request_bytes / GIB
            assert max(own) <= request_gib or found.whole_device, seed
            others = [peak for name, some in peaks.items() if name != program for peak in some]
            if max(others, default=0.0) > request_gib:
                said += 1
                assert found.others_lives > 0
                assert found.others_highest_bytes / GIB >= max(others)
    assert said > 20


def test_a_program_whose_runs_grow_or_jump_late_keeps_its_request() -> None:
    profile = recorded(*(life(8) for _ in range(8)))
    late = replace(life(9, hours=120), unsettled=True)
    profile.record("p", late)
    found = profile.recommendation("p", 6 * DAY_S)
    assert found.request_bytes is not None  # A single such run can be an accident.
    assert found.request_bytes > 9 * GIB
    profile.replace_running([("p", replace(late, ending=None))])
    found = profile.recommendation("p", 6 * DAY_S)
    assert (found.request_bytes, found.missing) == (None, Missing.UNSETTLED)
    assert (found.lives, found.unsettled) == (10, 2)
    # Settled runs of a later release outweigh these runs.
    for _ in range(20):
        profile.record("p", life(8))
    assert profile.recommendation("p", 6 * DAY_S).request_bytes is not None


def test_one_run_that_outgrows_all_earlier_runs_after_its_first_day_is_enough() -> None:
    def missing(past: int, first_day_gib: float, peak_gib: float, *, ends: bool) -> Missing | None:
        profile = recorded(*(life(8) for _ in range(past)))
        late = life(peak_gib, hours=120)
        late = replace(late, first_day_bytes=int(first_day_gib * GIB))
        if ends:
            profile.record("p", late)
        else:
            profile.replace_running([("p", replace(late, ending=None))])
        return profile.recommendation("p", 6 * DAY_S).missing

    for ends in (True, False):
        assert missing(8, 8, 9.5, ends=ends) is Missing.UNSETTLED
        assert missing(8, 8, 8.7, ends=ends) is None
        # The run needed this much memory on its first day, or had already grown to a known peak.
        assert missing(8, 9.5, 9.6, ends=ends) is None
        assert missing(8, 5, 8, ends=ends) is None
        assert missing(8, 0, 9.5, ends=ends) is None  # The run is younger than a day.
        # One in many runs is an accident.
        assert missing(60, 8, 9.5, ends=ends) is None


def test_three_runs_that_rise_to_one_level_after_their_first_day_are_enough() -> None:
    def after(*peaks_gib: float, past: int = 12) -> ContainerProfile:
        profile = recorded(*(life(8) for _ in range(past)))
        late = [
            replace(life(peak, hours=120, ending=None), first_day_bytes=8 * GIB)
            for peak in peaks_gib
        ]
        for _ in range(2):  # The recorder receives running lives repeatedly.
            profile.replace_running([("p", each) for each in late])
        return profile

    found = after(8.5, 8.51, 8.52).recommendation("p", 6 * DAY_S)
    assert (found.missing, found.unsettled, found.lives) == (Missing.UNSETTLED, 3, 15)
    assert after(8.5, 8.51).recommendation("p", 6 * DAY_S).missing is None
    assert after(8.3, 8.5, 8.7).recommendation("p", 6 * DAY_S).missing is None
    assert after(8.2, 8.2, 8.2).recommendation("p", 6 * DAY_S).missing is None
    assert after(8.5, 8.5, 8.5, past=120).recommendation("p", 6 * DAY_S).missing is None
    # These runs still count after they have ended.
    profile = after(8.5, 8.51, 8.52)
    profile.replace_running([])
    assert profile.recommendation("p", 6 * DAY_S).missing is Missing.UNSETTLED


def test_runs_above_a_recommendation_widen_the_next_ones() -> None:
    assert [margin_after(100, missed) for missed in (0, 1, 2, 9)] == pytest.approx(
        [0.0, 0.18, 0.2, 0.2]
    )
    assert margin_after(5000, 5) == 0.0  # One run in 1,000 may exceed the request.
    # Runs of another program also widen the margin, within the limits of the program's own runs.
    for of_other, ratio in ((0, 1.02), (2, 1.2)):
        profile = recorded(*[life(8)] * 200)
        profile.record("other", life(4))
        profile.tracks["other"].missed = of_other
        found = profile.recommendation("p", 2 * DAY_S)
        assert found.request_bytes is not None
        assert found.request_bytes / found.quantile_bytes == pytest.approx(ratio, abs=0.001)
    track, quiet = Track(), Track()
    for each in (track, quiet):
        for _ in range(200):
            each.record(life(8))
    track.missed = 4
    wide, narrow = track.estimate(), quiet.estimate()
    assert wide is not None
    assert narrow is not None
    assert narrow.request_bytes / narrow.centre_bytes == pytest.approx(1.02)
    assert wide.request_bytes / wide.centre_bytes == pytest.approx(1.2, abs=0.001)


def test_a_run_above_the_recommendation_that_fitted_its_authors_request_counts_twice() -> None:
    def ratio(peak_gib: float, requested_gib: float, *, other: bool) -> float:
        profile = recorded(*[life(8)] * 1200)
        above = replace(life(peak_gib), requested_bytes=int(requested_gib * GIB))
        if other:
            for each in (*[life(8)] * 1200, above):
                profile.record("other", each)
        else:
            profile.record("p", above)
        profile.tracks["p"].complete.weights = {bucket_of(8 * GIB): 1000.0}
        found = profile.recommendation("p", 0.0)
        assert found.request_bytes is not None
        return found.request_bytes / found.quantile_bytes

    # One of 1,200 runs may exceed the request, but not two.
    for requested_gib, more in ((0, 0.02), (8.4, 0.02), (9, 0.16), (16, 0.16)):
        assert ratio(8.5, requested_gib, other=False) == pytest.approx(1 + more, abs=0.002)
    assert ratio(8.5, 0, other=True) == pytest.approx(1.02, abs=0.002)
    assert ratio(8.5, 9, other=True) == pytest.approx(1.16, abs=0.002)
