"""Checks that an active run counts as one run with its peak so far, even if no run has ended."""

import pytest

from headroom.core.recommend.histogram import bucket_of
from headroom.core.recommend.lives import DAY_S, Ending, Life, Track
from headroom.core.recommend.profile import ContainerProfile

GIB = 1 << 30
END_S = 1_795_000_000.0


def ended(peak_gib: float) -> Life:
    return Life(int(peak_gib * GIB), END_S - 2 * DAY_S, END_S, Ending.COMPLETED)


def running(peak_gib: float) -> Life:
    return Life(int(peak_gib * GIB), END_S - 2 * DAY_S, END_S, None)


@pytest.mark.parametrize("peak_gib", [8.0, 8.1, 9.0, 12.0])
def test_an_active_run_weighs_as_much_as_a_run_that_ended_now(peak_gib: float) -> None:
    with_running, with_ended = Track(), Track()
    for track in (with_running, with_ended):
        for _ in range(6):
            track.record(ended(8.0))
    with_running.replace_running([running(peak_gib)])
    with_ended.record(ended(peak_gib))
    assert with_running.estimate() == with_ended.estimate()


def test_the_share_of_runs_above_the_request_counts_each_active_run_once() -> None:
    container = ContainerProfile(memory_bytes=9 * GIB)
    for _ in range(6):
        container.record("p", ended(8.0))
    container.replace_running([("p", running(12.0))])
    found = container.recommendation("p", END_S)
    assert found.request_bytes == 9 * GIB
    assert bucket_of(12 * GIB) != bucket_of(8 * GIB)
    assert found.above_ratio == pytest.approx(1 / 7)
