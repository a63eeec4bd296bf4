"""Tests recommendations of a plan, which are the recorder's own estimates from the runs before each
pod.
"""

from headroom.core.recommend.lives import Ending, Track
from headroom.core.recommend.lives import Life as Recorded
from headroom.planner.recommended import with_recommendations
from headroom.planner.workload import DAY_S, History, Life, Machine, Vram

GIB, MIB = 1 << 30, 1 << 20


def recommended(*lives: Life) -> list[int | None]:
    ordered = tuple(sorted(lives, key=lambda life: life.created_s))
    found = with_recommendations(History((Machine("a", "L4", 1, 24 * GIB),), ordered, ()))
    assert [life.name for life in found.lives] == [life.name for life in ordered]
    return [life.recommended_bytes for life in found.lives]


def life(at_s: float, peak_gib: float | None, run_s: float = 50.0, workload: str = "w") -> Life:
    peak_bytes = None if peak_gib is None else int(peak_gib * GIB)
    return Life(f"{workload}-{at_s}", workload, at_s, run_s, 1, 20 * GIB, peak_bytes)


def test_the_fourth_run_gets_the_recommendation_of_the_first_three() -> None:
    track = Track()
    for at_s in (0.0, 100.0, 200.0):
        track.record(Recorded(8 * GIB, at_s, at_s + 50, Ending.COMPLETED))
    estimate = track.estimate()
    assert estimate is not None
    expected = -(-estimate.request_bytes // (64 * MIB)) * 64 * MIB
    found = recommended(*(life(100.0 * n, 8) for n in range(4)))
    assert found == [None, None, None, expected]
    assert 8 * GIB < expected < 16 * GIB


def test_only_ended_runs_of_the_workload_count() -> None:
    others = [life(100.0 * n + 1, 8, workload="other") for n in range(4)]
    assert recommended(*others[:3], *(life(100.0 * n, 8) for n in range(3)))[-1] is None
    still_running = [life(100.0 * n, 8, run_s=1e6) for n in range(3)]
    assert recommended(*still_running, life(300, 8))[-1] is None
    ended = [life(100.0 * n, 8) for n in range(3)]
    young = life(290, 14, run_s=1e6)  # Its peak is not known yet.
    assert recommended(*ended, young, life(300, 8))[-1] == recommended(*ended, life(300, 8))[-1]
    # After a day, active runs count too.
    assert recommended(*still_running, life(DAY_S + 300, 8))[-1] is not None
    unmeasured = [life(100.0 * n, None) for n in range(5)]
    assert recommended(*unmeasured) == [None] * 5


def test_a_higher_peak_raises_only_the_next_recommendation() -> None:
    found = recommended(*(life(100.0 * n, 8) for n in range(6)), life(600, 14), life(700, 8))
    before, at, after = found[-3:]
    assert before is not None
    assert at is not None
    assert after is not None
    assert at <= before < 14 * GIB < after


def test_a_pod_without_a_recommendation_keeps_its_request() -> None:
    vram = Vram("recommendations")
    assert vram.need_bytes(life(0, 8)) == 20 * GIB
    (*_, last) = with_recommendations(
        History((), tuple(life(100.0 * n, 8) for n in range(4)), ())
    ).lives
    assert vram.need_bytes(last) == last.recommended_bytes != 20 * GIB
