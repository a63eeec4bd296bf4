"""Tests that `headroom plan --nodes` adds nodes, also with new GPU models, and removes nodes."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.plan.small_history import NODES, files, run

__all__ = ["files"]
GIB = 1 << 30
FEW = ("--replicas", "2", "--device-choice", "counting", "--seeds", "1", "--vram", "peaks")


def planned(files: tuple[Path, Path], *more: str) -> dict[str, Any]:
    code, text, error = run(files, *FEW, *more, "--json")
    assert code == 0, error
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.slow
def test_more_nodes_shorten_the_wait_and_fewer_lengthen_it(files: tuple[Path, Path]) -> None:
    _, nodes = files
    nodes.write_text("\n".join([NODES, "n0,2,L4,23034"]) + "\n")

    def wait_s(data: dict[str, Any]) -> float:
        found = data["configurations"][0]["replays"][0]["today_wait_s"]
        assert isinstance(found, float)
        return found

    before = planned(files)
    assert wait_s(before) > 1000
    assert before["sentences"][0].endswith("(1 node); their median peak was 5.0 of 22.5 GiB.")
    after = planned(files, "--nodes", "+1xL4", "--nodes", "+1xL4")
    assert (after["gpus"], after["nodes"], wait_s(after)) == (6, 3, 0.0)
    assert after["sentences"][0] == (
        "Over 2 days, 50 pods with a GPU ran on a cluster of 2 GPUs (1 node); their median peak "
        "was 5.0 of 22.5 GiB. With the changes of --nodes it has 6 GPUs (3 nodes), which count as "
        "today's."
    )
    assert after["assumptions"].count("Added: 1 node with 2 L4 each.") == 2
    again = planned(files, "--nodes", "+2xL4", "--nodes", "-n0", "--nodes", "-+1")
    assert (again["gpus"], again["nodes"]) == (2, 1)
    more = ("--nodes", "+1xL4", "--nodes", "-n0", "--nodes", "+1xL4")
    assert wait_s(planned(files, *more)) < wait_s(before)
    assert wait_s(again) == wait_s(before)
    assert "Removed: node n0." in again["assumptions"]


def test_a_model_can_be_given_by_one_word_of_its_name(
    files: tuple[Path, Path], tmp_path: Path
) -> None:
    _, nodes = files
    nodes.write_text("\n".join([NODES, "n0,2,NVIDIA L4,23034", "n1,2,NVIDIA L40S,46068"]) + "\n")
    prices = tmp_path / "prices.yaml"
    prices.write_text("L4: 0.5\nNVIDIA L40S: 1\n")
    data = planned(files, "--prices", str(prices), "--nodes", "+3xL4")
    assert (data["gpus"], data["models"]["NVIDIA L4"]) == (10, 8)
    unshared = data["configurations"][0]["replays"][0]
    models = unshared["models"]
    cost = 730 * (0.5 * models["NVIDIA L4"] + models["NVIDIA L40S"])
    assert unshared["month_cost"] == cost > 0
    prices.write_text("L4: 0.5\nNVIDIA: 1\nL40S: 1")
    code, _, error = run(files, *FEW, "--prices", str(prices))
    assert code == 2
    assert "model NVIDIA L4 has more than one price" in error


@pytest.mark.parametrize(
    ("given", "models", "gib", "notes"),
    [
        pytest.param("+2xL4", {"L4": 14}, 22.5, [], id="nodes like those of the cluster"),
        pytest.param(
            "+2x4xL4", {"L4": 18}, 22.5, ["enough CPU"], id="existing nodes with more GPUs"
        ),
        pytest.param(
            "+2xl40s",
            {"L4": 10, "L40S": 4},
            44.7,
            [
                "No node of the cluster has this model.",
                "Each GPU has 44.7 GiB, its nominal 48 GB.",
                "as many GPUs as the largest node of the cluster",
                "2 pods may use only other models.",
            ],
            id="a listed model",
        ),
        pytest.param(
            "+2x8xB200:180Gi", {"L4": 10, "B200": 16}, 180.0, ["no node"], id="all values given"
        ),
    ],
)
def test_an_added_node_copies_existing_nodes_or_the_given_values(
    files: tuple[Path, Path], given: str, models: dict[str, int], gib: float, notes: list[str]
) -> None:
    pods, _ = files
    text = pods.read_text().replace("train-0,train", "train-0,train,L4")
    text = text.replace("train-1,train", "train-1,train,L4").replace(",web,", ",web,,")
    pods.write_text(text.replace("name,workload", "name,workload,gpu_spec"))
    data = planned(files, "--nodes", given)
    assert data["models"] == models
    (added,) = [each for each in data["assumptions"] if each.startswith("Added: 2 nodes with")]
    assert all(each.lower() in added.lower() for each in notes), added
    assert ("Each GPU has" in added) == ("xl40s" in given)
    assert ("as many GPUs as" in added) == ("xl40s" in given)
    # One pod fits on GPUs with this memory, and one does not.
    mib = int(gib * 1024)
    large = f"large,large,,1,-1,{mib - 100},0.1,0,0,60"
    larger = f"larger,larger,,1,-1,{mib + 200},0.1,0,0,60"
    pods.write_text(pods.read_text() + f"{large}\n{larger}\n")
    data = planned(files, "--nodes", given)
    assert data["sentences"][1].startswith(
        "1 pod fits on no node of the cluster and is left out: larger "
        f"({(mib + 200) / 1024:.1f} GiB on a GPU, but the largest has"
    )


def test_prices_cover_a_new_model(files: tuple[Path, Path], tmp_path: Path) -> None:
    prices = tmp_path / "prices.yaml"
    prices.write_text("L4: 0.5\n")
    new = ("--nodes", "+5xH100:80Gi", "--prices", str(prices))
    code, _, error = run(files, *FEW, *new)
    assert code == 2
    assert "model H100 has no price; the cluster has 10 of these GPUs. Example: H100: 1.2" in error
    prices.write_text("L4: 0.5\nH100: 3\n")
    replays = [each["replays"][0] for each in planned(files, *new)["configurations"]]
    assert "H100" in replays[0]["models"]
    for each in replays:
        models = {"L4": 0, "H100": 0} | each["models"]
        assert each["month_cost"] == 730 * (0.5 * models["L4"] + 3 * models["H100"]) > 0


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("+0xL4", "--nodes +0xL4 is not a number of nodes and a GPU model. Example: --nodes +4xL4"),
        ("+L4", "--nodes +L4 is not a number of nodes and a GPU model. Example: --nodes +4xL4"),
        ("+4x:80Gi", "--nodes +4x:80Gi is not a number of nodes and a GPU model. Example: "),
        ("+2x0xL4", "--nodes +2x0xL4: 0 GPUs of a node are not from 1 to 64. Example: "),
        ("+2x65xL4", "65 GPUs of a node are not from 1 to 64. Example: --nodes +4x8xL40S"),
        (
            "+2xL4:much",
            "'much' is not a memory of a GPU from 1Gi to 4Ti. Example: --nodes +4xL4:80",
        ),
        ("+2xL4:80", "'80' is not a memory of a GPU from 1Gi to 4Ti. Example: --nodes +4xL4:80Gi"),
        ("+2xL4:", "'' is not a memory of a GPU from 1Gi to 4Ti. Example: --nodes +4xL4:80Gi"),
        (
            "+2xB200",
            "--nodes +2xB200: no node of the cluster has the GPU model B200, and its memory is "
            "unknown. Add the memory of a GPU. Example: --nodes +4xB200:80G. Models of the "
            "cluster: L4\n",
        ),
        (
            "+2xA100",
            "has the GPU model A100, and it exists with 40 and 80 GB. Add the memory of a GPU. "
            "Example: --nodes +4xA100:80G. Models",
        ),
        ("-n9", "the history has no node 'n9' with GPUs. Its nodes: n0, n1, n2, n3, n4. Example: "),
    ],
)
def test_an_invalid_change_of_nodes_is_rejected_with_an_example(
    files: tuple[Path, Path], given: str, message: str
) -> None:
    code, _, error = run(files, "--nodes", given)
    assert code == 2
    assert error.startswith(f"headroom: --nodes {given}")
    assert message in error


def test_a_word_of_several_models_is_rejected(files: tuple[Path, Path]) -> None:
    _, nodes = files
    nodes.write_text("\n".join([NODES, "n0,2,NVIDIA L4,23034", "n1,2,NVIDIA L40S,46068"]) + "\n")
    _, _, error = run(files, "--nodes", "+2xNVIDIA")
    assert "2 GPU models of the cluster have this name: NVIDIA L4, NVIDIA L40S" in error
    assert "Example: --nodes '+4xNVIDIA L4'" in error


def test_the_last_node_cannot_be_removed(files: tuple[Path, Path]) -> None:
    _, nodes = files
    nodes.write_text("\n".join([NODES, "n0,2,L4,23034"]) + "\n")
    _, _, error = run(files, "--nodes", "-n0")
    assert "--nodes -n0: no node with GPUs would be left" in error


def test_a_pod_that_needs_the_new_gpu_leaves_its_remaining_memory_to_others(
    files: tuple[Path, Path],
) -> None:
    pods, nodes = files
    nodes.write_text("\n".join([NODES, *(f"n{at},2,L4,23034" for at in range(5))]) + "\n")
    # With its margin, the pod of 21 GiB does not fit on an L4.
    rows = [f"big-{n},big,1,-1,21504,0.2,{n},{n},{n + 600}" for n in range(2)]
    pods.write_text(pods.read_text() + "\n".join(rows) + "\n")
    code, text, _ = run(
        files,
        "--nodes",
        "+2xL40S:48Gi",
        "--replicas",
        "2",
        "--seeds",
        "1",
        "--device-choice",
        "predicted",
        "--vram",
        "peaks",
        "--json",
    )
    assert code == 0
    (big,) = [e for e in json.loads(text)["next_steps"]["annotate"] if e["workload"] == "big"]
    assert big["gained_bytes"] > 0
