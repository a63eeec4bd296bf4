"""Tests the placers of a plan: Headroom's decisions, and replica counting."""

import random

import numpy as np
import pytest

from benchmarks.device_truth import agents, world
from benchmarks.packing import product
from benchmarks.packing.product import Headroom
from benchmarks.packing.workload import REPLICAS, Ask, Node
from headroom.planner.placers import ByCounting, ByHeadroom, Placer, Request, Spot
from headroom.planner.simulated_fleet import Sharing
from headroom.planner.workload import Machine

MIB = 1 << 20
GIB = 1 << 30


def machines(*sizes_mib: int, gpus: int = 4) -> list[Machine]:
    return [
        Machine(f"node-{at:04d}", f"m{size}", gpus, size * MIB) for at, size in enumerate(sizes_mib)
    ]


def asked(need_bytes: int | None, gpus: int = 1) -> Request:
    return Request(gpus, need_bytes, frozenset(), 0, 0)


@pytest.mark.slow
def test_a_steered_replay_decides_like_an_extender_with_ledger_and_agents(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """``Headroom`` of the benchmarks runs extender, ledger and agent with their own code.

    Its drivers reserve no memory, as in a plan. Otherwise the best fit could differ for pods whose
    nodes have almost equal scores.
    """
    for module in (agents, product, world):
        monkeypatch.setattr(module, "RESERVED_BYTES", 0)
    sizes = [24_000] * 3 + [40_000] * 2
    there = machines(*sizes)
    plan: Placer = ByHeadroom(there, Sharing(REPLICAS, steered=True), 1)
    nodes = [
        Node(each.name, 0, 0, 4, each.model, size) for each, size in zip(there, sizes, strict=True)
    ]
    real = Headroom(nodes, "vram", "fragmentation", "steered", 1, ())
    lots, everywhere = random.Random(5), np.arange(len(there))
    held: dict[str, Spot] = {}
    rejected = 0
    for number in range(220):
        name, size_mib = f"p{number}", lots.choice([2000, 5000, 9000, 14_000, 30_000])
        spot = plan.place(name, asked(size_mib * MIB), everywhere)
        placed = real.choose(name, Ask(0, 0, 1, size_mib, frozenset()), everywhere)
        assert (spot and (spot.machine, spot.devices)) == placed, name
        rejected += spot is None
        if spot is not None:
            held[name] = spot
        while held and lots.random() < 0.45:
            ended = lots.choice(sorted(held))
            plan.end(ended, held.pop(ended))
            real.ended(ended)
    assert len(held) > 30
    assert rejected >= 3


def test_a_predicted_replay_places_no_pod_that_the_plugin_could_overcommit() -> None:
    there = machines(24_000, 24_000)
    free = [[24_000 * MIB] * 4 for _ in there]
    plan = ByHeadroom(there, Sharing(6), 3)
    lots, rejected = random.Random(2), 0
    held: dict[str, tuple[Spot, int]] = {}
    for number in range(300):
        name, size = f"p{number}", lots.randint(2, 14) * GIB
        spot = plan.place(name, asked(size), np.arange(2))
        rejected += spot is None
        if spot is not None:
            held[name] = spot, size
            (device,) = spot.devices
            free[spot.machine][device] -= size
            assert free[spot.machine][device] >= 0
        while held and lots.random() < 0.4:
            ended = lots.choice(sorted(held))
            spot, size = held.pop(ended)
            free[spot.machine][spot.devices[0]] += size
            plan.end(ended, spot)
    assert rejected > 20


def test_unshared_gpus_take_one_pod_each_even_if_pods_have_several_gpus() -> None:
    plan = ByHeadroom(machines(24_000, 24_000), Sharing(), 1)
    spots = [plan.place(f"p{n}", asked(None, gpus), np.arange(2)) for n, gpus in enumerate((3, 1))]
    assert sorted(len(spot.devices) for spot in spots if spot) == [1, 3]
    assert spots[0] is not None
    assert len(set(spots[0].devices)) == 3
    assert plan.place("four", asked(None, 4), np.arange(2)) is not None
    assert plan.place("five", asked(None, 1), np.arange(2)) is None
    plan.end("p0", spots[0])
    assert plan.place("six", asked(None, 3), np.arange(2)) is not None


def test_replica_counting_ignores_memory_and_spreads() -> None:
    plan = ByCounting(machines(24_000, 24_000), Sharing(2), 1)
    spots = [plan.place(f"p{n}", asked(23_000 * MIB), np.arange(2)) for n in range(16)]
    used = [(spot.machine, spot.devices[0]) for spot in spots if spot]
    assert sorted(used) == sorted((m, d) for m in range(2) for d in range(4) for _ in range(2))
    assert {used[0][0], used[1][0]} == {0, 1}
    assert plan.place("more", asked(1), np.arange(2)) is None
    assert spots[0] is not None
    plan.end("p0", spots[0])
    assert plan.place("again", asked(1), np.arange(2)) == spots[0]


def test_a_running_pod_keeps_its_replica_for_the_plugin() -> None:
    """The plugin's next choice is the GPU with one pod. If a pod could leave the other GPU, that
    GPU would be possible too, and the fourth pod would not fit there.
    """
    plan = ByHeadroom(machines(24 * 1024, gpus=2), Sharing(4), 1)
    row = np.arange(1)
    spots = [plan.place(str(size), asked(size * GIB), row) for size in (4, 8, 12)]
    used = [0, 0]
    for spot, size in zip(spots, (4, 8, 12), strict=True):
        assert spot is not None
        used[spot.devices[0]] += size
    fourth = plan.place("14", asked(14 * GIB), row)
    assert fourth is not None
    assert fourth.devices == (used.index(min(used)),)
    assert plan.place("more", asked(14 * GIB), row) is None
    plan.end("14", fourth)
    assert plan.place("again", asked(14 * GIB), row) == fourth
