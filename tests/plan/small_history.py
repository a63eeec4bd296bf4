"""A small history of pods in files, and `headroom plan` run on it."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from headroom.commands import app

GIB = 1 << 30
PODS = "name,workload,num_gpu,vram_mib,peak_mib,sm_ratio,creation_time,scheduled_time,deletion_time"
NODES = "name,gpu,model,gpu_mem_mib"
HOUR_S = 3600
#: Options of a plan that compares few configurations, and prints them as JSON.
FEW = ("--replicas", "4", "--device-choice", "counting", "--seeds", "1", "--json")


def rows() -> list[str]:
    """Return rows of two days, with four concurrent pods of 5 GiB every four hours, and a daily pod
    with two GPUs.
    """
    found = []
    for hour in range(0, 48, 4):
        at = hour * HOUR_S
        for number in range(4):
            name = f"web-{hour}-{number}"
            found.append(f"{name},web,1,-1,5120,0.25,{at},{at},{at + 3000}")
    for day in range(2):
        at = day * 24 * HOUR_S + 600
        found.append(f"train-{day},train,2,-1,9000,0.9,{at},{at + 5},{at + 7200}")
    return found


@pytest.fixture
def files(tmp_path: Path) -> tuple[Path, Path]:
    pods, nodes = tmp_path / "pods.csv", tmp_path / "nodes.csv"
    pods.write_text("\n".join([PODS, *rows()]) + "\n")
    nodes.write_text("\n".join([NODES, *(f"n{at},2,L4,23034" for at in range(5))]) + "\n")
    return pods, nodes


def run(files: tuple[Path, Path], *more: str) -> tuple[int, str, str]:
    pods, machines = files
    arguments = ["plan", "--pods", str(pods), "--machines", str(machines), "--processes", "1"]
    found = CliRunner().invoke(app, [*arguments, *more])
    return found.exit_code, found.stdout, found.stderr
