"""The comparison of ways to place pods: its judge, its rules, and small fleets played through."""

import subprocess
import sys

import pytest

from benchmarks.device_truth.__main__ import ROWS
from benchmarks.device_truth.arrivals import GIB, MIXES, Job, arrivals
from benchmarks.device_truth.judge import Judge
from benchmarks.device_truth.play import Delays, Play, Played
from benchmarks.device_truth.rules import BestFit
from benchmarks.device_truth.world import Sample, Shape, World
from tests.controlplane import ROOT

SMALL = Shape(nodes=3, gpus=4, memory_bytes=80 * GIB, replicas=6, policy="distributed")


def played(row: str, delays: Delays, life_s: float = 60.0) -> Played:
    jobs, since_s = arrivals(MIXES["4-60"], 150, SMALL.capacity_bytes, 0.95, life_s, seed=1)
    judge = Judge(SMALL.nodes, SMALL.gpus, SMALL.allocatable_bytes, 100, since_s)
    contestant = ROWS[row]
    modes = {"gated": contestant.gated, "pinned": contestant.pinned}
    scheduler = contestant.make(SMALL, 1)
    return Play(World(SMALL, 1), scheduler, judge, delays, 1, **modes).run(jobs, since_s)


AT_ONCE = Delays(0.0, 0.0)
LONG = Delays(10.0, 10.0)


@pytest.mark.parametrize("row", ["predicted", "any"])
def test_without_surprises_the_product_never_overcommits(row: str) -> None:
    verdict = played(row, AT_ONCE).verdict
    assert verdict.overcommits == 0
    assert verdict.offered == 150
    assert verdict.used_ratio > 0.3


def test_the_others_do() -> None:
    for row in ("replica counting", "fits on some device"):
        assert played(row, AT_ONCE).verdict.devices_overcommitted > 0


@pytest.mark.parametrize("row", ["gated*", "steered*", "pinned*"])
def test_no_surprise_hurts_who_knows_the_device(row: str) -> None:
    """Lives of six windows: something ends between most bindings and admissions."""
    found = played(row, LONG)
    assert found.verdict.overcommits == 0
    assert found.bound > 50
    assert (found.evictions > 0) == (row == "gated*")


def test_surprises_are_counted_and_each_play_is_the_same_again() -> None:
    once, again = played("predicted", LONG), played("predicted", LONG)
    assert once.verdict.overcommits > 0
    assert once == again


def test_the_judge_counts_by_the_hand() -> None:
    judge = Judge(nodes=1, devices=2, memory_bytes=10, replicas=2, since_s=10.0)
    judge.came("early", 0, 0, 6, 0.0)
    for _ in range(3):
        judge.offered(10.0)
    judge.came("fits", 0, 0, 4, 10.0)
    judge.refused(10, 12.0)  # the other device is free
    judge.went("early", 14.0)
    judge.came("dies", 0, 0, 7, 14.0)
    judge.came("beside", 0, 1, 5, 14.0)
    judge.refused(6, 16.0)  # on one no replica, on the other no room
    verdict = judge.verdict(20.0)
    assert (verdict.offered, verdict.refused, verdict.falsely) == (3, 2, 1)
    assert (verdict.overcommits, verdict.devices_overcommitted) == (1, 1)
    assert verdict.used_ratio == (10 * 4 + 9 * 6) / (20 * 10)


def test_the_judge_lets_the_dead_live_no_more_but_hold_their_replica() -> None:
    judge = Judge(nodes=1, devices=1, memory_bytes=10, replicas=2, since_s=0.0)
    judge.came("a", 0, 0, 8, 0.0)
    judge.came("b", 0, 0, 8, 0.0)
    judge.went("a", 0.0)
    judge.refused(9, 0.0)
    judge.went("b", 0.0)
    judge.refused(9, 0.0)
    assert judge.verdict(1.0).falsely == 2
    judge.came("c", 0, 0, 1, 1.0)
    judge.came("d", 0, 0, 1, 1.0)
    judge.refused(5, 1.0)
    assert judge.verdict(2.0).falsely == 2


def test_unseen_pods_may_be_given_one_anothers_devices() -> None:
    """One device has 39 GiB of room, the other 79: a pod of 50 waits until that of 30 is seen."""
    shape = Shape(1, 2, 80 * GIB, 6, "distributed")
    rule = BestFit(shape, obeyed=True)
    asked = [Job(name, size * GIB, 0.0, 1.0) for name, size in [("a", 40), ("b", 30), ("c", 50)]]
    a, b, c = asked
    first = rule.choose(a, [0], 0.0)
    assert first is not None
    rule.report(0, Sample((("a", first.device or 0, "r"),)), 0.0)
    second = rule.choose(b, [0], 0.0)
    assert second is not None
    assert second.device == first.device
    assert rule.choose(c, [0], 0.0) is None
    rule.report(0, Sample((("b", second.device or 0, "r"),)), 0.0)
    third = rule.choose(c, [0], 0.0)
    assert third is not None
    assert third.device != first.device


def test_what_it_does_not_know_it_names() -> None:
    told = subprocess.run(
        [sys.executable, "-m", "benchmarks.device_truth", "--mix", "huge"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 2
    assert "mix 'huge' is not one of: 4-60, 8/64, 6/10, openb" in " ".join(told.stderr.split())
