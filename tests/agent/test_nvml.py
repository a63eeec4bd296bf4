"""The gate and its probe on a library of our own, where the C fake is too coarse."""

import ctypes
import itertools
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from agent.probes import sm_activity
from agent.probes.device_probe import incarnation, own_cgroup
from agent.probes.nvml import Gate, Limits, Memory
from agent.probes.nvml_errors import (
    DeviceFault,
    DriverGone,
    NoDriver,
    Outcome,
    StaleHandle,
    outcome_of,
)
from agent.probes.nvml_probe import NvmlProbe
from agent.probes.readings import Degraded, DeviceReading, DriverReading
from tests.threads import begun_since

NOT_AVAILABLE = ctypes.c_ulonglong(-1).value


def library(**functions: Any) -> SimpleNamespace:
    """A pynvml of one idle GPU, with real errors and structs; ``functions`` replace its calls.

    Names that end in RunningProcesses_v2 or _v3 are those of C functions.
    """
    calls: dict[str, Any] = {
        "nvmlInitWithFlags": lambda flags: None,
        "nvmlSystemGetDriverVersion": lambda: "580",
        "nvmlDeviceGetCount": lambda: 1,
        "nvmlDeviceGetHandleByIndex": lambda index: index,
        "nvmlDeviceGetHandleByUUID": lambda uuid: int(uuid[-1]),
        "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}",
        "nvmlDeviceGetName": lambda handle: "A100",
        "nvmlDeviceGetMigMode": lambda handle: [0, 0],
        "nvmlDeviceGetMemoryInfo": lambda handle, version=None: SimpleNamespace(
            total=1000, free=900, used=100, reserved=10
        ),
        **functions,
    }

    def pointer(name: str) -> Any:
        if name not in functions:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return functions[name]

    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        nvmlMemory_v2=pynvml.nvmlMemory_v2,
        c_nvmlProcessInfo_v2_t=pynvml.c_nvmlProcessInfo_v2_t,
        _nvmlGetFunctionPointer=pointer,
        **calls,
    )


def refusing(code: int) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise pynvml.NVMLError(code)

    return call


def listing(*processes: tuple[int, int], sizes: list[int] | None = None) -> Callable[..., int]:
    """A C function that lists ``processes``, and notes in ``sizes`` what room it was given."""

    def call(handle: Any, count: Any, array: Any) -> int:
        room, count._obj.value = count._obj.value, len(processes)
        if sizes is not None:
            sizes.append(room)
        if room < len(processes):
            return pynvml.NVML_ERROR_INSUFFICIENT_SIZE
        for slot, (pid, used_bytes) in zip(array, processes, strict=False):
            slot.pid, slot.usedGpuMemory = pid, used_bytes
        return 0

    return call


def gate(**functions: Any) -> Gate:
    opened = Gate(library(**functions))
    opened.start()
    return opened


_PROBES: list[NvmlProbe] = []


def probing(opened: Gate, deadline_s: float = 30.0, cgroup: str | None = None) -> NvmlProbe:
    """A probe whose threads end with the test."""
    _PROBES.append(NvmlProbe(opened, deadline_s, cgroup=cgroup))
    return _PROBES[-1]


@pytest.fixture(autouse=True)
def _threads_end() -> Iterator[None]:
    yield
    while _PROBES:
        _PROBES.pop().close()


def devices(probe: NvmlProbe) -> list[DeviceReading]:
    return probe.read().devices


def test_every_code_of_nvml_has_the_outcome_that_was_meant() -> None:
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
def test_gate_raises_ours_and_keeps_theirs_as_the_cause(code: int, raised: type[Exception]) -> None:
    with pytest.raises(raised, match=f"NVML {code}") as caught:
        gate(nvmlDeviceGetName=refusing(code)).ask("nvmlDeviceGetName", 0)
    assert isinstance(caught.value.__cause__, pynvml.NVMLError)


@pytest.mark.parametrize("code", [0, 3, 6, 13, 25], ids=lambda code: f"code {code}")
def test_absent_is_none(code: int) -> None:
    assert gate(nvmlDeviceGetName=refusing(code)).ask("nvmlDeviceGetName", 0) is None


def test_call_that_this_pynvml_does_not_have_is_absent() -> None:
    assert gate().ask("nvmlDeviceGetSomethingOfTheFuture", 0) is None


def test_missing_permission_is_none_and_remembered() -> None:
    opened = gate(nvmlDeviceGetName=refusing(4))
    assert opened.ask("nvmlDeviceGetName", 0) is None
    assert opened.forbidden == {"nvmlDeviceGetName"}


@pytest.mark.parametrize("code", [4, 9, 12, 13, 999], ids=lambda code: f"code {code}")
def test_library_that_cannot_be_initialised_is_no_driver(code: int) -> None:
    with pytest.raises(NoDriver):
        Gate(library(nvmlInitWithFlags=refusing(code))).start()


def test_library_of_another_driver_is_no_missing_driver() -> None:
    with pytest.raises(DriverGone):
        Gate(library(nvmlInitWithFlags=refusing(18))).start()


def test_driver_that_comes_later_is_found_without_a_restart() -> None:
    codes = [12]

    def initialise(flags: int) -> None:
        if codes:
            raise pynvml.NVMLError(codes.pop())

    probe = probing(Gate(library(nvmlInitWithFlags=initialise)))
    assert probe.read().driver.why_not
    assert [device.uuid for device in devices(probe)] == ["GPU-0"]


def test_processes_are_asked_for_once_of_each_kind_and_merged_by_pid() -> None:
    sizes: list[int] = []
    found = gate(
        nvmlDeviceGetComputeRunningProcesses_v3=listing((1, 100), (2, NOT_AVAILABLE), sizes=sizes),
        nvmlDeviceGetGraphicsRunningProcesses_v3=listing((1, 30), (2, 5), sizes=sizes),
        nvmlDeviceGetMPSComputeRunningProcesses_v3=listing((3, NOT_AVAILABLE), sizes=sizes),
    ).processes(0)
    assert found == {1: 100, 2: 5, 3: None}
    assert len(sizes) == 3


def test_a_list_that_does_not_fit_is_queried_again_with_a_larger_buffer() -> None:
    sizes: list[int] = []
    many = [(pid, pid * 10) for pid in range(1, 201)]
    found = gate(nvmlDeviceGetComputeRunningProcesses_v3=listing(*many, sizes=sizes)).processes(0)
    assert found == dict(many)
    assert sizes == [64, 400]


@pytest.mark.parametrize("clears", [False, True], ids=["", "clears the whole array first"])
@pytest.mark.parametrize("count", [1, 2, 47, 48, 49, 63, 64])
@pytest.mark.parametrize("entry_bytes", [16, 24, 32])
def test_entries_are_as_long_as_the_driver_writes_them(
    entry_bytes: int, count: int, clears: bool
) -> None:
    """The header of v3 has 24, and drivers write less or more (docs/agent.md)."""

    def call(handle: Any, room: Any, array: Any) -> int:
        size, room._obj.value = room._obj.value, count
        at = ctypes.addressof(array)
        if clears:
            ctypes.memset(at, 0, size * entry_bytes)
        for number in range(count):
            entry = struct.pack("<IxxxxQII", 1000 + number, 1 << 30, 0xFFFFFFFF, 0xFFFFFFFF)
            entry = entry.ljust(entry_bytes, b"\0")[:entry_bytes]
            ctypes.memmove(at + number * entry_bytes, entry, entry_bytes)
        return 0

    found = gate(nvmlDeviceGetComputeRunningProcesses_v3=call).processes(0)
    assert found == {1000 + number: 1 << 30 for number in range(count)}


@pytest.mark.parametrize("length", [40, 100])
def test_entries_of_another_length_than_any_driver_writes_are_not_guessed_at(length: int) -> None:
    def call(handle: Any, room: Any, array: Any) -> int:
        room._obj.value = 3
        ctypes.memset(ctypes.addressof(array), 1, 3 * length)
        return 0

    with pytest.raises(DeviceFault, match="cannot be read: UnknownLayout"):
        gate(nvmlDeviceGetComputeRunningProcesses_v3=call).processes(0)


@pytest.mark.parametrize("version", ["_v3", "_v2", ""])
def test_the_newest_version_that_the_driver_has_is_found_once_for_each_call(version: str) -> None:
    listed = gate(
        **{
            f"nvmlDeviceGetComputeRunningProcesses{version}": listing((7, 70)),
            "nvmlDeviceGetGraphicsRunningProcesses_v3": listing((8, 80)),
        }
    )
    asked: list[str] = []
    find = listed._library._nvmlGetFunctionPointer
    listed._library._nvmlGetFunctionPointer = lambda name: asked.append(name) or find(name)
    first = listed.processes(0)
    before = asked.copy()
    asked.clear()
    assert first == listed.processes(0) == {7: 70, 8: 80}
    assert asked == [
        f"nvmlDeviceGetComputeRunningProcesses{version}",
        "nvmlDeviceGetGraphicsRunningProcesses_v3",
    ]
    assert len(before) > len(asked)


def test_a_call_that_fails_is_not_made_in_an_older_version() -> None:
    """An older version could report less, and be used."""
    listed = gate(
        nvmlDeviceGetComputeRunningProcesses_v3=lambda *_: 3,
        nvmlDeviceGetComputeRunningProcesses_v2=listing((7, 70)),
    )
    assert listed.processes(0) is None


def test_memory_is_asked_for_once_by_the_version_that_the_driver_has() -> None:
    asked: list[int | None] = []

    def memory(handle: object, version: int | None = None) -> Any:
        asked.append(version)
        if version is not None:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_FUNCTION_NOT_FOUND)
        return SimpleNamespace(total=100, free=60)

    opened = gate(nvmlDeviceGetMemoryInfo=memory)
    assert [opened.memory(0), opened.memory(0)] == [Memory(100, 60, None)] * 2
    assert asked == [pynvml.nvmlMemory_v2, None, None]


def test_without_process_lists_the_processes_are_unknown_and_not_none() -> None:
    assert gate().processes(0) is None


def test_stale_handle_is_resolved_once_more_by_uuid() -> None:
    def memory(handle: object, version: int | None = None) -> Any:
        if handle == 0:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return SimpleNamespace(total=1000, free=900, used=100, reserved=10)

    probe = probing(
        gate(nvmlDeviceGetMemoryInfo=memory, nvmlDeviceGetHandleByUUID=lambda uuid: "new")
    )
    (device,) = devices(probe)
    assert device.fault == ""
    assert device.memory is not None


def test_device_that_is_lost_keeps_its_identity_but_no_figures() -> None:
    lost: list[int] = []

    def handle(index: int) -> int:
        if lost:
            raise pynvml.NVMLError(lost[0])
        return index

    probe = probing(gate(nvmlDeviceGetHandleByIndex=handle))
    (before,) = devices(probe)
    assert before.memory is not None
    lost.append(pynvml.NVML_ERROR_GPU_IS_LOST)
    for _ in range(2):  # it stays lost, and known
        (after,) = devices(probe)
        assert (after.uuid, after.model, after.index) == ("GPU-0", "A100", 0)
        assert (after.memory, after.processes) == (None, None)
        assert "lost" in after.fault
    lost.clear()
    assert devices(probe) == [before]


def test_mig_devices_of_a_gpu_that_is_lost_are_all_lost() -> None:
    lost: list[int] = []

    def handle(index: int) -> str:
        if lost:
            raise pynvml.NVMLError(lost[0])
        return "gpu"

    def slot(parent: str, index: int) -> str:
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)  # an empty slot
        return f"mig{index}"

    probe = probing(
        gate(
            nvmlDeviceGetHandleByIndex=handle,
            nvmlDeviceGetMigMode=lambda handle: [1, 1],
            nvmlDeviceGetMaxMigDeviceCount=lambda handle: 7,
            nvmlDeviceGetMigDeviceHandleByIndex=slot,
            nvmlDeviceGetGpuInstanceId=lambda handle: int(handle[-1]),
        )
    )
    assert [(d.uuid, d.fault) for d in devices(probe)] == [("GPU-mig0", ""), ("GPU-mig1", "")]
    lost.append(pynvml.NVML_ERROR_GPU_IS_LOST)
    assert [d.uuid for d in devices(probe) if "lost" in d.fault] == ["GPU-mig0", "GPU-mig1"]


def test_compute_instances_that_share_memory_never_disagree_about_it() -> None:
    free = iter(range(900, 0, -1))  # moves with every call

    probe = probing(
        gate(
            nvmlDeviceGetMemoryInfo=lambda handle, version=None: SimpleNamespace(
                total=1000, free=next(free), used=0, reserved=10
            ),
            nvmlDeviceGetMigMode=lambda handle: [1, 1],
            nvmlDeviceGetMaxMigDeviceCount=lambda handle: 3,
            nvmlDeviceGetMigDeviceHandleByIndex=lambda parent, index: f"mig{index}",
            nvmlDeviceGetGpuInstanceId=lambda handle: 5,
        )
    )
    assert len({device.memory for device in devices(probe)}) == 1


def test_device_that_was_taken_out_is_gone_not_lost() -> None:
    counts = [1, 0]
    probe = probing(gate(nvmlDeviceGetCount=lambda: counts.pop(0)))
    assert len(devices(probe)) == 1
    assert devices(probe) == []


def test_a_device_that_was_taken_out_is_not_blamed_for_the_fault() -> None:
    counts = [1, 0, 1]
    handles = [refusing(pynvml.NVML_ERROR_GPU_IS_LOST), lambda index: index]
    probe = probing(
        gate(
            nvmlDeviceGetCount=lambda: counts.pop(0),
            nvmlDeviceGetHandleByIndex=lambda index: handles.pop()(index),
        )
    )
    assert [d.uuid for d in devices(probe)] == ["GPU-0"]
    assert devices(probe) == []
    assert devices(probe) == []


def test_a_lost_driver_is_reported_and_its_devices_have_no_figures() -> None:
    codes: list[int] = []

    def memory(handle: object, version: int | None = None) -> Any:
        if codes:
            raise pynvml.NVMLError(codes[0])
        return SimpleNamespace(total=1000, free=900, used=100, reserved=10)

    probe = probing(gate(nvmlDeviceGetMemoryInfo=memory))
    assert probe.read().driver == DriverReading("nvml", version="580")
    codes.append(pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH)
    found = probe.read()
    assert found.driver.gone
    assert "unloaded or replaced" in found.driver.why_not
    assert [(d.uuid, d.memory, d.fault) for d in found.devices] == [
        ("GPU-0", None, "the driver does not answer")
    ]


def test_driver_that_cannot_count_is_not_a_node_without_devices() -> None:
    assert (
        "number of devices" in probing(gate(nvmlDeviceGetCount=refusing(4))).read().driver.why_not
    )


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


def test_call_that_hangs_costs_its_device_and_no_second_thread() -> None:
    stuck = threading.Event()

    def memory(handle: int, version: int | None = None) -> Any:
        if handle == 1:
            stuck.wait()
        return SimpleNamespace(total=1000, free=900, used=100, reserved=10)

    readers = begun_since("nvml")
    opened = gate(nvmlDeviceGetCount=lambda: 3)
    probe = probing(opened)
    assert [d.fault for d in devices(probe)] == ["", "", ""]
    opened._library.nvmlDeviceGetMemoryInfo = memory
    probe._deadline_s = 1.0
    for _ in range(5):
        found = probe.read()
        probe._deadline_s = 30.0  # only the first look waits for the call that hangs
        assert found.hanging
        assert [(d.uuid, d.fault) for d in found.devices] == [
            ("GPU-0", ""),
            ("GPU-1", "driver call nvmlDeviceGetMemoryInfo_v2 hangs"),
            ("GPU-2", ""),
        ]
        assert len(readers()) == 4  # three devices and the driver
    stuck.set()
    end_s = time.monotonic() + 30
    while (found := probe.read()).hanging:
        assert time.monotonic() < end_s
    assert [d.fault for d in found.devices] == ["", "", ""]


def _wait(stuck: threading.Event) -> None:
    stuck.wait()


def gpm(free: Callable[[Any], None], **functions: Any) -> Gate:
    """A driver that keeps samples for every GPU, to be given back with ``free``."""
    samples = itertools.count()
    metrics = [SimpleNamespace(metricId=0, nvmlReturn=0, value=50.0) for _ in range(2)]
    return gate(
        c_nvmlGpmMetricsGet_t=lambda: SimpleNamespace(metrics=metrics),
        nvmlGpmMetricsGet=lambda asked: asked,
        nvmlGpmQueryDeviceSupport=lambda handle: SimpleNamespace(isSupportedDevice=1),
        nvmlGpmSampleGet=lambda handle, sample: sample,
        nvmlGpmSampleFree=free,
        **{"nvmlGpmSampleAlloc": lambda: next(samples), **functions},
    )


@pytest.fixture
def gpm_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples are compared in every look, and not only in those of a slow machine."""
    monkeypatch.setattr(sm_activity, "GPM_APART_S", 0.0)


@pytest.mark.usefixtures("gpm_at_once")
def test_what_is_kept_for_a_gpu_that_goes_is_given_back_with_its_thread() -> None:
    freed: list[int] = []
    count = 2
    readers = begun_since("nvml")
    probe = probing(gpm(freed.append, nvmlDeviceGetCount=lambda: count))
    assert [d.uuid for d in devices(probe)] == ["GPU-0", "GPU-1"]
    count = 1
    end_s = time.monotonic() + 30
    while len(freed) < 2 or len(readers()) > 2:
        assert [d.uuid for d in devices(probe)] == ["GPU-0"]
        assert time.monotonic() < end_s
    count = 2
    assert [d.fault for d in devices(probe)] == ["", ""]


@pytest.mark.usefixtures("gpm_at_once")
def test_a_sample_without_its_pair_is_freed() -> None:
    freed: list[int] = []
    allocated = itertools.count()

    def allocate() -> int:
        sample = next(allocated)
        if sample % 2:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_UNKNOWN)
        return sample

    probe = probing(gpm(freed.append, nvmlGpmSampleAlloc=allocate))
    for _ in range(3):
        probe.read()
    assert freed == [sample for sample in range(next(allocated)) if sample % 2 == 0]
    assert freed


@pytest.mark.usefixtures("gpm_at_once")
def test_giving_back_what_is_kept_for_a_gpu_that_goes_may_hang() -> None:
    stuck = threading.Event()
    count = 2
    readers = begun_since("nvml")
    probe = probing(gpm(lambda sample: _wait(stuck), nvmlDeviceGetCount=lambda: count))
    assert len(devices(probe)) == 2
    count = 1
    try:
        looking = threading.Thread(target=lambda: [probe.read() for _ in range(5)], daemon=True)
        looking.start()
        looking.join(30.0)
        assert not looking.is_alive()
        assert [d.fault for d in devices(probe)] == [""]
        count = 2
        assert [d.fault for d in devices(probe)] == [""]  # the other one did not report its UUID
        assert len(readers()) == 3  # two devices and the driver
    finally:
        stuck.set()
    end_s = time.monotonic() + 30
    while [d.fault for d in devices(probe)] != ["", ""]:
        assert time.monotonic() < end_s


def test_driver_that_counts_without_end_is_not_believed() -> None:
    found = probing(gate(nvmlDeviceGetCount=lambda: 2**32 - 1)).read()
    assert "more than 256 devices" in found.driver.why_not


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


def test_agent_that_is_limited_itself_believes_no_figure() -> None:
    # Inside a limited cgroup the driver reports the limit as the memory of the device.
    for hard, fault in ((10, "the agent's own cgroup"), (2**64 - 1, "")):
        probe = NvmlProbe(limited(hard), cgroup="/sys/fs/cgroup/a")
        _PROBES.append(probe)
        (device,) = devices(probe)
        assert device.fault.startswith(fault)
        assert bool(device.fault) is bool(fault)


@pytest.mark.parametrize(("text", "node"), [("1\n", 1), ("-1\n", None), ("", None)])
def test_numa_node_is_that_of_the_pci_device(tmp_path: Path, text: str, node: int | None) -> None:
    folder = tmp_path / "bus/pci/devices/0000:3b:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(text)
    pci = SimpleNamespace(busId=b"00000000:3B:00.0")
    probe = NvmlProbe(gate(nvmlDeviceGetPciInfo_v3=lambda handle: pci), sysfs=tmp_path)
    _PROBES.append(probe)
    (facts,) = probe.read().facts
    assert (facts.pci_bus_id, facts.numa_node) == ("00000000:3B:00.0", node)


def test_incarnation_changes_with_boot_and_module(tmp_path: Path) -> None:
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
            id="none is shown",
        ),
        pytest.param(
            {"nvmlDeviceGetMigMode": refusing(4)},
            "the agent has no permission to read the MIG mode",
            id="the mode may not be read",
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
def test_an_own_limit_that_cannot_be_searched_is_reported(
    cgroup: str | None, has_limits: bool, is_said: bool
) -> None:
    calls = {"nvmlDeviceGetMemoryLimits_v1": lambda handle, asked: None} if has_limits else {}
    found = probing(gate(**calls), cgroup=cgroup).read()
    message = [d.what for d in found.degraded if "own cgroup" in d.what]
    assert bool(message) is is_said
    assert [device.fault for device in found.devices] == [""]


def test_own_cgroup_is_found_if_the_kernel_shows_it_as_the_root(tmp_path: Path) -> None:
    """In a private cgroup namespace, the default of containerd and CRI-O with cgroups v2."""
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


def test_gpus_of_the_kernel_that_the_driver_does_not_show_are_reported(tmp_path: Path) -> None:
    for address, kind, driver in (
        ("0000:3b:00.0", "0x030200", "nvidia"),
        ("0000:3c:00.0", "0x030000", "vfio-pci"),
        ("0000:3d:00.0", "0x068000", "nvidia"),  # a bridge
    ):
        folder = tmp_path / "bus/pci/devices" / address
        folder.mkdir(parents=True)
        (folder / "class").write_text(f"{kind}\n")
        (folder / "driver").symlink_to(f"/sys/bus/pci/drivers/{driver}")
    probe = NvmlProbe(gate(nvmlDeviceGetCount=lambda: 0), sysfs=tmp_path)
    _PROBES.append(probe)
    (degraded,) = probe.read().degraded
    assert degraded.what.startswith("the kernel has 1 NVIDIA GPU, but the driver shows none")


def test_gpus_that_appear_later_are_seen() -> None:
    """The driver counts those that are there when it is opened."""
    there = [0]
    counted = []
    opened = gate(
        nvmlInitWithFlags=lambda flags: counted.append(there[0]),
        nvmlShutdown=lambda: None,
        nvmlDeviceGetCount=lambda: counted[-1],
    )
    probe = probing(opened)
    assert probe.read().devices == []
    assert probe.release(may_close=True)
    there[0] = 1
    assert [device.uuid for device in probe.read().devices] == ["GPU-0"]


#: Every call that the probe makes.
CALLS = [
    "nvmlInitWithFlags",
    "nvmlSystemGetDriverVersion",
    "nvmlSystemGetCudaDriverVersion",
    "nvmlDeviceGetCount",
    "nvmlDeviceGetHandleByIndex",
    "nvmlDeviceGetHandleByUUID",
    "nvmlDeviceGetUUID",
    "nvmlDeviceGetName",
    "nvmlDeviceGetMinorNumber",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetComputeRunningProcesses_v3",
    "nvmlDeviceGetMPSComputeRunningProcesses_v3",
    "nvmlDeviceGetProcessUtilization",
    "nvmlDeviceGetUtilizationRates",
    "nvmlGpmQueryDeviceSupport",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetRetiredPagesPendingStatus",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetPciInfo_v3",
    "nvmlDeviceGetArchitecture",
    "nvmlDeviceGetComputeMode",
    "nvmlDeviceGetMaxMigDeviceCount",
    "nvmlDeviceGetMigDeviceHandleByIndex",
]
#: Behaviours of a call instead of an answer: any code of NVML, an invalid answer, an exception.
MISHAPS: dict[str, Callable[..., Any]] = {
    **{f"code {code}": refusing(code) for code in [*range(1, 30), 777, 999]},
    "no sense": lambda *args: "no sense",
    "nothing": lambda *args: None,
    "not text": lambda *args: b"\xff".decode(),
    "mistake": lambda *args: {}["missing"],
}


def play(opened: Gate, calls: dict[str, Any]) -> None:
    vars(opened._library).clear()
    vars(opened._library).update(calls)


def test_a_uuid_that_two_devices_give_is_named_once_and_not_trusted() -> None:
    opened = gate(nvmlDeviceGetCount=lambda: 2, nvmlDeviceGetUUID=lambda handle: "GPU-same")
    (device,) = probing(opened).read().devices
    assert (device.uuid, device.fault) == ("GPU-same", "driver reports its UUID for two devices")


@settings(deadline=None)
@given(st.lists(st.dictionaries(st.sampled_from(CALLS), st.sampled_from(sorted(MISHAPS)))))
def test_no_error_escapes_the_probe_and_no_device_appears_twice(
    cycles: list[dict[str, str]],
) -> None:
    opened = Gate(library(nvmlDeviceGetCount=lambda: 2))
    normal = dict(vars(opened._library))
    probe = NvmlProbe(opened)
    try:
        for mishaps in cycles:
            play(opened, normal)
            for name, mishap in mishaps.items():
                setattr(opened._library, name, MISHAPS[mishap])
            with capture_logs():  # what is a mistake of ours is logged with all its frames
                found = probe.read()
            uuids = [device.uuid for device in found.devices]
            assert len(uuids) == len(set(uuids))
        play(opened, normal)
        assert [d.fault for d in probe.read().devices] == ["", ""]
    finally:
        probe.close()


def test_a_device_with_a_pending_mig_mode_takes_no_pods() -> None:
    pending = probing(gate(nvmlDeviceGetMigMode=lambda handle: [0, 1])).read().devices
    assert [device.fault for device in pending] == [
        "its MIG mode is about to change, which takes a reset"
    ]
    assert [device.fault for device in probing(gate()).read().devices] == [""]


@pytest.mark.parametrize("code", [2, 999])
@pytest.mark.parametrize(
    "failing",
    [
        "nvmlDeviceGetTotalEccErrors",
        "nvmlDeviceGetRetiredPagesPendingStatus",
        "nvmlDeviceGetFieldValues",
        "nvmlDeviceGetPciInfo_v3",
        "nvmlDeviceGetArchitecture",
        "nvmlDeviceGetComputeMode",
    ],
)
def test_a_question_that_fails_spoils_no_answer_to_the_others(failing: str, code: int) -> None:
    calls = {
        "nvmlDeviceGetRemappedRows": lambda handle: (0, 9, 0, 1),
        "nvmlDeviceGetArchitecture": lambda handle: 9,
        failing: refusing(code),
    }
    found = probing(gate(**calls)).read()
    (checkup,) = found.checkups.values()
    assert checkup.causes == ["a row remap failed"]
    (facts,) = found.facts
    assert facts.architecture == ("" if failing == "nvmlDeviceGetArchitecture" else "hopper")
    assert any(f"(NVML {code})" in each.what for each in found.degraded)


@pytest.mark.parametrize(
    ("ask", "minor"), [(lambda handle: 5, 5), (refusing(3), None), (refusing(999), None)]
)
def test_the_minor_number_is_reported_if_the_driver_has_it(
    ask: Callable[..., Any], minor: int | None
) -> None:
    (device,) = probing(gate(nvmlDeviceGetMinorNumber=ask)).read().devices
    assert (device.minor, device.fault) == (minor, "")
