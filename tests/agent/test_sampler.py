"""Tests when samples are taken."""

import math

import pytest

from agent.sampler import apart_s, next_due_s

INTERVAL_S = 5.0


def test_samples_keep_to_their_interval() -> None:
    assert next_due_s(100.0, 100.25, INTERVAL_S, math.inf) == 105.0


def test_missed_samples_are_not_made_up() -> None:
    assert next_due_s(100.0, 117.0, INTERVAL_S, math.inf) == 117.0


def test_a_sample_is_taken_early_for_a_report_that_is_held_back() -> None:
    assert next_due_s(100.0, 100.25, INTERVAL_S, 1.0) == 101.25


@pytest.mark.parametrize("pods", [1, 2, 100])
def test_a_burst_of_pods_does_not_delay_the_next_sample(pods: int) -> None:
    """Each pod triggers the sampling loop early."""
    due_s = now_s = 100.0
    for _ in range(pods):
        due_s = next_due_s(due_s, now_s, INTERVAL_S, math.inf)
        now_s += 0.5
    assert next_due_s(due_s, now_s, INTERVAL_S, math.inf) <= now_s + INTERVAL_S


@pytest.mark.parametrize(
    ("cpu_s", "expected_s"),
    [
        pytest.param(0.002, 0.5, id="a small node"),
        pytest.param(0.08, 4.0, id="400 pods: a fiftieth of a core"),
        pytest.param(1.0, INTERVAL_S, id="never less often than without pods"),
    ],
)
def test_samples_while_pods_arrive_take_a_small_share_of_a_core(
    cpu_s: float, expected_s: float
) -> None:
    assert apart_s(cpu_s, INTERVAL_S) == pytest.approx(expected_s)
