"""Simulates pynvml with one GPU. Tests can replace its calls."""

import ctypes
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pynvml

from agent.probes.nvml import Gate
from agent.probes.nvml_probe import NvmlProbe
from agent.probes.readings import DeviceReading

NOT_AVAILABLE = ctypes.c_ulonglong(-1).value


def library(**functions: Any) -> SimpleNamespace:
    """Return a fake pynvml with one idle GPU and the real errors and structs. ``functions``
    replaces calls.

    A function whose name ends in RunningProcesses_v2 or _v3 replaces a C function.
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
    """Return a replacement for a C function that lists ``processes`` and appends the size of its
    buffer to ``sizes``.
    """

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


PROBES: list[NvmlProbe] = []


def probing(opened: Gate, deadline_s: float = 30.0, cgroup: str | None = None) -> NvmlProbe:
    """Return a probe whose threads end at the end of the test."""
    PROBES.append(NvmlProbe(opened, deadline_s, cgroup=cgroup))
    return PROBES[-1]


def devices(probe: NvmlProbe) -> list[DeviceReading]:
    return probe.read().devices
