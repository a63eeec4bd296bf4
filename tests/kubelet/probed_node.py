"""Runs the agent's probes of pods and devices on a real node, and returns the status."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from agent.peak_recorder import PeakRecorder
from agent.probes.kubelet import SETTLED_AFTER_S, KubeletProbe
from agent.probes.node_probe import NodeApi
from agent.probes.nvml import Memory
from agent.probes.plugin_config import ConfigurationProbe
from agent.probes.processes import ProcessProbe
from agent.probes.readings import (
    DeviceReading,
    DriverReading,
    Reading,
)
from agent.status_builder import summarise
from headroom.contract.gpunode import Device, GPUNodeStatus
from tests.kubelet.node import Node

GIB = 1 << 30


@dataclass
class Agent:
    """The agent's probes of pods and devices on one node. The driver's table replaces the driver
    library.
    """

    node: Node
    proc: Path
    #: Seconds after which a holding counts as settled. Tests that wait for it and do not restart
    #: the kubelet use a shorter time.
    settled_after_s: float = SETTLED_AFTER_S
    before: GPUNodeStatus | None = None
    api: NodeApi | None = None
    kubelet: KubeletProbe = field(init=False)
    configuration: ConfigurationProbe = field(init=False)
    processes: ProcessProbe = field(init=False)

    def __post_init__(self) -> None:
        root = self.node.root
        self.kubelet = KubeletProbe(
            root / "device-plugins/kubelet_internal_checkpoint",
            root / "pod-resources/kubelet.sock",
            settled_after_s=self.settled_after_s,
            cgroups=self.node.runtime.cgroups,
        )
        self.configuration = ConfigurationProbe(self.proc, root / "device-plugins")
        self.processes = ProcessProbe(self.proc)
        self.peaks = PeakRecorder(None)

    def sample(self) -> GPUNodeStatus:
        self._show_processes()
        readings: list[Reading] = [DriverReading("nvml"), *self._devices()]
        readings += self.kubelet.read()
        readings += self.configuration.read()
        if self.api is not None:
            readings += self.api.read()
            readings += self.api.follow(readings)
        readings += self.processes.follow(readings)
        self.before = summarise(
            readings, datetime.now(UTC), before=self.before, measure=self.peaks.measure
        )
        return self.before

    def _devices(self) -> Iterator[DeviceReading]:
        """Yield the devices as the agent's own probe would read them from the driver library."""
        index = -1
        found: dict[str, Any] = {}
        for line in [*self.node.driver.table.read_text().splitlines(), "device"]:
            match line.split(maxsplit=5):
                case ["device", *rest]:
                    if found:
                        yield DeviceReading("nvml", **found)
                    if rest:
                        index += 1
                        total, reserved, free = map(int, rest[1:4])
                        memory = Memory(total, free, reserved)
                        found = {"uuid": rest[0], "index": index, "memory": memory, "processes": {}}
                case ["process", _, pid, used]:
                    found["processes"][int(pid)] = int(used)

    def _show_processes(self) -> None:
        """Create a /proc that contains only this node's processes: the simulated processes and the
        real ones.
        """
        self.proc.mkdir(exist_ok=True)
        for old in self.proc.iterdir():
            if old.is_symlink():
                old.unlink()
        for pid, cgroup in ((1, "0::/init.scope"), (2, "0::/")):
            (self.proc / str(pid)).mkdir(exist_ok=True)
            (self.proc / str(pid) / "cgroup").write_text(f"{cgroup}\n")
        (self.proc / "2/comm").write_text("kthreadd\n")
        for process in self.node._processes.values():
            (self.proc / str(process.pid)).symlink_to(f"/proc/{process.pid}")
        for folder in self.node.runtime.proc.glob("*"):
            if not folder.is_symlink():  # It is a simulated process.
                (self.proc / folder.name).symlink_to(folder)


@pytest.fixture
def start_agent(tmp_path: Path) -> Callable[..., Agent]:
    return lambda node, **settings: Agent(node, tmp_path / "proc", **settings)


StartAgent = Callable[..., Agent]


def rows(status: GPUNodeStatus) -> list[tuple[str, str, str, str, str]]:
    return sorted((p.name, p.uid, p.container, p.replica, p.device) for p in status.pods)


def given(node: Node, *pods: str) -> list[tuple[str, str, str, str, str]]:
    """Return the devices that the runtime gave to containers, and the replicas in the kubelet's
    record.
    """
    found = []
    for pod in pods:
        replicas = {held.container: held.replica for held in node.held(pod)}
        for name, container in node.runtime.running(pod).items():
            (device,) = container.devices
            uid = container.sandbox.config.metadata.uid
            found.append((pod, uid, name, replicas[name], device))
    return sorted(found)


def by_uuid(status: GPUNodeStatus) -> dict[str, Device]:
    assert len({device.uuid for device in status.devices}) == len(status.devices)
    return {device.uuid: device for device in status.devices}


def states(status: GPUNodeStatus) -> dict[str, str]:
    return {source.name: source.state for source in status.sources}


def used(status: GPUNodeStatus) -> dict[str, int | None]:
    return {pod.name: pod.used_bytes for pod in status.pods}
