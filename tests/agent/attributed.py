"""Builds readings of devices, holdings and processes, and computes the report rows from these
readings.
"""

from collections.abc import Mapping
from datetime import UTC, datetime

from agent.attribution import Attributed, attribute
from agent.probes.readings import (
    DeviceReading,
    HoldingReading,
    MirrorReading,
    ProcessReading,
)

TOLERANCE_BYTES = 64 << 20
MAX_PODS = 4096
MAX_DEVICE_BYTES = 1 << 44

GIB = 1 << 30
NOW = datetime(2026, 11, 20, 20, tzinfo=UTC)
GPU = "nvidia.com/gpu"
HASH = "0123456789abcdef0123456789abcdef"
MPS = "nvidia-cuda-mps"


def gpu(uuid: str = "A", processes: Mapping[int, int | None] | None = None) -> DeviceReading:
    return DeviceReading("nvml", uuid, 0, processes=processes)


def instance(uuid: str, processes: Mapping[int, int | None] | None, place: int) -> DeviceReading:
    return DeviceReading(
        "nvml", uuid, 0, kind="mig", parent="P", gpu_instance=place, processes=processes
    )


def holding(uid: str, replica: str = "A::0", container: str = "main") -> HoldingReading:
    return HoldingReading("checkpoint", uid, container, GPU, replica, "ns", f"name of {uid}")


def process(pid: int, pod: str = "", command: str = "python", known: bool = True) -> ProcessReading:
    return ProcessReading("proc", pid, command, pod, known)


def shown(
    *devices: DeviceReading,
    used: Mapping[str, int] | None = None,
    holdings: tuple[HoldingReading, ...] = (),
    processes: tuple[ProcessReading, ...] | None = (),
    mirrors: tuple[MirrorReading, ...] = (),
    by_mps: tuple[str, ...] = (),
) -> Attributed:
    checked = None if processes is None else {each.pid: each for each in processes}
    return attribute(devices, used or {}, holdings, checked, mirrors, by_mps)


def uses(found: Attributed) -> list[tuple[str, str, str, int | None]]:
    return [(p.uid, p.device, p.replica, p.used_bytes) for p in found.pods]
