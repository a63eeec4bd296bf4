"""Tests the comparison of ways to place pods: its judge, its rules, and small simulated fleets."""

import pytest

from benchmarks.device_truth.__main__ import ROWS
from benchmarks.device_truth.arrivals import GIB, MIXES, Job, arrivals
from benchmarks.device_truth.bounds import Run, play
from benchmarks.device_truth.judge import Judge
from benchmarks.device_truth.play import Delays, Play, Played
from benchmarks.device_truth.world import Shape, World

SMALL = Shape(nodes=3, gpus=4, memory_bytes=80 * GIB, replicas=6, policy="distributed")


def played(row: str, delays: Delays, life_s: float = 60.0, seed: int = 1) -> Played:
    jobs, since_s = arrivals(MIXES["4-60"], 150, SMALL.capacity_bytes, 0.95, life_s, seed)
    judge = Judge(SMALL.nodes, SMALL.gpus, SMALL.allocatable_bytes, 100, since_s)
    world = World(SMALL, 1)
    return Play(world, ROWS[row](world, 1), judge, delays, 1).run(jobs, since_s)


AT_ONCE = Delays(0.0, 0.0)
LONG = Delays(10.0, 10.0)


@pytest.mark.slow
def test_without_surprises_the_product_never_overcommits() -> None:
    verdict = played("predicted", AT_ONCE).verdict
    assert verdict.overcommits == 0
    assert verdict.offered == 150
    assert verdict.used_ratio > 0.3


def test_without_surprises_the_other_rules_overcommit() -> None:
    for row in ("replica counting", "fits on some device"):
        assert played(row, AT_ONCE).verdict.devices_overcommitted > 0


@pytest.mark.parametrize("row", ["gated", "steered"])
@pytest.mark.slow
def test_no_surprise_overcommits_if_the_device_is_chosen_or_gated(row: str) -> None:
    """Pods live for six windows, so that some pod ends between most bindings and admissions."""
    found = played(row, LONG)
    assert found.verdict.overcommits == 0
    assert found.bound > 50
    assert (found.evictions > 0) == (row == "gated")


def test_a_pod_waits_for_the_end_of_another_until_its_timeout() -> None:
    shape = Shape(nodes=1, gpus=1, memory_bytes=80 * GIB, replicas=6, policy="distributed")
    jobs = [
        Job("ends", 60 * GIB, 1.0, 10.0),
        Job("waits", 40 * GIB, 2.0, 1000.0),
        Job("gives up", 70 * GIB, 12.0, 1.0),
        Job("last", 1 * GIB, 100.0, 1.0),
    ]
    world, judge = World(shape, 1), Judge(1, 1, shape.allocatable_bytes, 6, 0.0)
    found = Play(world, ROWS["predicted"](world, 1), judge, Delays(0.0, 0.0, 30.0), 1).run(
        jobs, 0.0
    )
    assert found.waits_s == (9.0,)
    assert (found.bound, found.verdict.rejected) == (3, 1)


def test_the_judge_counts_as_by_hand() -> None:
    judge = Judge(nodes=1, devices=2, memory_bytes=10, replicas=2, since_s=10.0)
    judge.came("early", 0, 0, 6, 0.0)
    for _ in range(3):
        judge.offered(10.0)
    judge.came("fits", 0, 0, 4, 10.0)
    judge.rejected(10, 12.0)  # The other device is free.
    judge.went("early", 14.0)
    judge.came("dies", 0, 0, 7, 14.0)
    judge.came("beside", 0, 1, 5, 14.0)
    judge.rejected(6, 16.0)  # One device has no replica, and the other not enough memory.
    verdict = judge.verdict(20.0)
    assert (verdict.offered, verdict.rejected, verdict.falsely) == (3, 2, 1)
    assert (verdict.overcommits, verdict.devices_overcommitted) == (1, 1)
    assert verdict.used_ratio == (10 * 4 + 9 * 6) / (20 * 10)


def test_ended_pods_keep_their_replica_for_the_judge_but_do_not_run() -> None:
    judge = Judge(nodes=1, devices=1, memory_bytes=10, replicas=2, since_s=0.0)
    judge.came("a", 0, 0, 8, 0.0)
    judge.came("b", 0, 0, 8, 0.0)
    judge.went("a", 0.0)
    judge.rejected(9, 0.0)
    judge.went("b", 0.0)
    judge.rejected(9, 0.0)
    assert judge.verdict(1.0).falsely == 2
    judge.came("c", 0, 0, 1, 1.0)
    judge.came("d", 0, 0, 1, 1.0)
    judge.rejected(5, 1.0)
    assert judge.verdict(2.0).falsely == 2


@pytest.mark.parametrize(
    ("row", "used_pct", "rejected_pct"),
    [
        ("predicted", 57.7, 23.3),
        ("draw known", 69.5, 12.0),
        ("future known", 66.2, 12.0),
        ("device chosen", 76.9, 3.3),
    ],
)
@pytest.mark.slow
def test_the_information_of_an_oracle_bounds_the_information_of_predictions(
    row: str, used_pct: float, rejected_pct: float
) -> None:
    found = play(Run(row, "4-60", seed=1, pods=150, horizon=30, nodes=3))
    assert found == pytest.approx((used_pct, rejected_pct), abs=0.05)
