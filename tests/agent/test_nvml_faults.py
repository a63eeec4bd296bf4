"""Tests GPUs and drivers that disappear, hang or return invalid values."""

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml
import pytest

from agent.probes import sm_activity
from agent.probes.nvml import Gate
from agent.probes.readings import DriverReading
from tests.agent.nvml_library import devices, gate, probing, refusing
from tests.threads import begun_since
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.usefixtures("threads_end")


def test_a_stale_handle_is_looked_up_again_by_uuid() -> None:
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


def test_a_lost_device_keeps_its_identity_but_has_no_values() -> None:
    lost: list[int] = []

    def handle(index: int) -> int:
        if lost:
            raise pynvml.NVMLError(lost[0])
        return index

    probe = probing(gate(nvmlDeviceGetHandleByIndex=handle))
    (before,) = devices(probe)
    assert before.memory is not None
    lost.append(pynvml.NVML_ERROR_GPU_IS_LOST)
    for _ in range(2):  # The device stays lost, but the agent still reports it.
        (after,) = devices(probe)
        assert (after.uuid, after.model, after.index) == ("GPU-0", "A100", 0)
        assert (after.memory, after.processes) == (None, None)
        assert "lost" in after.fault
    lost.clear()
    assert devices(probe) == [before]


def test_all_mig_devices_of_a_lost_gpu_are_lost() -> None:
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


def test_compute_instances_that_share_memory_report_equal_memory() -> None:
    free = iter(range(900, 0, -1))  # changes with every call

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


def test_a_removed_device_is_gone_and_not_lost() -> None:
    counts = [1, 0]
    probe = probing(gate(nvmlDeviceGetCount=lambda: counts.pop(0)))
    assert len(devices(probe)) == 1
    assert devices(probe) == []


def test_a_fault_is_not_attributed_to_a_removed_device() -> None:
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


def test_a_lost_driver_is_reported_and_its_devices_have_no_values() -> None:
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


def test_a_driver_that_cannot_count_devices_is_not_a_node_without_devices() -> None:
    assert (
        "number of devices" in probing(gate(nvmlDeviceGetCount=refusing(4))).read().driver.why_not
    )


def test_a_hanging_call_affects_only_its_device_and_starts_no_second_thread() -> None:
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
    probe._deadline_s = 0.5
    for _ in range(5):
        found = probe.read()
        probe._deadline_s = 30.0  # Only the first sample waits for the hanging call.
        assert found.hanging
        assert [(d.uuid, d.fault) for d in found.devices] == [
            ("GPU-0", ""),
            ("GPU-1", "driver call nvmlDeviceGetMemoryInfo_v2 hangs"),
            ("GPU-2", ""),
        ]
        assert len(readers()) == 4  # three devices and the driver
    stuck.set()
    until(lambda: not probe.read().hanging, "no call hangs")
    assert [d.fault for d in probe.read().devices] == ["", "", ""]


def _wait(stuck: threading.Event) -> None:
    stuck.wait()


def gpm(free: Callable[[Any], None], **functions: Any) -> Gate:
    """A driver whose samples must be freed with ``free``."""
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
    """Compare samples in every pass. Otherwise, only a slow machine would compare them."""
    monkeypatch.setattr(sm_activity, "GPM_APART_S", 0.0)


@pytest.mark.usefixtures("gpm_at_once")
def test_samples_of_a_removed_gpu_are_freed_by_its_thread() -> None:
    freed: list[int] = []
    count = 2
    readers = begun_since("nvml")
    probe = probing(gpm(freed.append, nvmlDeviceGetCount=lambda: count))
    assert [d.uuid for d in devices(probe)] == ["GPU-0", "GPU-1"]
    count = 1

    def is_released() -> bool:
        assert [d.uuid for d in devices(probe)] == ["GPU-0"]
        return len(freed) >= 2 and len(readers()) <= 2

    until(is_released, "samples and thread of the removed device are released")
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
def test_freeing_the_samples_of_a_removed_gpu_may_hang() -> None:
    stuck = threading.Event()
    count = 2
    readers = begun_since("nvml")
    probe = probing(gpm(lambda sample: _wait(stuck), nvmlDeviceGetCount=lambda: count))
    assert len(devices(probe)) == 2
    count = 1
    try:
        looking = threading.Thread(target=lambda: [probe.read() for _ in range(5)], daemon=True)
        looking.start()
        looking.join(PATIENCE_S)
        assert not looking.is_alive()
        assert [d.fault for d in devices(probe)] == [""]
        count = 2
        assert [d.fault for d in devices(probe)] == [""]  # The other GPU has not reported its UUID.
        assert len(readers()) == 3  # two devices and the driver
    finally:
        stuck.set()
    until(lambda: [d.fault for d in devices(probe)] == ["", ""], "both devices are read")


def test_an_implausible_device_count_is_not_used() -> None:
    found = probing(gate(nvmlDeviceGetCount=lambda: 2**32 - 1)).read()
    assert "more than 256 devices" in found.driver.why_not
