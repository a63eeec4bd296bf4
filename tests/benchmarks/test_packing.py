"""Tests the packing benchmark: its input files, its judge, and the published results of its
rules.
"""

import itertools
import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.packing import fleets, golden
from benchmarks.packing.hindsight import bound
from benchmarks.packing.judge import Device, Judge, Place
from benchmarks.packing.pools import unshared
from benchmarks.packing.runs import Run, play
from benchmarks.packing.workload import (
    Ask,
    Node,
    ask,
)
from tests.controlplane import ROOT
from tests.waiting import PATIENCE_S

OPENB = ROOT.parent / "shared" / "data" / "openb"


@pytest.mark.skipif(not OPENB.exists(), reason="the published trace is not beside this repository")
def test_reference_results_are_reproduced_on_a_small_cluster() -> None:
    """``gpubest`` is excluded, because no known definition reproduces all of its figures."""
    seen = 0
    for wanted, run in golden.runs(OPENB):
        if wanted["cluster"] == "small" and run.seed < 102 and run.policy != "gpubest":
            off = golden.deviations(wanted, play(run))
            assert max(map(abs, off.values())) <= 0.1, (run.seed, run.policy, off)
            seen += 1
    assert seen == 8


def test_the_judge_counts_as_by_hand() -> None:
    judge = Judge([Place(1000, 1000, "T4", [Device(100, 100, 2), Device(100, 100, 2)])])
    share = Ask(100, 100, 1, 40, frozenset())
    assert judge.came("a", share, 0, (0,))
    assert judge.came("b", share, 0, (0,))
    assert judge.idle == 120
    wrong = [
        (share, (0,)),  # It does not fit.
        (Ask(100, 100, 1, 5, frozenset()), (0,)),  # no replica
        (Ask(100, 100, 1, None, frozenset()), (0,)),  # not empty
        (Ask(2000, 100, 0, 0, frozenset()), ()),  # no CPU
        (Ask(100, 2000, 0, 0, frozenset()), ()),  # no memory
        (Ask(100, 100, 1, 40, frozenset({"A10"})), (1,)),  # another model
        (Ask(100, 100, 2, None, frozenset()), (1, 1)),  # placed twice
    ]
    for number, (each, devices) in enumerate(wrong, 1):
        assert not judge.came("c", each, 0, devices)
        assert judge.overcommits == number
    judge.went("a")
    judge.went("b")
    assert judge.came("d", Ask(1000, 1000, 2, None, frozenset()), 0, (0, 1))
    assert judge.idle == 0


def gpu_node(gpus: int, mib: int, model: str = "A100") -> Node:
    return Node("n", 10_000, 10_000, gpus, model, mib)


def asked(gpus: int, amount: int | None = None, *models: str) -> Ask:
    return Ask(1, 1, gpus, amount, frozenset(models))


@pytest.mark.parametrize(
    ("times", "small", "expected"),
    [
        # 8 of 16 devices' memory is requested by pods with 8 devices.
        pytest.param(1.0, 16, 5, id="half of ten nodes"),
        pytest.param(0.8, 16, 4, id="20 % too small"),
        pytest.param(1.2, 16, 6, id="20 % too large"),
        # Pods that share count with their memory and not as whole devices.
        pytest.param(1.0, 8, 7, id="two thirds"),
        pytest.param(1.0, 0, 10, id="no other pods"),
    ],
)
def test_the_unshared_pool_has_the_size_of_the_demand(
    times: float, small: int, expected: int
) -> None:
    nodes = [gpu_node(8, 100)] * 10
    asks = [asked(8)] * 2 + [asked(1, 100)] * small
    assert len(unshared(nodes, asks, "vram", times)) == expected
    halves = [asked(8)] * 2 + [asked(1, 50)] * (2 * small)
    assert len(unshared(nodes, halves, "vram", times)) == expected


def test_each_model_has_its_own_part_of_the_unshared_pool() -> None:
    nodes = [gpu_node(8, 100)] * 4 + [gpu_node(4, 100, "L4")] * 4 + [gpu_node(1, 100, "L4")] * 2
    asks = [asked(8)] * 2 + [asked(1, 100, "A100")] * 16 + [asked(1, 10)] * 3
    # Only the first nodes have 8 devices. Half of their memory is requested by pods with 8.
    assert unshared(nodes, asks, "vram") == [0, 1]
    assert unshared(nodes, [asked(2, None, "L4"), *[asked(1, 100, "L4")] * 2], "vram") == [4, 5]
    assert unshared(nodes, [asked(1, 50)] * 9, "vram") == []


def test_no_placement_exceeds_the_bound() -> None:
    """All placements of a few pods on three devices are tried."""
    lots = random.Random(7)
    tight = 0
    for _ in range(40):
        nodes = [gpu_node(1, 22), gpu_node(1, 22), gpu_node(1, 16, "T4")]
        pods = [
            asked(1, lots.choice([5, 8, 12, 14, 16]), *lots.choice([(), ("A100",), ("T4",)]))
            for _ in range(6)
        ]
        best = 0
        for places in itertools.product((0, 1, 2, None), repeat=len(pods)):
            used = [0, 0, 0]
            for pod, place in zip(pods, places, strict=True):
                if place is not None:
                    right = not pod.models or nodes[place].model in pod.models
                    used[place] += (pod.amount or 0) if right else 999
            if all(use <= node.device_mib for use, node in zip(used, nodes, strict=True)):
                best = max(best, sum(used))
        found = bound(nodes, pods)
        assert found >= best - 1e-6
        tight += found < best + 0.15 * best
    assert tight > 10
    # No device of 22 MiB holds two pods of 12 MiB.
    assert bound([gpu_node(1, 22)] * 2, [asked(1, 12)] * 4) == pytest.approx(24, abs=0.5)


@pytest.mark.parametrize("name", [*fleets.NAMED, "fleet-1", "fleet-101"])
def test_a_fleet_requests_its_capacity_and_all_its_pods_fit_on_an_empty_node(name: str) -> None:
    nodes, pods = fleets.fleet(name)
    assert fleets.fleet(name) == (nodes, pods)
    for each in map(ask, pods, ["vram"] * len(pods)):
        assert any(
            node.gpus >= each.gpus
            and node.cpu_milli >= each.cpu_milli
            and (not each.models or node.model in each.models)
            and node.device_mib >= (each.amount or 0)
            for node in nodes
        )


def test_one_pool_and_two_pools_play_the_same_pods() -> None:
    nodes, pods = fleets.fleet("training")
    asks = tuple(ask(pod, "vram") for pod in pods)
    for daily in (False, True):
        run = Run(tuple(nodes), asks, "vram", "bestfit", "mixed", "own", 1, churn=True, daily=daily)
        found = play(run)
        assert found["overcommits"] == found["unshared_nodes"] == 0
        assert 70 < found["running_pct"] <= 100
    two = play(Run(tuple(nodes), asks, "vram", "bestfit", "steered", "own", 1))
    assert two["unshared_nodes"] == len(unshared(nodes, asks, "vram")) > 0


NODE_COLUMNS = "name,cpu_milli,memory_mib,gpu,model,gpu_mem_mib"
POD_COLUMNS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,vram_mib"


def told_by(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.packing", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )


@pytest.mark.slow
def test_the_command_prints_one_json_object_or_an_error(tmp_path: Path) -> None:
    (tmp_path / "nodes.csv").write_text(f"{NODE_COLUMNS}\na,9000,9000,2,T4,100\n")
    (tmp_path / "pods.csv").write_text(f"{POD_COLUMNS}\np,10,10,1,500,,40\nq,10,10,1,1000,,-1\n")
    files = ["--nodes", str(tmp_path / "nodes.csv"), "--pods", str(tmp_path / "pods.csv")]
    shown = told_by(*files, "--policy", "bestfit", "--seed", "3", "--json")
    assert shown.returncode == 0, shown.stderr
    (run,) = json.loads(shown.stdout)["runs"]
    assert run["policy"] == "bestfit"
    assert run["overcommits"] == 0
    (tmp_path / "pods.csv").write_text(f"{POD_COLUMNS}\np,ten,10,1,500,,40\n")
    wrong = told_by(*files)
    assert wrong.returncode == 2
    words = " ".join(wrong.stderr.replace("│", "").split())
    assert "line 2, column cpu_milli: 'ten' is not a whole number. Example: " in words
