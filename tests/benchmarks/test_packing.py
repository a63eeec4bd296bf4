"""Tests the packing benchmark: its files, its judge, and its rules against plain definitions."""

import json
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from benchmarks.packing import golden, synthetic
from benchmarks.packing.judge import Device, Judge, Place
from benchmarks.packing.play import Inflation, shuffled
from benchmarks.packing.rules import RULES, Fleet
from benchmarks.packing.runs import play
from benchmarks.packing.workload import (
    Ask,
    Demand,
    Mode,
    Node,
    ask,
    read_nodes,
    read_pods,
)
from headroom.errors import BadSettings
from tests.controlplane import ROOT

OPENB = ROOT.parent / "shared" / "data" / "openb"
NODES = synthetic.nodes(part=64)
PODS = synthetic.pods()


class Plain:
    """A rule from one of the papers, applied to one node after the other, without arrays or caches.
    The vectorised rules must agree with it pod by pod.
    """

    def __init__(self, policy: str, nodes: Sequence[Node], asks: Sequence[Ask], mode: Mode) -> None:
        self.policy, self.nodes, self.mode = policy, nodes, mode
        size = {"milli": lambda n: 1000, "vram": lambda n: n.device_mib}[mode]
        self.size = [size(node) for node in nodes]
        self.cpu = [node.cpu_milli for node in nodes]
        self.left = [[self.size[i]] * node.gpus for i, node in enumerate(nodes)]
        self.held = [[0] * node.gpus for node in nodes]
        self.mean = sum(map(sum, self.left)) / sum(node.gpus for node in nodes)
        counts = Counter((a.cpu_milli, a.gpus, a.amount) for a in asks)
        key = {k: (n, k[0], math.inf if k[2] is None else k[2], k[1]) for k, n in counts.items()}
        self.mix: dict[tuple[int, int, int | None], int] = {}
        for kind in sorted(counts, key=lambda k: key[k], reverse=True):
            if sum(self.mix.values()) < 0.95 * len(asks):
                self.mix[kind] = counts[kind]
        self.total = sum(self.mix.values())

    def choose(self, a: Ask, offered: Sequence[int]) -> tuple[int, tuple[int, ...]] | None:
        options = []
        for i in offered:
            for devices in self.options(a, i):
                score, tie = self.score(a, i, devices), self.best_fit(a, i)
                options.append(((score, tie if self.policy == "fgdu" else 0), i, devices))
        if not options:
            return None
        top = max(option[0] for option in options)
        _, i, devices = next(option for option in options if option[0] == top)
        self.cpu[i] -= a.cpu_milli
        for d in devices:
            self.left[i][d] = 0 if a.amount is None else self.left[i][d] - a.amount
            self.held[i][d] += 1
        return i, devices

    def options(self, a: Ask, i: int) -> list[tuple[int, ...]]:
        devices = range(len(self.left[i]))
        if a.amount is None:
            empty = [d for d in devices if self.left[i][d] == self.size[i]]
            return [tuple(empty[: a.gpus])] if len(empty) >= a.gpus else []
        if not a.gpus:
            return [()]
        most = 10 if self.mode == "vram" else math.inf
        could = [d for d in devices if self.left[i][d] >= a.amount and self.held[i][d] < most]
        if self.policy == "bestfit":
            could = sorted(could, key=lambda d: self.left[i][d])[:1]
        if self.policy == "worstfit":
            could = sorted(could, key=lambda d: -self.left[i][d])[:1]
        return [(d,) for d in could]

    def best_fit(self, a: Ask, i: int) -> float:
        worth = a.gpus * self.mean if a.amount is None else a.amount
        gpu = (sum(self.left[i]) - worth) / (8 * self.mean)
        return 1 - (0.5 * (self.cpu[i] - a.cpu_milli) / 128000 + 0.5 * gpu)

    def score(self, a: Ask, i: int, devices: tuple[int, ...]) -> float:
        if self.policy in ("bestfit", "worstfit"):
            fit = self.best_fit(a, i)
            return math.floor(100 * (fit if self.policy == "bestfit" else 1 - fit))
        then = list(self.left[i])
        for d in devices:
            then[d] = 0 if a.amount is None else then[d] - a.amount
        free = [
            self.held[i][d] + (d in devices) < 10 or self.mode == "milli" for d in range(len(then))
        ]
        now = [held < 10 or self.mode == "milli" for held in self.held[i]]
        change = self.usable(i, self.cpu[i] - a.cpu_milli, then, free) - self.usable(
            i, self.cpu[i], self.left[i], now
        )
        if self.policy == "fgdu":
            return round(change, 6)
        change += sum(self.left[i]) - sum(then)
        return math.floor(100 / (1 + math.exp(-change / self.mean)))

    def usable(self, i: int, cpu: int, left: Sequence[int], free: Sequence[bool]) -> float:
        found = 0.0
        for (wants, gpus, amount), count in self.mix.items():
            if amount is None:
                could = [x for x in left if x == self.size[i]]
            else:
                could = [x for x, f in zip(left, free, strict=True) if f and x >= amount]
            if gpus and cpu >= wants and len(could) >= gpus:
                found += count / self.total * sum(could)
        return found


@pytest.mark.parametrize("mode", ["milli", "vram"])
@pytest.mark.parametrize("policy", ["bestfit", "worstfit", "fgd", "fgdu"])
def test_rules_choose_according_to_their_definitions(policy: str, mode: Mode) -> None:
    nodes = NODES[::3]
    asks = [ask(pod, mode) for pod in PODS[::24]]
    demand = Demand(nodes, mode)
    rule = RULES[policy](Fleet(nodes, mode), demand, asks, np.arange(len(nodes)))
    plain = Plain(policy, nodes, asks, mode)
    memory = [node.memory_mib for node in nodes]
    worth = [demand.of(each) for each in asks]
    placed = 0
    for number, index in enumerate(shuffled(worth, demand.capacity, seed=1)):
        a = asks[index]
        rows = [
            i
            for i in range(len(nodes))
            if plain.cpu[i] >= a.cpu_milli and memory[i] >= a.memory_mib
        ]
        mine = plain.choose(a, rows)
        assert rule.choose(f"p{number}", a, np.array(rows, np.int64)) == mine, number
        if mine is not None:
            memory[mine[0]] -= a.memory_mib
            placed += 1
    assert 40 < placed < number  # Some were rejected.


@pytest.mark.skipif(not OPENB.exists(), reason="the published trace is not beside this repository")
def test_reference_results_are_reproduced_on_a_small_cluster() -> None:
    """All but ``gpubest``, because no known definition reproduces all its figures."""
    seen = 0
    for wanted, run in golden.runs(OPENB):
        if wanted["cluster"] == "small" and run.seed < 102 and run.policy != "gpubest":
            off = golden.deviations(wanted, play(run))
            assert max(map(abs, off.values())) <= 0.1, (run.seed, run.policy, off)
            seen += 1
    assert seen == 8


def node(name: str = "n", gpus: int = 2, model: str = "T4", mib: int = 100) -> Node:
    return Node(name, 1000, 1000, gpus, model, mib)


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


def test_admissions_are_the_mean_over_the_arrivals_at_or_nearest_to_a_point() -> None:
    found = Inflation(capacity=1000)
    for arrived, admitted in ((896, 800), (904, 810), (906, 900), (1040, 950)):
        found.note(arrived, admitted, 1000 - admitted)
    assert found.admitted(90) == pytest.approx(80.5)
    assert found.idle(90) == pytest.approx(19.5)
    assert found.admitted(100) == pytest.approx(95)


def test_a_request_for_a_whole_device_counts_as_the_mean_of_its_possible_devices() -> None:
    demand = Demand([node(gpus=2, mib=100), node(gpus=1, model="A10", mib=400)], "vram")
    assert demand.of(Ask(0, 0, 2, None, frozenset())) == 2 * 200
    assert demand.of(Ask(0, 0, 1, None, frozenset({"A10"}))) == 400
    assert demand.of(Ask(0, 0, 1, 50, frozenset({"A10"}))) == 50


NODE_COLUMNS = "name,cpu_milli,memory_mib,gpu,model,gpu_mem_mib"
POD_COLUMNS = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,vram_mib"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param(
            "name,cpu_milli\n", "line 1: column memory_mib is missing. Example", id="no column"
        ),
        pytest.param(
            f"{NODE_COLUMNS}\nn,1,2,9,T4,5\n",
            "line 2, column gpu: '9' is not a whole number from 0 to 8. Example: 8",
            id="too many devices",
        ),
        pytest.param(
            f"{NODE_COLUMNS}\nn,1e3,2,1,T4,5\n",
            "line 2, column cpu_milli: '1e3' is not a whole number. Example: 96000",
            id="no whole number",
        ),
        pytest.param(
            f"{NODE_COLUMNS}\nn,1,2,1,T4\n",
            "line 2: the number of cells is not 6, as in line 1",
            id="cell missing",
        ),
        pytest.param(
            f"{NODE_COLUMNS}\nn,1,2,1,T4,{'9' * 5000}\n", "column gpu_mem_mib: '9999", id="digits"
        ),
        pytest.param("\0\xff", "is not a CSV file in UTF-8", id="not text"),
    ],
)
def test_bad_files_are_rejected_with_the_place_and_an_example(
    text: str, shown: str, tmp_path: Path
) -> None:
    path = tmp_path / "nodes.csv"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(BadSettings, match=r"nodes\.csv") as caught:
        read_nodes(path)
    assert shown in str(caught.value)


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        pytest.param("p,1,2,1,1001,,5", "column gpu_milli: '1001'", id="more than a device"),
        pytest.param("p,1,2,1,500,,0", "column vram_mib: '0' is not more than 0", id="no memory"),
        pytest.param("p,1,2,2,1000,,7", "'7' is not -1 for a pod with several", id="several"),
        pytest.param(",1,2,0,0,,0", "column name: '' is not a name", id="no name"),
    ],
)
def test_bad_pods_are_rejected(row: str, shown: str, tmp_path: Path) -> None:
    path = tmp_path / "pods.csv"
    path.write_text(f"{POD_COLUMNS}\n{row}\n")
    with pytest.raises(BadSettings) as caught:
        read_pods(path)
    assert shown in str(caught.value)


def told_by(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "benchmarks.packing", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
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
