"""Tests the benchmark that compares placement methods. It checks the judge, the rules, and small
simulated fleets.
"""

import pytest

from benchmarks.device_truth.__main__ import ROWS
from benchmarks.device_truth.arrivals import GIB, MIXES, arrivals
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
    """Pods run for six windows, so that a pod ends between most bindings and admissions."""
    found = played(row, LONG)
    assert found.verdict.overcommits == 0
    assert found.bound > 50
    assert (found.evictions > 0) == (row == "gated")


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
    judge.rejected(
        6, 16.0
    )  # One device has no free replica, and the other device has too little memory.
    verdict = judge.verdict(20.0)
    assert (verdict.offered, verdict.rejected, verdict.falsely) == (3, 2, 1)
    assert (verdict.overcommits, verdict.devices_overcommitted) == (1, 1)
    assert verdict.used_ratio == (10 * 4 + 9 * 6) / (20 * 10)
