"""Checks that the API server admits every report, for any response of the driver, the plugin and
the kubelet.

One value outside a limit of the CRD would hide all GPUs of the node, because the API server would
reject the complete report.
"""

import json
from collections.abc import Sequence
from datetime import UTC, datetime

import jsonschema_rs
import msgspec
import pytest

from agent.probes.nvml import Memory
from agent.probes.readings import (
    DeviceReading,
    DriverReading,
    HealthIssueReading,
    HoldingReading,
    KubeletVersionReading,
    ObstacleReading,
    PluginReading,
    ProcessReading,
    Reading,
    RegisteredReading,
    SourceReading,
    TopologyReading,
)
from agent.status_builder import summarise
from headroom.contract.gpunode import GPUNodeStatus
from tests.contract.test_crd import SCHEMA

CRD = jsonschema_rs.Draft7Validator(SCHEMA)
GPU, GIB, LONG = "nvidia.com/gpu", 1 << 30, "x" * 2000
SOUND = DeviceReading("nvml", "GPU-0", 0, "L4", memory=Memory(24 * GIB, 23 * GIB, GIB // 2))
SOURCES = [SourceReading(name) for name in ("proc", "checkpoint", "podresources")]


def memory(total: int, free: int, reserved: int | None = 0) -> DeviceReading:
    return DeviceReading("nvml", "GPU-1", 1, "L4", memory=Memory(total, free, reserved))


def offered(replicas: int, held: int = 0) -> list[Reading]:
    ids = [f"GPU-0::{number}" for number in range(replicas)]
    holdings = [HoldingReading("checkpoint", "u", "main", GPU, each) for each in ids[:held]]
    return [RegisteredReading("podresources", GPU, frozenset(ids)), *holdings]


@pytest.mark.parametrize(
    "odd",
    [
        pytest.param([memory(1 << 50, 1 << 49)], id="a petabyte"),
        pytest.param([memory((1 << 63) - 1, 0, 1 << 62)], id="the largest number"),
        pytest.param([memory(-1, -1, -1)], id="negative memory"),
        pytest.param([memory(24 * GIB, 1 << 50, 1 << 50)], id="more free than its memory"),
        pytest.param(offered(3000), id="thousands of replicas"),
        pytest.param(offered(3000, held=2000), id="thousands of held replicas"),
        pytest.param([HealthIssueReading("GPU-0", LONG, "2026-11-21T00:00:00Z")], id="long issue"),
        pytest.param([DriverReading("nvml", LONG, cuda_version=LONG)], id="long versions"),
        pytest.param([DriverReading("nvml", why_not=LONG)], id="long reason"),
        pytest.param([KubeletVersionReading(LONG)], id="long version of the kubelet"),
        pytest.param([TopologyReading("kubelet", LONG)], id="long policy"),
        pytest.param([PluginReading("plugin", device_list_strategy=(LONG,))], id="long strategy"),
        pytest.param([ObstacleReading(LONG)], id="long obstacle"),
        pytest.param([ProcessReading("proc", 7, "\x1b[2J")], id="name of a process"),
        pytest.param([SourceReading(f"s{n}", "degraded", LONG) for n in range(99)], id="sources"),
    ],
)
def test_an_invalid_value_does_not_hide_the_other_values(odd: Sequence[Reading]) -> None:
    first = [DriverReading("nvml", "580")]
    driver = [] if any(isinstance(each, DriverReading) for each in odd) else first
    device = msgspec.structs.replace(SOUND, processes={7: GIB})
    status = summarise([*driver, device, *SOURCES, *odd], datetime.now(UTC))
    CRD.validate(json.loads(msgspec.json.encode({"metadata": {}, "status": status})))
    assert _sound(status)


def _sound(status: GPUNodeStatus) -> bool:
    (found,) = (device for device in status.devices if device.uuid == "GPU-0")
    return (found.memory_bytes, found.used_bytes) == (24 * GIB, GIB // 2)


def test_the_number_of_free_replicas_is_limited() -> None:
    status = summarise(
        [DriverReading("nvml"), SOUND, *SOURCES, *offered(3000, held=10)], datetime.now(UTC)
    )
    (device,) = status.devices
    assert (device.replicas.free, device.replicas.allocated) == (1014, 10)
