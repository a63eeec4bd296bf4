"""Checks that a what-if of the console and a plan of a snapshot place the same pods on the same
changed nodes.

The pods are all on node ``old``, which is drained. The other nodes share their GPUs. In the plan,
pods that do not fit wait for the duration of one run, so the mean waiting time gives their number.
"""

import json
import random
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headroom.commands import app
from headroom.contract.gpunode import Device
from tests.builders import DISTRIBUTED, GIB, NOW_S, device, gpunode, kube_node, pod, reservation
from tests.console.asking import Asked
from tests.state.states import seen, state_of

NEW = ("a", "b")
LIFE_S = 3600


def cluster(sizes_gib: list[int]) -> Asked:
    """Two idle nodes with two GPUs of 24 GiB, and a pod on each GPU of the node ``old``."""

    def gpu(uuid: str) -> Device:
        return device(uuid, model="L4")

    pods = [
        pod(f"{size}Gi", uid=f"p{n:02}", name=f"p{n:02}", node="old", phase="Running")
        for n, size in enumerate(sizes_gib)
    ]
    held = {
        each.metadata.uid: reservation({f"old-{n}": sizes_gib[n] * GIB}, name=each.metadata.name)
        for n, each in enumerate(pods)
    }
    reports = [
        gpunode(gpu(f"{name}-0"), gpu(f"{name}-1"), name=name, uid=name, plugin=DISTRIBUTED)
        for name in NEW
    ]
    gpus = [gpu(f"old-{n}") for n in range(len(pods))]
    reports.append(gpunode(*gpus, name="old", uid="old", reservations=held, plugin=DISTRIBUTED))
    nodes = [kube_node(each.name) for each in reports]
    return Asked(NOW_S, state_of(*seen(*nodes, *pods, *reports)))


def rejected_by_whatif(asked: Asked, replicas: int, mode: str) -> int:
    body = {
        "drain": ["old"],
        "replicas": dict.fromkeys(NEW, replicas),
        "device_choices": dict.fromkeys(NEW, mode),
    }
    answer = asked.post("/v1/whatif", body)
    assert answer.status_code == 200, answer.text
    found = answer.json()["rejected"]
    assert isinstance(found, int)
    return found


def waiting_in_plan(asked: Asked, replicas: int, mode: str, folder: Path, pods: int) -> int:
    file = folder / "snapshot.json"
    file.write_bytes(asked.get("/v1/snapshot").content)
    change = ("--nodes", "-old", "--replicas", str(replicas), "--device-choice", mode)
    few = ("--vram", "requests", "--seeds", "1", "--processes", "1", "--json")
    found = CliRunner().invoke(app, ["plan", "--snapshot", str(file), *change, *few])
    assert found.exit_code == 0, found.stderr
    data = json.loads(found.stdout)
    assert (data["pods"], data["nodes"], data["gpus"]) == (pods, 2, 4)
    wait_s = data["configurations"][1]["replays"][0]["today_wait_s"]
    waiting = wait_s * pods / LIFE_S
    assert waiting == pytest.approx(round(waiting), abs=0.01)
    return round(waiting)


@pytest.mark.parametrize(
    ("sizes_gib", "replicas", "mode", "rejected"),
    [
        pytest.param([10] * 8, 2, "steered", 0, id="steered: all fit"),
        pytest.param([10] * 11, 4, "steered", 3, id="steered: memory ends first"),
        pytest.param([2] * 11, 2, "steered", 3, id="steered: replicas end first"),
        pytest.param([17, 9, 17, 9, 17, 9, 17], 4, "steered", 2, id="steered: two sizes"),
        pytest.param([10] * 8, 2, "predicted", 0, id="predicted: all fit"),
        pytest.param([10] * 11, 4, "predicted", 3, id="predicted: memory ends first"),
        pytest.param([2] * 11, 2, "predicted", 3, id="predicted: replicas end first"),
    ],
)
def test_a_plan_and_a_whatif_reject_the_same_number_of_pods(
    tmp_path: Path, sizes_gib: list[int], replicas: int, mode: str, rejected: int
) -> None:
    asked = cluster(sizes_gib)
    assert rejected_by_whatif(asked, replicas, mode) == rejected
    assert waiting_in_plan(asked, replicas, mode, tmp_path, len(sizes_gib)) == rejected


@pytest.mark.slow
def test_plan_and_whatif_agree_on_pods_of_random_sizes(tmp_path: Path) -> None:
    lots, rejected = random.Random(4), 0
    for _ in range(12):
        sizes_gib = [lots.randint(1, 19) for _ in range(9)]
        asked = cluster(sizes_gib)
        found = rejected_by_whatif(asked, 4, "steered")
        assert waiting_in_plan(asked, 4, "steered", tmp_path, 9) == found, sizes_gib
        rejected += found
    assert 0 < rejected < 12 * 9


@pytest.mark.slow
def test_a_whatif_in_mode_predicted_rejects_more_pods_of_different_sizes(tmp_path: Path) -> None:
    """A what-if must hold for any choice of the plugin, but a plan draws one choice for each
    pod.
    """
    lots, rejected, waiting = random.Random(7), 0, 0
    for _ in range(8):
        sizes_gib = [lots.randint(1, 19) for _ in range(9)]
        asked = cluster(sizes_gib)
        rejected += rejected_by_whatif(asked, 4, "predicted")
        waiting += waiting_in_plan(asked, 4, "predicted", tmp_path, 9)
    assert rejected > waiting > 0
