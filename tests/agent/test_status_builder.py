"""Tests the content of a status, and when a changed status is written."""

import math
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.probes.nvml import Memory
from agent.probes.readings import (
    ActivityReading,
    Degraded,
    DeviceReading,
    DriverReading,
    ObstacleReading,
    PermissionReading,
    SharingReading,
    SourceReading,
    SteeredReading,
)
from agent.status_builder import rfc3339, summarise
from agent.status_writer import worth_writing
from headroom.contract.gpunode import (
    ContainerLimit,
    Device,
    GPUNodeStatus,
    PodUse,
    SmActivity,
    Summary,
)

NOW = datetime(2026, 11, 21, 1, 2, 3, 456789, tzinfo=UTC)
MIB = 1 << 20
GIB = 1 << 30


def reading(uuid: str = "GPU-a", **changes: Any) -> DeviceReading:
    fields: dict[str, Any] = {
        "index": 0,
        "memory": Memory(total_bytes=1000, free_bytes=700, reserved_bytes=100),
        **changes,
    }
    return DeviceReading("nvml", uuid=uuid, **fields)


def status(*devices: Device, **changes: Any) -> GPUNodeStatus:
    return GPUNodeStatus(devices=list(devices), **changes)


def device(uuid: str = "GPU-a", **changes: Any) -> Device:
    fields: dict[str, Any] = {
        "memory_bytes": 80 * GIB,
        "reserved_bytes": GIB,
        "used_bytes": 10 * GIB,
        **changes,
    }
    return Device(uuid=uuid, **fields)


def one(memory: Memory | None, **changes: Any) -> Device:
    (found,) = summarise([reading(memory=memory, **changes)], NOW).devices
    return found


def test_without_attribution_there_are_no_pods_and_no_unattributed_use() -> None:
    found = summarise([DriverReading("nvml", version="580"), reading()], NOW)
    assert found.devices[0].unattributed_bytes is None
    assert found.devices[0].sm_activity is None
    assert found.pods == []


def test_values_read_a_moment_apart_never_make_used_negative() -> None:
    found = one(Memory(total_bytes=1000, free_bytes=950, reserved_bytes=100))
    assert (found.used_bytes, found.healthy) == (0, True)


@pytest.mark.parametrize(
    ("memory", "reported"),
    [
        pytest.param(Memory(0, 0, 0), (0, 0), id="no memory"),
        pytest.param(Memory(1 << 45, 0, 0), (-1, 0), id="more memory than any device"),
        pytest.param(Memory(1000, 1001, 0), (1000, 0), id="more free than its memory"),
        pytest.param(Memory(1000, 10, 1001), (1000, 1001), id="more reserved than its memory"),
    ],
)
def test_a_device_with_contradictory_values_is_unhealthy_and_nothing_is_computed(
    memory: Memory, reported: tuple[int, int]
) -> None:
    found = one(memory)
    assert not found.healthy
    assert found.health_reason.startswith("driver reports")
    assert (found.memory_bytes, found.reserved_bytes) == reported
    assert found.used_bytes == -1


def test_a_fault_of_the_probe_is_the_reason_even_with_valid_values() -> None:
    found = one(Memory(1000, 700, 100), fault="XID 79")
    assert (found.healthy, found.health_reason, found.used_bytes) == (False, "XID 79", 200)


ANY_BYTES = st.integers(0, (1 << 64) - 1) | st.integers(0, 2000)


@given(st.builds(Memory, ANY_BYTES, ANY_BYTES, st.none() | ANY_BYTES))
def test_a_healthy_device_adds_up_and_can_be_encoded_whatever_the_driver_reports(
    memory: Memory,
) -> None:
    found = one(memory)
    for figure in (found.memory_bytes, found.reserved_bytes, found.used_bytes):
        assert -1 <= figure < 1 << 63
    if found.healthy:
        assert 0 <= found.used_bytes <= found.memory_bytes
        assert 0 <= found.reserved_bytes <= found.memory_bytes
    assert found.healthy == (found.used_bytes >= 0)


def test_sharing_by_flags_applies_only_to_whole_gpus() -> None:
    mig = reading("MIG-1", kind="mig", parent="GPU-b", gpu_instance=1, index=1)
    found = summarise(
        [SharingReading("flags", "nvidia.com/gpu", 4, "time-slicing"), reading(), mig], NOW
    )
    gpu, instance = found.devices
    assert (gpu.resource, gpu.sharing, gpu.replicas.free) == ("nvidia.com/gpu", "time-slicing", 4)
    assert (instance.resource, instance.sharing, instance.replicas.total) == ("", "none", 0)
    assert "MIG" in found.conditions[1].message


def test_devices_are_sorted_by_index() -> None:
    found = summarise([reading("GPU-b", index=1), reading("GPU-a", index=0)], NOW)
    assert [d.uuid for d in found.devices] == ["GPU-a", "GPU-b"]


def test_memory_of_a_shared_gpu_instance_counts_once_in_the_kubectl_column() -> None:
    memory = Memory(10 * GIB, GIB, 0)
    same = [
        reading(f"MIG-{i}", kind="mig", parent="GPU-a", gpu_instance=1, memory=memory)
        for i in range(2)
    ]
    assert summarise(same, NOW).summary.memory == "10.0 GiB"


def test_a_condition_keeps_the_time_of_its_last_change() -> None:
    later = NOW + timedelta(minutes=1)
    good = [DriverReading("nvml", version="580"), reading()]
    first = summarise(good, NOW)
    worse = summarise([*good, Degraded("dcgm", "not reached")], later, before=first)
    ready, complete = worse.conditions
    assert (ready.status, ready.last_transition_time) == ("True", rfc3339(NOW))
    assert (complete.status, complete.last_transition_time) == ("False", rfc3339(later))
    assert complete.message == "dcgm: not reached"


def test_times_are_utc_with_microseconds() -> None:
    there = NOW.astimezone(timezone(timedelta(hours=5)))
    assert rfc3339(there) == "2026-11-21T01:02:03.456789Z"


def test_the_first_report_is_always_written() -> None:
    assert worth_writing(None, status(), 0.0)


def test_missing_reports_are_never_written_and_cause_no_change() -> None:
    before = summarise([DriverReading("nvml"), reading()], NOW)
    after = summarise([DriverReading("nvml"), reading()], NOW + timedelta(days=1))
    assert before != after
    assert not worth_writing(before, after, 1e9)


def test_a_change_in_only_the_texts_of_kubectls_columns_is_not_written() -> None:
    """The texts contain rounded values. The exact values are compared separately, or change
    together with the devices.
    """
    columns = Summary(devices=1, memory="24.0 GiB", used="0.9 GiB", free="23.1 GiB")
    before = msgspec.structs.replace(status(device()), summary=columns)
    rounded = msgspec.structs.replace(columns, used="1.0 GiB", free="23.0 GiB")
    assert not worth_writing(before, msgspec.structs.replace(before, summary=rounded), 1e9)
    other = msgspec.structs.replace(columns, devices=2)
    assert worth_writing(before, msgspec.structs.replace(before, summary=other), 0.0)


POD = PodUse(uid="u", device="GPU-a", used_bytes=GIB)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        pytest.param(status(), status(device()), id="device added"),
        pytest.param(status(device()), status(), id="device removed"),
        pytest.param(
            status(device()),
            status(device(healthy=False, health_reason="lost")),
            id="device changed health",
        ),
        pytest.param(status(device()), status(device(used_bytes=-1)), id="value became absent"),
        pytest.param(
            status(device()), status(device(unattributed_bytes=0)), id="value became known"
        ),
        pytest.param(status(device()), status(device(), pods=[POD]), id="pod added"),
        pytest.param(status(device(), pods=[POD]), status(device()), id="pod removed"),
        pytest.param(status(), status(driver_version="581"), id="another driver"),
    ],
)
def test_added_and_removed_pods_and_changed_health_are_written_at_once(
    before: GPUNodeStatus, after: GPUNodeStatus
) -> None:
    assert worth_writing(before, after, 0.0)


@pytest.mark.parametrize(
    ("used_bytes", "since_s", "written"),
    [
        pytest.param(10 * GIB - 1, 1.0, True, id="little memory freed"),
        pytest.param(
            10 * GIB - GIB, 0.9, False, id="freed less than a second after the last write"
        ),
        pytest.param(10 * GIB + 64 * MIB, 5.0, True, id="grown by 64 MiB"),
        pytest.param(10 * GIB + 64 * MIB - 1, 1e9, False, id="grown by less than 64 MiB"),
        pytest.param(
            10 * GIB + 64 * MIB, 4.9, False, id="grown less than five seconds after the last write"
        ),
    ],
)
def test_memory_is_written_when_a_decision_depends_on_it(
    used_bytes: int, since_s: float, written: bool
) -> None:
    after = status(device(used_bytes=used_bytes))
    assert worth_writing(status(device()), after, since_s) is written


def test_a_change_of_one_percent_of_a_small_device_is_written() -> None:
    small = {"memory_bytes": 1000 * MIB, "reserved_bytes": 0}
    before = status(device(used_bytes=0, **small))
    assert worth_writing(before, status(device(used_bytes=10 * MIB, **small)), 5.0)
    assert not worth_writing(before, status(device(used_bytes=10 * MIB - 1, **small)), 5.0)


def test_memory_freed_by_a_pod_is_written_even_if_the_devices_total_stays() -> None:
    after = msgspec.structs.replace(POD, used_bytes=GIB - 1)
    assert worth_writing(status(device(), pods=[POD]), status(device(), pods=[after]), 1.0)


def test_a_limit_is_written_at_once_and_use_below_it_with_the_next_report() -> None:
    def limited(used_bytes: int, hard_bytes: int) -> GPUNodeStatus:
        limit = ContainerLimit("u", "GPU-a", "c", used_bytes=used_bytes, hard_bytes=hard_bytes)
        return status(device(), limits=[limit])

    assert worth_writing(limited(5, 9 * GIB), limited(5, 8 * GIB), 0.0)
    assert worth_writing(limited(5, 9 * GIB), status(device()), 0.0)
    assert not worth_writing(limited(5, 9 * GIB), limited(9 * GIB, 9 * GIB), 1e9)
    assert not worth_writing(limited(9 * GIB, 9 * GIB), limited(0, 9 * GIB), 1e9)


@pytest.mark.parametrize(
    ("ratio", "since_s", "written"),
    [
        pytest.param(0.3, 60.0, True, id="increased by 10 %"),
        pytest.param(0.1, 60.0, True, id="decreased by 10 %"),
        pytest.param(0.29, 1e9, False, id="changed by less than 10 %"),
        pytest.param(0.9, 59.0, False, id="less than a minute after the last write"),
        pytest.param(None, 60.0, True, id="became unknown"),
    ],
)
def test_a_change_of_only_sm_activity_is_written_once_a_minute(
    ratio: float | None, since_s: float, written: bool
) -> None:
    before = status(device(sm_activity=SmActivity(ratio=0.2, source="gpm")))
    activity = None if ratio is None else SmActivity(ratio=ratio, source="gpm")
    assert worth_writing(before, status(device(sm_activity=activity)), since_s) is written


def smoothed(*samples: tuple[float, float | None, str]) -> list[float | None]:
    """Return the smoothed activity after each sample. A sample has a time in seconds, a ratio and a
    source.
    """
    before: GPUNodeStatus | None = None
    found: list[float | None] = []
    for at_s, ratio, source in samples:
        activity = ActivityReading(source, "GPU-a", sm_ratio=ratio)
        before = summarise([reading(), activity], NOW + timedelta(seconds=at_s), before=before)
        sm = before.devices[0].sm_activity
        found.append(None if sm is None else sm.smoothed_ratio)
    return found


def test_sm_activity_is_smoothed_over_a_minute_at_any_sampling_rate() -> None:
    seldom = smoothed((0, 1.0, "gpm"), (60, 0.0, "gpm"))
    often = smoothed((0, 1.0, "gpm"), *((5.0 * n, 0.0, "gpm") for n in range(1, 13)))
    assert seldom == [None, pytest.approx(math.exp(-1))]
    assert often[-1] == pytest.approx(math.exp(-1))


def test_smoothing_restarts_with_another_source_or_after_a_gap_and_tolerates_clock_steps() -> None:
    found = smoothed((0, 1.0, "gpm"), (5, 0.5, "dcgm"), (10, None, "dcgm"), (15, 0.5, "dcgm"))
    assert found == [None, None, None, None]
    # The clock was set back, so the elapsed time counts as zero.
    assert smoothed((0, 1.0, "gpm"), (-3600, 0.0, "gpm"))[1] == 1.0


def test_every_source_has_a_row_and_an_absent_source_is_not_a_fault() -> None:
    found = summarise(
        [
            DriverReading("nvml", version="580"),
            SourceReading("checkpoint", "absent", "no file"),
            SourceReading("dcgm"),
            SourceReading("proc", "degraded", "hidden"),
            Degraded("dcgm", "too old"),
            reading(),
        ],
        NOW,
    )
    rows = {source.name: (source.state, source.message) for source in found.sources}
    assert rows == {
        "checkpoint": ("absent", "no file"),
        "dcgm": ("degraded", "too old"),
        "nvml": ("ok", ""),
        "proc": ("degraded", "hidden"),
    }
    assert found.conditions[1].message == "dcgm: too old; proc: hidden"
    without = summarise([SourceReading("checkpoint", "absent", "no file")], NOW)
    assert without.conditions[1].status == "True"
    assert worth_writing(found, summarise([DriverReading("nvml", "580"), reading()], NOW), 0.0)


@pytest.mark.parametrize("permitted", [True, False])
def test_steered_resources_and_obstacles_are_reported(permitted: bool) -> None:
    readings = [
        *(SteeredReading(resource) for resource in ("nvidia.com/mig-1g.10gb", "nvidia.com/gpu")),
        ObstacleReading("no socket"),
        ObstacleReading("no kubelet"),
        PermissionReading(permitted),
    ]
    plugin = summarise(readings, NOW).plugin
    assert plugin.steered == ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb"]
    assert plugin.choice_obstacle == "no socket; no kubelet"
    assert plugin.steering_permitted is permitted
    assert summarise([], NOW).plugin.steering_permitted is None
