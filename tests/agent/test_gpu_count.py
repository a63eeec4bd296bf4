"""Tests that GPUs are added and removed while other GPUs stay."""

import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from agent.probes.gpu_count import FIRST_WAIT_S, LONGEST_WAIT_S, GpuCount, attached_gpus
from agent.probes.nvml_probe import NvmlProbe
from tests.agent.conftest import Survey
from tests.agent.nvml_library import PROBES, gate
from tests.driver import h100

pytestmark = pytest.mark.usefixtures("threads_end")

#: Seconds for which an agent tries to close the driver.
TRIES_FOR_S = 15.0


def attach(sysfs: Path, number: int, kind: str = "0x030200", driver: str = "nvidia") -> Path:
    """Bind a PCI device to a driver in a fake sysfs. Return the folder of the device."""
    address = f"0000:{number:02x}:00.0"
    folder = sysfs / "devices/pci0000:00" / address
    folder.mkdir(parents=True)
    (folder / "class").write_text(f"{kind}\n")
    bound = sysfs / "bus/pci/drivers" / driver
    bound.mkdir(parents=True, exist_ok=True)
    (bound / address).symlink_to(folder)
    return folder


def test_gpus_that_the_kernel_has_bound_to_nvidias_driver_are_counted(tmp_path: Path) -> None:
    assert attached_gpus(tmp_path) == 0
    attach(tmp_path, 1)
    attach(tmp_path, 2, "0x030000")
    attach(tmp_path, 3, "0x030000", driver="vfio-pci")
    attach(tmp_path, 4, "0x068000")  # a bridge
    (attach(tmp_path, 5) / "physfn").mkdir()  # This is a virtual function for a virtual machine.
    (tmp_path / "bus/pci/drivers/nvidia/new_id").touch()
    assert attached_gpus(tmp_path) == 2


@pytest.mark.parametrize(
    ("kernel", "shown", "message"),
    [
        (0, 1, None),  # Jetson and WSL
        (2, 2, None),
        (
            1,
            0,
            "the kernel has 1 NVIDIA GPU, but the driver shows none to this container: if this "
            "persists, delete the agent's pod when the driver is ready",
        ),
        (
            3,
            1,
            "the kernel has 3 NVIDIA GPUs, but the driver shows only 1 to this container: if this "
            "persists, delete the agent's pod when the driver is ready",
        ),
        (
            1,
            2,
            "the driver shows 2 GPUs, but the kernel has only 1: the others are gone, and are "
            "removed when the driver is opened again",
        ),
    ],
)
def test_different_numbers_are_reported(
    tmp_path: Path, kernel: int, shown: int, message: str | None
) -> None:
    for number in range(kernel):
        attach(tmp_path, number)
    probe = NvmlProbe(gate(nvmlDeviceGetCount=lambda: shown), sysfs=tmp_path)
    PROBES.append(probe)
    found = probe.read()
    assert [each.what for each in found.degraded if "GPU" in each.what] == [message] * bool(message)
    assert found.is_miscounted is bool(message)


def test_the_driver_is_reopened_with_back_off_for_a_gpu_that_never_appears(tmp_path: Path) -> None:
    now_s = [0.0]
    count = GpuCount(tmp_path, lambda: now_s[0])
    attach(tmp_path, 1)
    attach(tmp_path, 2)
    opened_s = []
    for _ in range(3600):
        if count.compare(1):
            opened_s.append(now_s[0])
            count.closed()
        now_s[0] += 1.0
    waits_s = [b - a for a, b in pairwise(opened_s)]
    assert waits_s[:3] == [FIRST_WAIT_S, 2 * FIRST_WAIT_S, 4 * FIRST_WAIT_S]
    assert max(waits_s) == LONGEST_WAIT_S
    attach(tmp_path, 3)
    assert count.compare(1)  # A new GPU is searched for immediately.
    count.closed()
    assert not count.compare(3)


def test_a_driver_that_cannot_be_closed_is_not_reopened_for_a_while(tmp_path: Path) -> None:
    """The driver cannot be closed while a call hangs, and no XIDs are received while the agent
    tries to close it.
    """
    now_s = [0.0]
    count = GpuCount(tmp_path, lambda: now_s[0])
    attach(tmp_path, 1)
    attach(tmp_path, 2)
    tries = []
    for _ in range(60):
        tries.append(count.compare(1))
        now_s[0] += 1.0
    first = int(TRIES_FOR_S) + 1
    paused = int(FIRST_WAIT_S)
    assert tries[: first + paused + 1] == [True] * first + [False] * paused + [True]
    # An agent with a long interval tries during the same number of samples.
    now_s[0] += 1000.0
    slow = []
    for _ in range(5):
        slow.append(count.compare(1))
        now_s[0] += 60.0
    assert slow[:4] == [True, True, True, False]


def test_gpus_that_appear_later_are_found() -> None:
    """A driver that is open does not report GPUs that appear later."""
    there = [0]
    counted = []
    opened = gate(
        nvmlInitWithFlags=lambda flags: counted.append(there[0]),
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: counted[-1],
    )
    probe = NvmlProbe(opened)
    PROBES.append(probe)
    assert probe.read().devices == []
    assert probe.release(may_close=True)
    there[0] = 1
    assert [device.uuid for device in probe.read().devices] == ["GPU-0"]


def uuids(status: dict[str, Any]) -> list[str]:
    return [device["uuid"] for device in status["devices"]]


def test_a_gpu_appears_and_disappears_while_others_stay(
    survey: Callable[..., Survey],
    tmp_path: Path,
    environment: dict[str, str],
) -> None:
    """Run the agent on the driver library, with threads that wait for XIDs."""
    sysfs = tmp_path / "sys"
    environment["FAKE_SYSFS"] = str(sysfs)
    attach(sysfs, 1)
    agent = survey([h100("GPU-a")])
    assert uuids(agent.step()) == ["GPU-a"]
    agent.driver.add(h100("GPU-b"))
    added = attach(sysfs, 2)
    status = agent.step()
    messages = [each.get("message", "") for each in status["sources"] if each["name"] == "nvml"]
    assert messages[0].startswith("the kernel has 2 NVIDIA GPUs, but the driver shows only 1")
    status = agent.until(lambda status: uuids(status) == ["GPU-a", "GPU-b"])
    assert all(device.get("healthy", True) for device in status["devices"])
    agent.driver.fail("GPU-b", 79)
    agent.until(lambda status: not status["devices"][1].get("healthy", True))
    agent.driver.remove("GPU-b")
    shutil.rmtree(added)
    (sysfs / "bus/pci/drivers/nvidia" / added.name).unlink()
    agent.until(lambda status: uuids(status) == ["GPU-a"])
