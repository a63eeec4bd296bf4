"""Tests the packing benchmark: its input files, its judge, and the published results of its
rules.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.packing import golden
from benchmarks.packing.judge import Device, Judge, Place
from benchmarks.packing.runs import play
from benchmarks.packing.workload import (
    Ask,
    read_nodes,
    read_pods,
)
from headroom.errors import BadSettings
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
