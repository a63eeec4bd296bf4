"""Compares one pool with two pools, in figures that an independent first-come replay computes."""

import heapq
import json
from pathlib import Path

import pytest

from headroom.planner.scenarios import Configuration, answer, baseline, exclusive_pool
from headroom.planner.study import run_study
from headroom.planner.workload import DAY_S, History, Life, Machine, Vram
from tests.plan.small_history import files, run

GIB = 1 << 30
PEAKS = Vram("peaks", 0.1)
__all__ = ["files"]


def history(trains: int = 2, webs: int = 12) -> History:
    """Return a day in which training by night needs all GPUs of a node, and inference by day shares
    them."""
    lives = [
        Life(f"train-{n}", "train", 60.0 * n, 3600.0, 4, None, 20 * GIB) for n in range(trains)
    ]
    lives += [
        Life(f"web-{n}", "web", DAY_S / 2 + 60.0 * n, 3600.0, 1, None, 5 * GIB) for n in range(webs)
    ]
    machines = tuple(Machine(f"n{n}", "L4", 4, 24 * GIB) for n in range(5))
    return History(machines, tuple(lives), ())


def fewest_by_hand(given: History, replicas: int) -> int:
    """Return the fewest nodes on which no pod waits. Each pod goes to the first devices that fit,
    and a pod with several GPUs gets empty devices of one node."""
    size = given.machines[0].memory_bytes
    for count in range(1, 20):
        left = [[size] * given.machines[0].gpus for _ in range(count)]
        free = [[replicas] * given.machines[0].gpus for _ in range(count)]
        ends: list[tuple[float, int, list[int], int]] = []
        waits = False
        for life in given.lives:
            while ends and ends[0][0] <= life.created_s:
                _, node, devices, need = heapq.heappop(ends)
                for device in devices:
                    left[node][device] += need
                    free[node][device] += 1
            need = size if life.gpus > 1 else PEAKS.need_bytes(life) or size
            for node in range(count):
                fits = [
                    device
                    for device in range(given.machines[0].gpus)
                    if left[node][device] >= need and free[node][device]
                ]
                if len(fits) >= life.gpus:
                    for device in fits[: life.gpus]:
                        left[node][device] -= need
                        free[node][device] -= 1
                    end = life.created_s + life.run_s
                    heapq.heappush(ends, (end, node, fits[: life.gpus], need))
                    break
            else:
                waits = True
        if not waits:
            return count
    raise AssertionError("no number of nodes suffices")


def needed(given: History, configuration: Configuration) -> int | None:
    today = baseline(given, given.lives, 0)
    exclusive = exclusive_pool(given, given.lives, configuration, 0, today)
    found = answer(given, given.lives, configuration, 0, today, exclusive)
    assert found.out_of_memory == 0
    return None if found.needed is None else len(found.machines)


@pytest.mark.parametrize(("trains", "webs"), [(2, 12), (1, 30), (3, 8), (0, 20)])
def test_one_pool_needs_as_many_nodes_as_a_replay_by_hand(trains: int, webs: int) -> None:
    given = history(trains, webs)
    one_pool = Configuration("steered", 4, PEAKS, one_pool=True)
    assert needed(given, one_pool) == fewest_by_hand(given, 4)


def test_two_pools_need_the_nodes_of_both() -> None:
    """Training needs two nodes by night, and inference one node by day. In one pool, they use the
    same two nodes one after the other."""
    given = history()
    assert needed(given, Configuration("steered", 4, PEAKS)) == 3
    assert needed(given, Configuration("steered", 4, PEAKS, one_pool=True)) == 2


def test_the_wait_of_a_few_training_pods_is_not_hidden_by_many_other_pods() -> None:
    """On one node, the second training pod would wait for 9 minutes. The mean over all pods would
    be 4.4 s, which counts as no waiting."""
    lives = [Life(f"train-{n}", "train", 60.0 * n, 600.0, 4, None, 20 * GIB) for n in range(2)]
    lives += [
        Life(f"web-{n}", "web", DAY_S / 2 + 30.0 * n, 60.0, 1, None, 5 * GIB) for n in range(120)
    ]
    given = History(history().machines, tuple(lives), ())
    assert needed(given, Configuration("steered", 4, PEAKS, one_pool=True)) == 2


def test_a_pod_whose_peak_plus_margin_exceeds_a_gpu_gets_a_whole_gpu_in_one_pool() -> None:
    chat = Life("chat", "chat", 0.0, DAY_S, 1, None, 24 * GIB)
    given = History(history().machines, (chat, *history().lives), ())
    assert (PEAKS.need_bytes(chat) or 0) > given.machines[0].memory_bytes
    assert needed(given, Configuration("steered", 4, PEAKS, one_pool=True)) == 3


def test_the_study_adds_one_pool_only_if_pods_need_gpus_of_their_own() -> None:
    configurations = [Configuration("predicted", 4, PEAKS)]
    for trains, expected in ((2, ["4 replicas, steered, one pool"]), (0, [])):
        study = run_study(history(trains), configurations, [PEAKS], 1, 1, lambda step: None)
        names = [row.configuration.text for row in study.rows]
        assert names == ["4 replicas, predicted", *expected]


def test_the_report_compares_one_pool(files: tuple[Path, Path]) -> None:
    arguments = ("--device-choice", "steered", "--replicas", "4", "--seeds", "1")
    code, told, _ = run(files, *arguments)
    assert code == 0
    words = " ".join(told.split())
    assert "With all pods on the same steered nodes (4 replicas), the work needs " in words
    assert "4 replicas, steered, one pool " in told
    assert "With one pool, they get GPUs of their own on the shared nodes" in words
    code, told, _ = run(files, *arguments, "--json")
    names = [row["configuration"] for row in json.loads(told)["configurations"]]
    assert "4 replicas, steered, one pool" in names
