"""Tests processes that the driver lists several times or in several places, as with MPS and compute
instances.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.agent.whole import Whole
from tests.driver import GIB, h100

UIDS = tuple(f"{number:08x}-1111-4222-8333-{number:012x}" for number in (1, 2))
DAEMON = "00000009-1111-4222-8333-000000000009"


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Whole]:
    """A node with one GPU that two pods share. They use 10 and 20 GiB."""
    built = Whole(tmp_path, [h100("GPU-a")], 4)
    for uid, gib in zip(UIDS, (10, 20), strict=True):
        built.run(uid, f"of {gib}", gib * GIB)
    yield built
    built.stop()


@pytest.mark.parametrize(
    ("clients", "server"),
    [
        pytest.param("compute mps", "compute", id="clients in two lists, as from Volta on"),
        pytest.param("compute graphics mps", "compute mps", id="clients in all three lists"),
        pytest.param("mps", "mps", id="all processes only in the MPS list"),
    ],
)
@pytest.mark.slow  # starts an agent
def test_a_process_in_several_lists_of_the_driver_is_counted_once(
    whole: Whole, clients: str, server: str
) -> None:
    """The MPS server has its own context and runs in the pod of the plugin's daemon."""
    slice_ = f"kubepods.slice/kubepods-pod{DAEMON.replace('-', '_')}.slice"
    whole.process(700, "nvidia-cuda-mps-server"[:15], f"/{slice_}/cri-containerd-{'d' * 64}.scope")
    pids = {uid: whole.node.processes[uid, "main"].pid for uid in UIDS}
    held = [
        (700, GIB // 32),
        *((pids[uid], n * GIB) for uid, n in zip(UIDS, (10, 20), strict=True)),
    ]
    for pid in pids.values():
        whole.driver.use(pid, {})
    whole.driver.use(1, {"GPU-a": sum(figure for _, figure in held)})  # the free memory
    statements = [
        f"process {kind} {pid} {figure}"
        for pid, figure in held
        for kind in (server if pid == 700 else clients).split()
    ]
    table = whole.driver.table
    lines = [line for line in table.read_text().splitlines() if not line.startswith("process")]
    table.write_text("\n".join([*lines, *statements]) + "\n")
    status = json.loads(whole.once("--json", "--pause", "0").stdout)
    assert {p["uid"]: p["used"] for p in status["pods"]} == {
        UIDS[0]: 10 * GIB,
        UIDS[1]: 20 * GIB,
        DAEMON: GIB // 32,
    }
    (device,) = status["devices"]
    assert device["unattributed"] == 0
    assert device["used"] == sum(p["used"] for p in status["pods"])
    assert "unattributedProcesses" not in status


def test_processes_of_every_compute_instance_are_reported(report: Callable[..., Any]) -> None:
    status = report(
        "device GPU-a 80000 10 70000 NVIDIA H100 80GB HBM3\n"
        "mig MIG-1 1 0 10000 10 4000 NVIDIA H100 80GB HBM3 MIG 1c.2g.20gb\nprocess compute 7 3000\n"
        "mig MIG-2 1 1 10000 10 4000 NVIDIA H100 80GB HBM3 MIG 1c.2g.20gb\nprocess compute 8 2000\n"
    )
    assert [(p["device"], p["pid"], p["used"]) for p in status["unattributedProcesses"]] == [
        ("MIG-1", 7, 3000),
        ("MIG-1", 8, 2000),
    ]
    assert [d["used"] for d in status["devices"]] == [5990, 5990]
