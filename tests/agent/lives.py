"""A simulated node whose containers use memory, on a clock that the test moves. The agent's own
code processes the samples.

The test writes readings directly, because other tests cover the driver, the kubelet and /proc.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from agent.peak_recorder import PeakRecorder
from agent.peaks import Lives
from agent.probes.nvml import Memory
from agent.probes.readings import (
    ActivityReading,
    Container,
    DeviceReading,
    DriverReading,
    HighWaterReading,
    HoldingReading,
    ProcessReading,
    Reading,
    SourceReading,
)
from agent.probes.state_file import StateFile
from agent.status_builder import summarise
from headroom.contract.gpunode import GPUNodeStatus, PodUse

GIB = 1 << 30
MIB = 1 << 20
BOOTED = datetime(2026, 11, 20, 20, tzinfo=UTC)
GPU = "nvidia.com/gpu"


@dataclass
class Node:
    """A node with an agent that can restart. By default, the only device is GPU-a with 80 GiB."""

    path: Path | None = None
    #: Seconds since the node booted.
    now_s: float = 1000.0
    #: Seconds by which the wall clock is ahead of the true time.
    clock_off_s: float = 0.0
    devices: Mapping[str, Mapping[str, object]] = field(default_factory=lambda: {"GPU-a": {}})
    #: Bytes that each container uses on each device, by device and container ID. None if the driver
    #: does not report the use.
    used: dict[tuple[str, str], int | None] = field(default_factory=dict)
    #: The container and the pod UID of each container ID.
    containers: dict[str, tuple[Container, str]] = field(default_factory=dict)
    holdings: list[HoldingReading] = field(default_factory=list)
    #: High-water mark of the used bytes, by device and container ID.
    marks: dict[tuple[str, str], int] = field(default_factory=dict)
    #: SM activity of each device, and the share of each container in the device's SM time.
    sm: dict[str, tuple[float | None, Mapping[str, float]]] = field(default_factory=dict)
    #: Whether the agent can see processes.
    sees_processes: bool = True
    before: GPUNodeStatus | None = None

    def __post_init__(self) -> None:
        self.start_agent()

    def start_agent(self) -> None:
        file = None if self.path is None else StateFile(self.path, Lives(), "peaks")
        self.recorder = PeakRecorder(file, lambda: self.now_s)

    def hold(self, uid: str, container: str = "main", replica: str = "GPU-a::0") -> None:
        self.holdings.append(
            HoldingReading("checkpoint", uid, container, GPU, replica, "ns", f"pod-{uid}")
        )

    def run(self, container_id: str, uid: str, name: str = "main", age_s: float = 0.0) -> None:
        """Start a container. Its start time is ``age_s`` seconds ago."""
        self.containers[container_id] = Container(container_id, name, self.now_s - age_s), uid

    def end(self, container_id: str) -> None:
        """End all processes of the container."""
        for key in [key for key in self.used if key[1] == container_id]:
            del self.used[key]

    def sample(self, after_s: float = 5.0) -> list[PodUse]:
        """Advance the clock by ``after_s``, take a sample, and return its rows."""
        self.now_s += after_s
        now = BOOTED + timedelta(seconds=self.now_s + self.clock_off_s)
        self.before = summarise(
            self._readings(), now, before=self.before, measure=self.recorder.measure
        )
        return self.before.pods

    def one(self, after_s: float = 5.0) -> PodUse:
        (row,) = self.sample(after_s)
        return row

    def samples(self, used: Callable[[float], int], for_s: float, key: tuple[str, str]) -> PodUse:
        """Take a sample every 5 s for ``for_s``. ``used`` computes the used bytes from the elapsed
        seconds. Return the last row.
        """
        began_s = self.now_s
        while self.now_s - began_s < for_s:
            self.used[key] = used(self.now_s + 5.0 - began_s)
            row = self.one()
        return row

    def _readings(self) -> list[Reading]:
        pids = {key: 100 + number for number, key in enumerate(sorted(self.containers))}
        readings: list[Reading] = [DriverReading("nvml", "580.95")]
        for uuid, more in self.devices.items():
            listed = {pids[each]: b for (device, each), b in self.used.items() if device == uuid}
            used = sum(figure or 0 for figure in listed.values())
            memory = Memory(80 * GIB, 80 * GIB - used, 0)
            readings.append(
                DeviceReading("nvml", uuid, 0, memory=memory, processes=listed, **more)  # type: ignore[arg-type]
            )
        readings += self.holdings
        readings += [
            ActivityReading(
                "nvml-process", uuid, sm_ratio=ratio, sm_by_pid={pids[c]: s for c, s in of.items()}
            )
            for uuid, (ratio, of) in self.sm.items()
        ]
        for container_id, (container, uid) in self.containers.items():
            readings += [
                HighWaterReading("dmem.peak", device, uid, container_id, peak_bytes)
                for (device, of), peak_bytes in self.marks.items()
                if of == container_id
            ]
            if self.sees_processes:
                readings.append(
                    ProcessReading("proc", pids[container_id], "python", uid, container=container)
                )
        state = SourceReading("proc") if self.sees_processes else SourceReading("proc", "degraded")
        return [*readings, state]


def seconds_of(moment: str) -> float:
    """Convert a time in the report to seconds since boot."""
    return (datetime.fromisoformat(moment) - BOOTED).total_seconds()


A = "GPU-a", "c1"


@pytest.fixture
def node() -> Node:
    """Return a node with container c1 of pod u. The agent took a sample before the container
    started.
    """
    node = Node()
    node.hold("u")
    node.sample()
    node.run("c1", "u")
    return node


def peaks(row: PodUse) -> dict[str, Any]:
    """Return the peak fields of the row that have a value."""
    names = [
        "peak_bytes",
        "startup_peak_bytes",
        "peak_source",
        "peak_partial",
        "started_at",
        "settled_at",
    ]
    return {name: found for name in names if (found := getattr(row, name))}
