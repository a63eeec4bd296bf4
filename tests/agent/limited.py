"""Runs containers with memory limits of the driver, and returns the agent's report."""

import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

from agent.probes.readings import (
    DeviceReading,
    DriverReading,
    HoldingReading,
    Reading,
)
from tests.agent.whole import Whole

GPU = "nvidia.com/gpu"
CALL = "nvmlDeviceGetMemoryLimits_v1"
UIDS = [f"{number:08x}-1111-4222-8333-{number:012x}" for number in range(4)]
HASH = "0123456789abcdef0123456789abcdef"


def reported(whole: Whole, *flags: str) -> dict[str, Any]:
    done = whole.once("--json", *(flags or ("--pause", "0")))
    assert "Traceback" not in done.stderr, done.stderr
    status: dict[str, Any] = json.loads(done.stdout)
    return status


def source(status: dict[str, Any]) -> tuple[str, str]:
    (found,) = [s for s in status["sources"] if s["name"] == "limits"]
    return found.get("state", "ok"), found.get("message", "")


def library(limits: Callable[..., None]) -> Any:
    return SimpleNamespace(
        NVMLError=pynvml.NVMLError,
        _nvmlGetFunctionPointer=lambda name: name,
        nvmlDeviceGetHandleByUUID=lambda uuid: uuid,
        nvmlDeviceGetMemoryLimits_v1=limits,
        c_nvmlGetMemoryLimits_v1_t=pynvml.c_nvmlGetMemoryLimits_v1_t,
        NVML_DEVICE_MEMORY_LIMIT_MAX=pynvml.NVML_DEVICE_MEMORY_LIMIT_MAX,
    )


def granting(used: int) -> Callable[..., None]:
    def limits(device: str, asked: Any) -> None:
        asked.softLimit, asked.hardLimit, asked.currentUsed = 0, 2**64 - 1, used

    return limits


def held(uid: str, replica: str = "A::0", container: str = "main") -> HoldingReading:
    return HoldingReading("checkpoint", uid, container, GPU, replica, "ns", "p")


SAMPLE: list[Reading] = [DriverReading("nvml"), DeviceReading("nvml", "A", 0), held(UIDS[1])]
