"""Tests the NVML gate and its probe on a simulated library, in cases that the fake C library does
not support.
"""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from structlog.testing import capture_logs

from agent.nvlink import nvlink_groups
from agent.probes.device_probe import incarnation, own_cgroup
from agent.probes.nvml import Gate, Limits
from agent.probes.nvml_errors import (
    DeviceFault,
    DriverGone,
    NoDriver,
    Outcome,
    StaleHandle,
    outcome_of,
)
from agent.probes.nvml_probe import NvmlProbe
from agent.probes.readings import Degraded, FactsReading
from tests.agent.nvml_library import PROBES, devices, gate, library, listing, probing, refusing

pytestmark = pytest.mark.usefixtures("threads_end")


def test_every_nvml_code_has_its_defined_outcome() -> None:
    named = {
        name.removeprefix("NVML_ERROR_"): outcome_of(code)
        for name, code in vars(pynvml).items()
        if name.startswith("NVML_ERROR_")
    }
    assert {name for name, outcome in named.items() if outcome is Outcome.DRIVER_GONE} == {
        "UNINITIALIZED",
        "DRIVER_NOT_LOADED",
        "LIB_RM_VERSION_MISMATCH",
    }
    for fault in ("GPU_IS_LOST", "RESET_REQUIRED", "UNKNOWN", "NO_DATA", "TIMEOUT"):
        assert named[fault] is Outcome.DEVICE_FAULT
    assert named["NO_PERMISSION"] is Outcome.NO_PERMISSION
    assert named["LIBRARY_NOT_FOUND"] is Outcome.NO_DRIVER
    assert outcome_of(424242) is Outcome.DEVICE_FAULT


@pytest.mark.parametrize(
    ("code", "raised"),
    [(1, DriverGone), (18, DriverGone), (12, NoDriver), (2, StaleHandle), (15, DeviceFault)],
)
def test_the_gate_raises_its_own_errors_with_nvmls_error_as_the_cause(
    code: int, raised: type[Exception]
) -> None:
    with pytest.raises(raised, match=f"NVML {code}") as caught:
        gate(nvmlDeviceGetName=refusing(code)).ask("nvmlDeviceGetName", 0)
    assert isinstance(caught.value.__cause__, pynvml.NVMLError)


@pytest.mark.parametrize("code", [0, 3, 6, 13, 25], ids=lambda code: f"code {code}")
def test_an_absent_value_is_none(code: int) -> None:
    assert gate(nvmlDeviceGetName=refusing(code)).ask("nvmlDeviceGetName", 0) is None


def test_a_function_that_pynvml_lacks_returns_none() -> None:
    assert gate().ask("nvmlDeviceGetSomethingOfTheFuture", 0) is None


def test_a_missing_permission_is_none_and_remembered() -> None:
    opened = gate(nvmlDeviceGetName=refusing(4))
    assert opened.ask("nvmlDeviceGetName", 0) is None
    assert opened.forbidden == {"nvmlDeviceGetName"}


@pytest.mark.parametrize("code", [4, 9, 12, 13, 999], ids=lambda code: f"code {code}")
def test_a_library_that_cannot_be_initialised_counts_as_no_driver(code: int) -> None:
    with pytest.raises(NoDriver):
        Gate(library(nvmlInitWithFlags=refusing(code))).start()


def test_a_library_of_another_driver_version_is_not_a_missing_driver() -> None:
    with pytest.raises(DriverGone):
        Gate(library(nvmlInitWithFlags=refusing(18))).start()


def test_a_driver_loaded_later_is_found_without_a_restart() -> None:
    codes = [12]

    def initialise(flags: int) -> None:
        if codes:
            raise pynvml.NVMLError(codes.pop())

    probe = probing(Gate(library(nvmlInitWithFlags=initialise)))
    assert probe.read().driver.why_not
    assert [device.uuid for device in devices(probe)] == ["GPU-0"]


def test_a_permission_is_reported_only_while_it_is_missing() -> None:
    codes = [4]

    def name(handle: int) -> str:
        if codes:
            raise pynvml.NVMLError(codes.pop())
        return "A100"

    probe = probing(gate(nvmlDeviceGetName=name))
    missing = Degraded("nvml", "no permission for nvmlDeviceGetName")
    assert missing in probe.read().degraded
    assert missing not in probe.read().degraded


def test_a_driver_without_process_lists_is_reported_once() -> None:
    (message,) = probing(gate(nvmlDeviceGetCount=lambda: 2)).read().degraded
    assert "lists no processes" in message.what
    listed = {
        f"nvmlDeviceGet{kind}RunningProcesses_v3": listing()
        for kind in ("Compute", "Graphics", "MPSCompute")
    }
    assert probing(gate(nvmlDeviceGetCount=lambda: 2, **listed)).read().degraded == []


def limited(hard: int) -> Gate:
    def limits(handle: object, asked: Any) -> None:
        assert asked.nameSpace == "/sys/fs/cgroup/a"
        asked.softLimit, asked.hardLimit, asked.currentUsed = 0, hard, 5

    opened = gate()
    opened._library.c_nvmlGetMemoryLimits_v1_t = pynvml.c_nvmlGetMemoryLimits_v1_t
    opened._library.NVML_DEVICE_MEMORY_LIMIT_MAX = pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX
    opened._library.nvmlDeviceGetMemoryLimits_v1 = limits
    return opened


def test_limits_of_a_cgroup_are_reported_if_the_driver_has_them() -> None:
    assert limited(10).limits(0, "/sys/fs/cgroup/a") == Limits(5, soft_bytes=0, hard_bytes=10)
    assert limited(2**64 - 1).limits(0, "/sys/fs/cgroup/a") == Limits(5, 0, hard_bytes=None)
    assert gate().limits(0, "/sys/fs/cgroup/a") is None


def test_a_limit_of_the_agents_own_cgroup_is_a_fault() -> None:
    # In a cgroup with a limit, the driver reports the limit as the memory of the device.
    for hard, fault in ((10, "the agent's own cgroup"), (2**64 - 1, "")):
        probe = NvmlProbe(limited(hard), cgroup="/sys/fs/cgroup/a")
        PROBES.append(probe)
        (device,) = devices(probe)
        assert device.fault.startswith(fault)
        assert bool(device.fault) is bool(fault)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None)])
def test_the_numa_node_is_read_from_the_pci_device(
    tmp_path: Path, text: str, node: int | None
) -> None:
    folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)
    pci = SimpleNamespace(busId=b"00000000:3B:00.0")
    probe = NvmlProbe(gate(nvmlDeviceGetPciInfo_v3=lambda handle: pci), sysfs=tmp_path)
    PROBES.append(probe)
    (facts,) = probe.read().facts
    assert (facts.pci_bus_id, facts.numa_node) == ("00000000:3B:00.0", node)


def test_nvlinks_are_read_once_for_many_samples() -> None:
    asked: list[int] = []

    def state(handle: int, link: int) -> int:
        asked.append(link)
        if link == 4:
            raise pynvml.NVMLError(2)
        return link % 2

    def remote(handle: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:0{link}:00.0".encode())

    probe = probing(gate(nvmlDeviceGetNvLinkState=state, nvmlDeviceGetNvLinkRemotePciInfo=remote))
    for _ in range(3):
        (facts,) = probe.read().facts
        assert facts.nvlinks == {"00000000:01:00.0", "00000000:03:00.0"}
    assert asked == [0, 1, 2, 3, 4]


def test_a_gpu_without_nvlinks_has_none() -> None:
    (facts,) = probing(gate(nvmlDeviceGetNvLinkState=refusing(3))).read().facts
    assert facts.nvlinks == frozenset()


def test_nvlink_groups_are_connected_directly_or_by_switches() -> None:
    def linked(uuid: str, *remote: str) -> FactsReading:
        return FactsReading("nvml", uuid, pci_bus_id=uuid.upper(), nvlinks=frozenset(remote))

    bridges = linked("a", "c"), linked("b", "d"), linked("c", "a"), linked("d", "b"), linked("e")
    assert nvlink_groups(bridges) == {"a": 0, "b": 1, "c": 0, "d": 1}
    switched = [linked(uuid, "s1", "s2") for uuid in "abc"]
    assert nvlink_groups(switched) == {"a": 0, "b": 0, "c": 0}
    chain = linked("a", "b"), linked("b", "a", "c"), linked("c", "b")
    assert nvlink_groups(chain) == {"a": 0, "b": 0, "c": 0}


def test_the_incarnation_changes_with_boot_and_kernel_module(tmp_path: Path) -> None:
    boot = tmp_path / "proc/sys/kernel/random/boot_id"
    boot.parent.mkdir(parents=True)
    boot.write_text("b1\n")
    seen = {incarnation(tmp_path)}
    boot.write_text("b2\n")
    seen.add(incarnation(tmp_path))
    (tmp_path / "sys/module/nvidia").mkdir(parents=True)
    seen.add(incarnation(tmp_path))
    assert len(seen) == 3


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        pytest.param(
            {"nvmlDeviceGetMigDeviceHandleByIndex": refusing(4)},
            "MIG is on and no instance can be read: the agent's container has no permission",
            id="no permission",
        ),
        pytest.param(
            {"nvmlDeviceGetMigDeviceHandleByIndex": refusing(6)},
            "MIG is on and no instance can be read: none exists, or the agent's container"
            " cannot see them",
            id="no MIG device",
        ),
        pytest.param(
            {"nvmlDeviceGetMigMode": refusing(4)},
            "the agent has no permission to read the MIG mode",
            id="unreadable mode",
        ),
    ],
)
def test_a_gpu_with_unreadable_mig_takes_no_pods(calls: dict[str, Any], why: str) -> None:
    on = {
        "nvmlDeviceGetMigMode": lambda handle: [1, 1],
        "nvmlDeviceGetMaxMigDeviceCount": lambda handle: 7,
    }
    probe = probing(gate(**{**on, **calls}))
    with capture_logs() as logs:
        found = [probe.read() for _ in range(3)][-1]
    (device,) = found.devices
    assert (device.uuid, device.kind, device.fault) == ("GPU-0", "gpu", why)
    assert Degraded("nvml", f"GPU-0: {why}") in found.degraded
    (entry,) = logs
    assert (entry["event"], entry["log_level"]) == ("mig_not_readable", "error")
    assert entry["reason"] == why


def test_own_cgroup_is_a_full_path_with_v2(tmp_path: Path) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    assert own_cgroup(tmp_path) is None
    (tmp_path / "proc/self/cgroup").write_text("0::/kubepods.slice/x\n")
    assert own_cgroup(tmp_path) is None
    (tmp_path / "sys/fs/cgroup").mkdir(parents=True)
    (tmp_path / "sys/fs/cgroup/cgroup.controllers").touch()
    assert own_cgroup(tmp_path) == ""
    folder = tmp_path / "sys/fs/cgroup/kubepods.slice/x"
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").touch()
    assert own_cgroup(tmp_path) == str(folder)


@pytest.mark.parametrize(
    ("cgroup", "has_limits", "is_said"),
    [("", True, True), ("", False, False), (None, True, False), ("/own", True, False)],
)
def test_a_limit_of_the_agent_that_cannot_be_looked_up_is_reported(
    cgroup: str | None, has_limits: bool, is_said: bool
) -> None:
    calls = {"nvmlDeviceGetMemoryLimits_v1": lambda handle, asked: None} if has_limits else {}
    found = probing(gate(**calls), cgroup=cgroup).read()
    message = [d.what for d in found.degraded if "own cgroup" in d.what]
    assert bool(message) is is_said
    assert [device.fault for device in found.devices] == [""]


def test_the_own_cgroup_is_found_if_the_kernel_shows_it_as_the_root(tmp_path: Path) -> None:
    """The kernel does this in a private cgroup namespace, which is the default of containerd and
    CRI-O with cgroups v2.
    """
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    mount = tmp_path / "sys/fs/cgroup"
    own = mount / "kubepods.slice/kubepods-pod1.slice/cri-containerd-1.scope"
    other = mount / "kubepods.slice/kubepods-pod2.slice"
    for folder, processes in ((mount, ""), (own, "17\n4242\n"), (other, "424\n42420\n")):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cgroup.controllers").touch()
        (folder / "cgroup.procs").write_text(processes)
    assert own_cgroup(tmp_path, 4242) == str(own)
    assert own_cgroup(tmp_path, 4243) == ""
