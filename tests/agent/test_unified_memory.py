"""Tests GPUs that share the memory of their host."""

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from agent.probes.host_memory import HostMemoryProbe
from agent.probes.nvml import Memory
from agent.probes.readings import (
    DeviceReading,
    DriverReading,
    HoldingReading,
    HostMemoryReading,
    PoolReading,
    ProcessReading,
    Reading,
    SharingReading,
    SourceReading,
)
from agent.probes.unified_memory import SEVERAL, UNSET
from agent.status_builder import summarise
from headroom.contract.gpunode import Device

GIB = 1 << 30
_UID = "0f3a1b2c-8d4e-4f5a-9b6c-7d8e9f0a1b2c"


def _gpu(uuid: str = "GPU-a", index: int = 0, **changes: object) -> DeviceReading:
    return DeviceReading("nvml", uuid, index, **{"processes": {}, **changes})  # type: ignore[arg-type]


def _host(available_gib: int, pool_bytes: int | None) -> HostMemoryReading:
    return HostMemoryReading("host-memory", 128 * GIB, available_gib * GIB, pool_bytes)


def _reported(*readings: Reading, replicas: int = 4) -> list[Device]:
    sharing = SharingReading(
        "flags", "nvidia.com/gpu", replicas, "none" if replicas == 1 else "time-slicing"
    )
    every = [DriverReading("nvml"), sharing, SourceReading("proc"), *readings]
    return summarise(every, datetime.now(UTC)).devices


@pytest.mark.parametrize(
    ("pool_gib", "available_gib", "memory_gib", "used_gib"),
    [
        pytest.param(96, 120, 96, 10, id="the host has enough"),
        pytest.param(96, 50, 96, 46, id="the host has little memory"),
        pytest.param(256, 120, 128, 10, id="more than the host has"),
    ],
)
def test_the_use_of_the_pool_is_the_use_of_processes_and_limited_by_the_host(
    pool_gib: int, available_gib: int, memory_gib: int, used_gib: int
) -> None:
    gpu = _gpu(processes={7: 10 * GIB})
    process = ProcessReading("proc", 7, "python", _UID)
    holding = HoldingReading("checkpoint", _UID, "main", "nvidia.com/gpu", "GPU-a::0")
    host = _host(available_gib, pool_gib * GIB)
    (device,) = _reported(gpu, process, holding, host)
    assert device.healthy
    assert (device.memory_bytes, device.used_bytes) == (memory_gib * GIB, used_gib * GIB)
    assert device.unattributed_bytes == (used_gib - 10) * GIB


@pytest.mark.parametrize(("total_gib", "memory_gib"), [(120, 108), (8, 6)])
def test_auto_leaves_a_tenth_and_at_least_2_gib_to_the_host(
    total_gib: int, memory_gib: int
) -> None:
    host = HostMemoryReading("host-memory", total_gib * GIB, total_gib * GIB, 0)
    (device,) = _reported(_gpu(), host)
    assert (device.memory_bytes, device.used_bytes) == (memory_gib * GIB, 0)


def test_without_the_setting_a_shared_gpu_takes_no_pods() -> None:
    (device,) = _reported(_gpu(), _host(100, None))
    assert (device.healthy, device.memory_bytes, device.health_reason) == (False, -1, UNSET)


def test_without_the_setting_only_the_use_of_its_pod_counts_on_an_unshared_gpu() -> None:
    gpu = _gpu(processes={7: 10 * GIB, 8: 3 * GIB})
    processes = [ProcessReading("proc", 7, "python", _UID), ProcessReading("proc", 8, "Xorg")]
    holding = HoldingReading("checkpoint", _UID, "main", "nvidia.com/gpu", "GPU-a")
    (device,) = _reported(gpu, *processes, holding, _host(20, None), replicas=1)
    assert device.healthy
    assert (device.used_bytes, device.unattributed_bytes) == (10 * GIB, 0)


def test_memory_that_is_zero_is_not_reported() -> None:
    (device,) = _reported(_gpu(memory=Memory(0, 0, 0)), _host(128, 64 * GIB))
    assert device.memory_bytes == 64 * GIB


def test_several_gpus_do_not_divide_the_memory_of_the_host() -> None:
    devices = _reported(_gpu(), _gpu("GPU-b", 1), _host(100, 0))
    assert [device.health_reason for device in devices] == [SEVERAL] * 2


def test_an_invalid_pool_closes_the_gpu_with_a_reason() -> None:
    host = msgspec.structs.replace(_host(100, None), pool_error="annotation x: '9' is wrong")
    for replicas in (1, 4):
        (device,) = _reported(_gpu(), host, replicas=replicas)
        assert (device.healthy, device.health_reason) == (False, "annotation x: '9' is wrong")


@pytest.mark.parametrize(
    ("flag", "annotation", "pool"),
    [
        pytest.param(None, None, (None, ""), id="neither"),
        pytest.param(64 * GIB, None, (64 * GIB, ""), id="the agent's flag"),
        pytest.param(None, PoolReading("labels"), (0, ""), id="the node's annotation"),
        pytest.param(64 * GIB, PoolReading("labels", GIB), (GIB, ""), id="both"),
        pytest.param(
            64 * GIB, PoolReading("labels", error="wrong"), (0, "wrong"), id="an invalid annotation"
        ),
    ],
)
def test_the_annotation_of_the_node_has_priority_over_the_flag_of_the_agent(
    flag: int | None,
    annotation: PoolReading | None,
    pool: tuple[int | None, str],
    tmp_path: Path,
) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 131072 kB\nMemAvailable: 65536 kB\n")
    readings: list[Reading] = [_gpu(), *([annotation] if annotation else [])]
    host, _ = HostMemoryProbe(flag, meminfo).follow(readings)
    assert isinstance(host, HostMemoryReading)
    assert (host.pool_bytes, host.pool_error) == pool


def test_a_fault_does_not_count_as_unified_memory() -> None:
    (device,) = _reported(_gpu(fault="GPU is lost"), _host(100, 0))
    assert device.health_reason == "GPU is lost"


def test_the_memory_of_the_host_is_read_only_if_a_gpu_needs_it(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    probe = HostMemoryProbe(0, meminfo)
    assert probe.follow([_gpu(memory=Memory(GIB, GIB, 0))]) == []
    (source,) = probe.follow([_gpu()])
    assert isinstance(source, SourceReading)
    assert source.state == "degraded"
    meminfo.write_text("MemTotal:       131072 kB\nMemFree: 1 kB\nMemAvailable:   65536 kB\n")
    host, source = probe.follow([_gpu()])
    assert host == HostMemoryReading("host-memory", 128 << 20, 64 << 20, 0)
    assert source == SourceReading("host-memory")
