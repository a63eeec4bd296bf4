"""Tests MIG in a plan: profiles by model, placement on instances, and their costs."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from headroom.commands import app
from headroom.planner.contention import Contentions
from headroom.planner.mig import profile_of, split_by_mig
from headroom.planner.placers import ByHeadroom, Request, Spot
from headroom.planner.simulated_fleet import Sharing
from headroom.planner.workload import Life, Machine

GIB, MIB = 1 << 30, 1 << 20
H100_MIB = 81_559


@pytest.mark.parametrize(
    ("model", "profiles"),
    [
        ("NVIDIA A100-SXM4-80GB", {"1g": 7, "2g": 3, "3g": 2}),
        ("NVIDIA H100 80GB HBM3", {"1g": 7, "2g": 3, "3g": 2}),
        ("H20", {"1g": 7, "2g": 3, "3g": 2}),
        ("NVIDIA GB200", {"1g": 7, "2g": 3, "3g": 2}),
        ("NVIDIA A30", {"1g": 4, "2g": 2, "3g": None}),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", {"1g": 4, "2g": 2, "3g": None}),
        ("NVIDIA-RTX-PRO-6000-Blackwell-Server-Edition", {"1g": 4}),
        ("NVIDIA L40S", {"1g": None, "2g": None, "3g": None}),
        ("NVIDIA A10", {"1g": None}),
        ("Tesla T4", {"1g": None}),
        ("A1000", {"1g": None}),
    ],
)
def test_profiles_depend_on_the_model(model: str, profiles: dict[str, int | None]) -> None:
    for name, count in profiles.items():
        found = profile_of(model, name)
        assert (None if found is None else found.count) == count


def test_gpus_are_split_into_instances_with_a_part_of_the_memory() -> None:
    machines = [Machine("a", "H100", 2, 80 * GIB), Machine("b", "L40S", 2, 45 * GIB)]
    (split,) = split_by_mig(machines, "2g")
    assert (split.name, split.gpus, split.instances, split.devices) == ("a", 2, 3, 6)
    assert split.memory_bytes == int(80 * GIB / 4 * 0.9)
    assert split.sm_share == pytest.approx(2 / 7)


def test_each_instance_takes_one_pod_that_fits() -> None:
    machines = split_by_mig([Machine("a", "H100", 2, 80 * GIB)], "3g")
    plan = ByHeadroom(machines, Sharing(), 1)
    row = np.arange(1)

    def place(name: str, gib: int) -> Spot | None:
        return plan.place(name, Request(1, gib * GIB, frozenset(), 0, 0), row)

    assert place("large", 37) is None  # An instance has 36 GiB.
    spots = [place(f"p{n}", 10) for n in range(4)]
    assert {spot.devices[0] for spot in spots if spot} == {0, 1, 2, 3}
    assert place("more", 1) is None
    assert spots[2] is not None
    plan.end("p2", spots[2])
    assert place("again", 36) == spots[2]


def test_a_pod_takes_longer_on_an_instance_if_it_was_more_active_than_the_instance_allows() -> None:
    found, here = Contentions([2 / 7]), Spot(0, (0,))
    busy = Life("busy", "busy", 0.0, 100.0, 1, None, GIB, 4 / 7)
    calm = Life("calm", "calm", 0.0, 100.0, 1, None, GIB, 0.25)
    found.start(0, busy, here, 0.0)
    found.end(0, here, 100.0)
    found.start(1, calm, here, 100.0)
    found.end(1, here, 200.0)
    result = found.result()
    assert (result.run_s, result.competing_s) == (200.0, 100.0)
    assert result.lost_s == pytest.approx(50.0)


def files(tmp_path: Path, nodes: list[str]) -> list[str]:
    """Return files with 14 concurrent pods of 8 GiB and one of 38 GiB on each of two days."""
    rows = ["name,workload,num_gpu,peak_mib,sm_ratio,creation_time,scheduled_time,deletion_time"]
    for day in range(2):
        at = day * 86_400
        rows += [f"s{day}-{n},small,1,8000,0.1,{at},{at},{at + 600}" for n in range(14)]
        rows.append(f"l{day},large,1,38000,0.1,{at},{at},{at + 600}")
    pods, machines = tmp_path / "pods.csv", tmp_path / "nodes.csv"
    pods.write_text("\n".join(rows) + "\n")
    machines.write_text("\n".join(["name,gpu,model,gpu_mem_mib", *nodes]) + "\n")
    few = ["--seeds", "1", "--processes", "1", "--vram", "peaks", "--json"]
    return ["plan", "--pods", str(pods), "--machines", str(machines), *few]


def test_layouts_are_compared_and_pods_that_fit_on_no_instance_keep_a_gpu(tmp_path: Path) -> None:
    nodes = [f"h{n},1,H100,{H100_MIB}" for n in range(20)]
    found = CliRunner().invoke(app, [*files(tmp_path, nodes), "--device-choice", "mig"])
    assert found.exit_code == 0, found.stderr
    data = json.loads(found.stdout)
    gpus = {each["configuration"]: each["replays"][0]["gpus"] for each in data["configurations"]}
    # 14 pods need 2, 5 or 7 GPUs. The large pod fits on an instance of 35.8 GiB only without the
    # margin, so it keeps its own GPU.
    assert gpus == {"unshared": 15, "MIG 1g": 3, "MIG 2g": 6, "MIG 3g": 8}
    assert (
        "With all shared GPUs split into MIG instances 1g, which keep pods apart, it needs 3 GPUs, "
        "and pods lose less than 1 % of their running time."
    ) in data["sentences"]


@pytest.mark.slow
def test_models_without_mig_take_only_unshared_pods(tmp_path: Path) -> None:
    nodes = [f"l{n},1,L40S,46068" for n in range(20)]
    nodes += [f"h{n},1,H100,{H100_MIB}" for n in range(20)]
    found = CliRunner().invoke(app, [*files(tmp_path, nodes), "--device-choice", "mig"])
    data = json.loads(found.stdout)
    by_name = {each["configuration"]: each["replays"][0] for each in data["configurations"]}
    assert by_name["MIG 1g"]["models"] == {"H100": 2, "L40S": 1}
    note = (
        "MIG is not compared for L40S: NVIDIA's list of GPUs with MIG does not contain such models."
    )
    assert note in data["assumptions"]


def test_a_cluster_without_mig_capable_gpus_gives_an_error_or_a_note(tmp_path: Path) -> None:
    arguments = files(tmp_path, [f"l{n},1,L40S,46068" for n in range(20)])
    found = CliRunner().invoke(app, [*arguments, "--device-choice", "mig"])
    assert found.exit_code == 2
    assert found.stderr == (
        "headroom: --device-choice mig: no GPU of the cluster supports MIG. Its models: L40S. "
        "Example: --device-choice steered\n"
    )
