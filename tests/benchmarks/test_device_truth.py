"""The comparison of ways to place pods: its judge, its rules, and small fleets played through."""

import subprocess
import sys

import pytest

from benchmarks.device_truth.__main__ import ROWS
from benchmarks.device_truth.arrivals import GIB, MIXES, Job, arrivals
from benchmarks.device_truth.bounds import Run, play
from benchmarks.device_truth.judge import Judge
from benchmarks.device_truth.play import Delays, Play, Played
from benchmarks.device_truth.product import Gated, Product, Steered
from benchmarks.device_truth.world import Shape, World, index_of
from tests.controlplane import ROOT
from tests.standin.allocations import Ids, Preferred
from tests.standin.plugin import Plugin, device_of

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


def test_the_others_do() -> None:
    for row in ("replica counting", "fits on some device"):
        assert played(row, AT_ONCE).verdict.devices_overcommitted > 0


@pytest.mark.parametrize("row", ["gated", "steered"])
@pytest.mark.slow
def test_no_surprise_overcommits_if_the_device_is_chosen_or_gated(row: str) -> None:
    """Lives of six windows: something ends between most bindings and admissions."""
    found = played(row, LONG)
    assert found.verdict.overcommits == 0
    assert found.bound > 50
    assert (found.evictions > 0) == (row == "gated")


@pytest.mark.slow
def test_surprises_are_counted_and_each_play_is_the_same_again() -> None:
    once, again = (played("predicted", LONG, seed=2) for _ in range(2))
    assert once.verdict.overcommits > 0
    assert once == again


def test_a_pod_waits_for_the_end_of_another_as_long_as_its_patience_lasts() -> None:
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


def test_the_judge_counts_by_the_hand() -> None:
    judge = Judge(nodes=1, devices=2, memory_bytes=10, replicas=2, since_s=10.0)
    judge.came("early", 0, 0, 6, 0.0)
    for _ in range(3):
        judge.offered(10.0)
    judge.came("fits", 0, 0, 4, 10.0)
    judge.rejected(10, 12.0)  # the other device is free
    judge.went("early", 14.0)
    judge.came("dies", 0, 0, 7, 14.0)
    judge.came("beside", 0, 1, 5, 14.0)
    judge.rejected(6, 16.0)  # on one no replica, on the other not enough memory
    verdict = judge.verdict(20.0)
    assert (verdict.offered, verdict.rejected, verdict.falsely) == (3, 2, 1)
    assert (verdict.overcommits, verdict.devices_overcommitted) == (1, 1)
    assert verdict.used_ratio == (10 * 4 + 9 * 6) / (20 * 10)


def test_the_judge_lets_the_dead_live_no_more_but_hold_their_replica() -> None:
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


def placed(scheduler: Product, world: World, *pods: tuple[str, int]) -> list[int | None]:
    """Bind them one after the other, each before any is admitted."""
    return [
        scheduler.choose(Job(name, size * GIB, 0.0, 1.0), range(world.shape.nodes), 0.0)
        for name, size in pods
    ]


def admitted(scheduler: Product, world: World, name: str, size: int) -> int:
    """Return the device that the pod gets; its agent's report arrives at once."""
    job = Job(name, size * GIB, 0.0, 1.0)
    device = world.admit(job, 0, lambda plugin: scheduler.lots(0, plugin))
    assert device is not None
    world.start(job, 0, device)
    scheduler.look(0, world.sample(0), 1.0)(1.0)
    return device


def test_steered_the_agent_gives_the_device_that_the_extender_chose() -> None:
    """39 of 79 GiB are free beside the first pod: another of 30 goes there, against the plugin's
    choice. A pod for the other device waits: the kubelet could ask for either first."""
    world = World(Shape(1, 2, 80 * GIB, 6, "distributed"), 1)
    steered = Steered(world)
    assert placed(steered, world, ("a", 40)) == [0]
    first = admitted(steered, world, "a", 40)
    assert placed(steered, world, ("b", 30), ("c", 50)) == [0, None]
    assert admitted(steered, world, "b", 30) == first
    assert placed(steered, world, ("c", 50)) == [0]
    assert admitted(steered, world, "c", 50) != first


def test_on_a_steered_node_the_kubelet_rejects_a_pod_that_fits_on_no_device() -> None:
    world = World(Shape(1, 1, 80 * GIB, 6, "distributed"), 1)
    steered = Steered(world)
    assert placed(steered, world, ("a", 60)) == [0]
    outsider = Job("outsider", 40 * GIB, 0.0, 1.0)
    world.admit(outsider, 0, lambda plugin: plugin)
    world.start(outsider, 0, 0)
    steered.look(0, world.sample(0), 1.0)
    assert world.admit(Job("a", 60 * GIB, 0.0, 1.0), 0, lambda p: steered.lots(0, p)) is None


class Onto:
    """Whatever led to it, the plugin gives this device."""

    def __init__(self, device: int) -> None:
        self._device = device

    def preferred(self, plugin: Plugin, call: Preferred) -> Ids:
        return frozenset(sorted(r for r in call.available if self._device == _device(r))[:1])

    def some(self, replicas: Ids, count: int) -> Ids:
        raise AssertionError("the plugin prefers one that is free")


def _device(replica: str) -> int:
    return index_of(device_of(replica))


def test_a_gated_pod_on_a_full_device_is_evicted_and_its_node_backs_off() -> None:
    world = World(Shape(1, 2, 80 * GIB, 6, "distributed"), 1)
    gated = Gated(world)

    def comes(name: str, size: int, onto: int, at_s: float) -> bool:
        """Whether it may start, when all is reported."""
        job = Job(name, size * GIB, 0.0, 1.0)
        assert gated.choose(job, [0], at_s) == 0
        assert world.admit(job, 0, lambda plugin: Onto(onto)) == onto
        assert not gated.may_start(job, 0, at_s)
        gated.look(0, world.sample(0), at_s)(at_s)
        if gated.may_start(job, 0, at_s):
            world.start(job, 0, onto)
            return True
        return False

    assert comes("a", 60, 0, 1.0)
    assert not comes("b", 30, 0, 2.0)
    assert gated.tend(3.0) == ["b"]
    assert gated.tend(4.0) == []
    world.end("b", 0)
    gated.look(0, world.sample(0), 5.0)(5.0)
    gated.ended(Job("b", 30 * GIB, 0.0, 1.0), 0, 5.0)
    assert placed(gated, world, ("c", 5)) == [None]
    gated.tend(14.0)
    assert comes("d", 30, 1, 14.0)


@pytest.mark.slow
def test_unsupported_fields_are_named() -> None:
    shown = subprocess.run(
        [sys.executable, "-m", "benchmarks.device_truth", "--mix", "huge"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert shown.returncode == 2
    assert "mix 'huge' is not one of: 4-60, 8/64, 6/10, openb" in " ".join(shown.stderr.split())


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
def test_what_an_oracle_knows_bounds_what_predictions_can_use(
    row: str, used_pct: float, rejected_pct: float
) -> None:
    found = play(Run(row, "4-60", seed=1, pods=150, horizon=30, nodes=3))
    assert found == pytest.approx((used_pct, rejected_pct), abs=0.05)
