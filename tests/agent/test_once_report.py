"""Tests the output of `headroom agent --once` for a complete node. The docs contain this output."""

import json
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent.once_report import size, table
from headroom.contract.gpunode import Device, GPUNodeStatus, Replicas
from headroom.contract.printable import printable
from tests.agent.whole import Whole
from tests.builders import shared
from tests.controlplane import ROOT
from tests.driver import GIB, Gpu, Instance, h100, t4

WHEN = re.compile(r"\d{4}-\d\d-\d\dT\S+Z")


def uid(number: int) -> str:
    return f"{number:08x}-1111-4222-8333-{number:012x}"


@pytest.fixture
def whole(tmp_path: Path) -> Iterator[Whole]:
    """A node with four pods and an unattributed process on two H100 GPUs and a broken T4. One pod
    is busy and has a memory limit of the driver.
    """
    built = Whole(tmp_path, [h100("GPU-4c1e"), h100("GPU-9b07"), t4("GPU-e2d5")], 4)
    pods = {"llama-0": 30, "embed-7": 6, "whisper-2": 4, "rerank-1": 9}
    for number, (name, gib) in enumerate(pods.items(), 1):
        built.run(uid(number), name, gib * GIB, "serving")
    built.process(900, "jupyter", "/user.slice/session-3.scope")
    built.driver.use(900, {"GPU-9b07": 2 * GIB})
    built.driver.say("GPU-e2d5", "ecc 2")
    busy = built.node.processes[uid(1), "main"]
    (device,) = busy.used_bytes
    limit = f"limit {built.cgroup(uid(1))} 0 {32 * GIB} {30 * GIB}"
    ended = threading.Event()

    def work() -> None:
        while not ended.wait(0.02):
            now_us = time.time_ns() // 1000
            built.driver.say(device, f"busy {busy.pid} 37 {now_us}", "util 96", "sm 41 30", limit)

    worker = threading.Thread(target=work)
    worker.start()
    yield built
    ended.set()
    worker.join()
    built.stop()


@pytest.mark.parametrize(
    ("device", "details"),
    [
        pytest.param(
            shared("GPU-a", free=1, allocated=3),
            ["GPU-a", "nvidia.com/gpu, time-slicing: 3 of 4 taken"],
            id="shared",
        ),
        pytest.param(
            shared("GPU-a", sharing="none", replicas=Replicas(free=0, allocated=1, unhealthy=1)),
            ["GPU-a", "nvidia.com/gpu, not shared: 1 of 2 taken, 1 unhealthy"],
            id="not shared, and unhealthy",
        ),
        pytest.param(shared("GPU-a", resource=""), ["GPU-a"], id="no known resource"),
    ],
)
def test_the_lines_below_a_device_show_its_pods_and_replicas(
    device: Device, details: list[str]
) -> None:
    shown = table("n", GPUNodeStatus(devices=[device]), {})
    head, _, *below = shown.splitlines()[2:]
    assert head.split()[0] == "device"
    assert [line.strip() for line in below] == details


@pytest.mark.slow  # starts an agent
def test_the_table_of_a_node_equals_the_one_in_the_docs(whole: Whole) -> None:
    done = whole.once("--pause", "0.2")
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == 1  # a device has a fault
    printed = WHEN.sub("2026-11-21T11:05:00.000000Z", done.stdout)
    docs = (ROOT / "docs/how-to/see-gpu-use.md").read_text()
    there = re.search(r"```console\n\$ headroom agent --once\n(.*?)```", docs, re.S)
    assert there is not None
    assert there[1] == printed, f"docs/how-to/see-gpu-use.md should contain:\n{printed}"


@pytest.mark.slow  # starts an agent
def test_programs_get_the_report_as_json_and_an_exit_status(whole: Whole) -> None:
    done = whole.once("--json", "--pause", "0")
    assert done.returncode == 1
    names = {pod["name"] for pod in json.loads(done.stdout)["pods"]}
    assert names == {"llama-0", "embed-7", "whisper-2", "rerank-1"}
    whole.driver.say("GPU-e2d5")
    assert whole.once("--json", "--pause", "0").returncode == 0


@pytest.mark.slow  # starts an agent
def test_a_machine_without_kubernetes_or_root_also_gets_its_table(tmp_path: Path) -> None:
    instances = (Instance("MIG-1", 1), Instance("MIG-2", 2))
    whole = Whole(tmp_path, [Gpu("GPU-a", instances=instances)], 1)
    whole.driver.use(900, {"MIG-1": GIB})
    whole.process(900, "evil\x1b[31m", "/user.slice")
    whole.stop()
    flags = ("--checkpoint", "/nothing", "--pod-resources", "/nothing", "--pause", "0")
    done = whole.once(*flags)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines if "MIG 1g.10gb" in line] == ["0/1", "0/2"]
    (outsider,) = [line for line in lines if "pid 900" in line]
    assert "evil?[31m (pid 900, no pod)" in outsider
    assert "1.0 GiB" in outsider
    assert any("checkpoint absent" in line for line in lines)


@pytest.mark.slow  # starts an agent
def test_an_invalid_interval_is_rejected_with_an_example(whole: Whole) -> None:
    done = whole.once("--pause", "nan")
    assert done.returncode == 2
    assert "--pause 1" in done.stderr


@pytest.mark.parametrize(
    ("figure", "text"),
    [(None, "?"), (-1, "?"), (0, "0.0 GiB"), (GIB - 1, "0.9 GiB"), (GIB, "1.0 GiB")],
)
def test_unknown_sizes_are_not_shown_as_zero(figure: int | None, text: str) -> None:
    assert size(figure) == text


def test_names_of_processes_are_escaped_for_the_terminal() -> None:
    assert printable("a\x1b]0;\x07b\n") == "a?]0;?b?"


#: A program that simulates a machine on which this package is not installed.
WITHOUT = "import sys; sys.modules[%r] = None; from headroom.__main__ import main; sys.exit(main())"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        pytest.param(["agent", "--help"], 0, "--once", id="agent"),
        pytest.param(["serve"], 2, "install it: pip install", id="extender"),
    ],
)
def test_agent_and_extender_do_not_import_each_other(
    arguments: list[str], status: int, message: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT % "extender", *arguments],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == status
    assert message in done.stdout + done.stderr
