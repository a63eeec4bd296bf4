"""Simulates every fault of the kubelet, the plugin and the machine, and checks the effect of each
fault on the report.

docs/design/agent.md contains the same table, and the test checks it.
"""

import re
import tempfile
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pytest

from agent.probes.host_processes import listener
from agent.probes.kubelet import KubeletProbe
from agent.probes.nvml import Memory
from agent.probes.plugin_config import ConfigurationProbe
from agent.probes.podresources import PodResources
from agent.probes.processes import ProcessProbe
from agent.probes.readings import DeviceReading, DriverReading, Reading
from agent.status_builder import summarise
from headroom.contract.gpunode import GPUNodeStatus
from tests.agent.test_faults import DOCS, messages
from tests.agent.whole import Whole
from tests.driver import GIB, h100

pytestmark = pytest.mark.slow

UIDS = [f"{number:08x}-1111-4222-8333-{number:012x}" for number in (1, 2)]


class SampledNode:
    """A node with two pods, and the probes of an agent that has taken one sample."""

    def __init__(self, folder: Path) -> None:
        self.whole = Whole(folder, [h100("GPU-a")], 4)
        self.proc = self.whole.proc
        #: Maps sockets on which another process listens to the ID of this process.
        self.others: dict[str, int] = {}
        self.checkpoint = self.whole.kubelet / "device-plugins/kubelet_internal_checkpoint"
        for uid in UIDS:
            self.whole.run(uid, f"pod-{uid[7]}", GIB)
        socket = self.whole.served.socket
        self.probes = (
            KubeletProbe(self.checkpoint, socket, PodResources(str(socket), timeout_s=30.0)),
            ConfigurationProbe(self.proc, self.checkpoint.parent, self.listener),
        )
        self.processes = ProcessProbe(self.proc)
        self.last = None
        assert self.sample() == []

    def sample(self) -> list[str]:
        """Take a sample. Return the messages of its faults and the data that readers of the report
        lack.
        """
        pids = {self.whole.node.processes[uid, "main"].pid: GIB for uid in UIDS}
        memory = Memory(80 * GIB, 78 * GIB, 0)
        readings: list[Reading] = [DriverReading("nvml")]
        readings.append(DeviceReading("nvml", "GPU-a", 0, memory=memory, processes=dict(pids)))
        for probe in self.probes:
            readings += probe.read()
        readings += self.processes.follow(readings)
        self.last = status = summarise(readings, datetime.now(UTC), before=self.last)
        found = messages(msgspec.to_builtins(status))
        return found + lost(status)

    def listener(self, path: Path) -> int:
        return self.others.get(path.name) or listener(path)

    def kubelet_gone(self) -> None:
        self.whole.served.stop()

    def kubelet_silent(self) -> None:
        self.whole.served.stop()
        self.whole.served.socket.touch()

    def checkpoint_gone(self) -> None:
        self.checkpoint.unlink()

    def checkpoint_garbled(self) -> None:
        self.checkpoint.write_text("{")

    def both_gone(self) -> None:
        self.kubelet_gone()
        self.checkpoint_gone()

    def plugin_gone(self) -> None:
        self.whole.sockets[0].close()
        (self.checkpoint.parent / "nvidia-gpu.sock").unlink()

    def plugin_away(self) -> None:
        self.plugin_gone()
        self.whole.node.stop_plugin()

    def two_plugins(self) -> None:
        other = self.whole.process(51, "another", "/system.slice/another.service")
        (other / "cmdline").write_text("another\0")
        kubelet = self.checkpoint.parent / "kubelet.sock"
        kubelet.rename(kubelet.with_name("nvidia-mig.sock"))
        self.others["nvidia-mig.sock"] = 51

    def configuration_garbled(self) -> None:
        (self.whole.plugin / "root/config.yaml").write_text("sharing: {")

    def environment_hidden(self) -> None:
        (self.whole.plugin / "environ").unlink()

    def processes_hidden(self) -> None:
        (self.proc / "2/comm").write_text("pause\n")
        self.whole.process(1, "agent", "/kubepods.slice/own")
        (self.proc / "self").mkdir()
        (self.proc / "self/cgroup").write_text("0::/kubepods.slice/own\n")


def lost(status: GPUNodeStatus) -> list[str]:
    """Return descriptions of the data that readers of the report lack."""
    (device,), pods = status.devices, status.pods
    missing = {
        "which pod holds which replica": not any(pod.replica for pod in pods),
        "uids of pods that hold replicas": any(pod.replica and not pod.uid for pod in pods),
        "names of pods that use memory": any(pod.used_bytes and not pod.name for pod in pods),
        "the use of each pod": {pod.used_bytes for pod in pods} == {None},
        "unattributed use": device.unattributed_bytes is None,
    }
    shown = [what for what, absent in missing.items() if absent]
    found = [f"missing: {', '.join(shown)}"] if shown else []
    counts = msgspec.structs.asdict(device.replicas)
    if counts != {"free": 2, "allocated": 2, "unhealthy": 0}:
        found.append(f"replicas: {', '.join(f'{n} {state}' for state, n in counts.items())}")
    return found


FAULTS: list[tuple[str, Callable[[SampledNode], None]]] = [
    ("the kubelet's socket is gone", SampledNode.kubelet_gone),
    ("the kubelet's socket does not answer", SampledNode.kubelet_silent),
    ("the checkpoint is gone", SampledNode.checkpoint_gone),
    ("the checkpoint is corrupt", SampledNode.checkpoint_garbled),
    ("socket and checkpoint are gone", SampledNode.both_gone),
    ("the plugin's socket is gone", SampledNode.plugin_gone),
    ("the plugin is down", SampledNode.plugin_away),
    ("two plugins listen, and no kubelet", SampledNode.two_plugins),
    ("the plugin's configuration is corrupt", SampledNode.configuration_garbled),
    ("no permission to read the plugin's environment", SampledNode.environment_hidden),
    ("the agent does not see the host's processes", SampledNode.processes_hidden),
]


def test_every_fault_is_reported_as_the_table_in_the_docs_shows() -> None:
    rows = []
    for fault, inject in FAULTS:
        # Use a short folder, because the path of a socket can have at most 107 characters.
        with tempfile.TemporaryDirectory() as short:
            world = SampledNode(Path(short) / "node")
            try:
                inject(world)
                found = world.sample()
            finally:
                world.whole.stop()
        assert found, fault
        rows.append(f"| {fault} | {'<br>'.join(found)} |")
    table = "\n".join(["| fault | in the report |", "|---|---|", *rows])
    marks = r"<!-- faults of others -->\n(.*?)<!-- end of faults of others -->"
    there: Any = re.search(marks, DOCS.read_text(), re.S)
    assert there[1].strip() == table, f"the table in {DOCS.name} should be:\n{table}"
