"""Simulates everything that an agent sees of a node, in one folder.

The driver is the fake library with its table. The stand-in simulates the kubelet and the device
plugin. The checkpoint and the PodResources socket are at the paths in the agent's flags. /proc and
the cgroups are folders with files.
"""

import os
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

import yaml

from tests import forks
from tests.driver import Driver, Gpu, library_folder
from tests.standin.allocations import RESOURCE, Container, Pod
from tests.standin.node import StandIn
from tests.standin.plugin import Settings
from tests.standin.served import Served, write_checkpoint


class Whole:
    """A node in which each GPU has ``replicas`` replicas. ``stop`` ends the node's server."""

    def __init__(self, folder: Path, gpus: Sequence[Gpu], replicas: int) -> None:
        self.folder = folder
        #: Functions that the driver library does not export.
        self.missing: tuple[str, ...] = ()
        # Use a short folder, because the path of a socket can have at most 107 characters.
        self._short = tempfile.TemporaryDirectory()
        self.kubelet = Path(self._short.name)
        self.proc = folder / "proc"
        self.cgroups = folder / "cgroup"
        self.cgroups.mkdir(parents=True)
        (self.cgroups / "cgroup.controllers").touch()
        self.driver = Driver(folder / "table", list(gpus))
        self.node = StandIn(
            gpus,
            Settings(replicas=replicas),
            driver=self.driver,
            save=lambda content: write_checkpoint(self.kubelet, content),
        )
        self.process(2, "kthreadd", "/")
        sharing = {"timeSlicing": {"resources": [{"name": RESOURCE, "replicas": replicas}]}}
        # Use this process's ID, because the test process is the one that listens on the sockets of
        # the plugin and the kubelet.
        self.plugin = plugin = self.process(
            os.getpid(), "nvidia-device-p", "/system.slice/plugin.service"
        )
        (plugin / "cmdline").write_text("nvidia-device-plugin\0--config-file=/config.yaml\0")
        (plugin / "environ").write_text("")
        (plugin / "root").mkdir()
        (plugin / "root/config.yaml").write_text(
            yaml.safe_dump({"version": "v1", "sharing": sharing if replicas > 1 else {}})
        )
        self.served = Served(self.node, self.kubelet)
        self.sockets = [
            listening(self.kubelet / "device-plugins" / name)
            for name in ("nvidia-gpu.sock", "kubelet.sock")
        ]

    @property
    def flags(self) -> list[str]:
        return [
            *("--local-port", "0"),
            *("--proc", str(self.proc)),
            *("--cgroups", str(self.cgroups)),
            *("--checkpoint", f"{self.kubelet}/device-plugins/kubelet_internal_checkpoint"),
            *("--pod-resources", str(self.served.socket)),
        ]

    @property
    def environment(self) -> dict[str, str]:
        return {
            "LD_LIBRARY_PATH": str(library_folder(self.missing)),
            "FAKE_NVML_TABLE": str(self.driver.table),
        }

    def run(self, uid: str, name: str, takes_bytes: int, namespace: str = "default") -> str:
        """Start a pod with one container. Return the device that the pod got."""
        pod = Pod(uid, (Container("main", 1, takes_bytes=takes_bytes),), name, namespace)
        verdict = self.node.admit(pod)
        assert verdict.admitted, verdict
        process = self.node.processes[uid, "main"]
        (device,) = process.used_bytes
        cgroup = self.cgroup(uid)
        cgroup.mkdir(parents=True)
        self.process(process.pid, "python", f"/{cgroup.relative_to(self.cgroups)}")
        return device

    def cgroup(self, uid: str) -> Path:
        """Return the cgroup directory of a pod's only container."""
        pod = self.cgroups / f"kubepods.slice/kubepods-pod{uid.replace('-', '_')}.slice"
        return pod / f"cri-containerd-{self.container_id(uid)}.scope"

    def container_id(self, uid: str) -> str:
        return f"{self.node.processes[uid, 'main'].pid:064x}"

    def once(self, *flags: str) -> subprocess.CompletedProcess[str]:
        """Return the output of `headroom agent --once`."""
        kept = {key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ}
        env = kept | self.environment | {"NODE_NAME": "gpu-node-7"}
        return forks.run("headroom", "agent", "--once", *self.flags, *flags, env=env)

    def process(self, pid: int, command: str, cgroup: str) -> Path:
        folder = self.proc / str(pid)
        folder.mkdir(parents=True)
        (folder / "comm").write_text(f"{command}\n")
        (folder / "cgroup").write_text(f"0::{cgroup}\n")
        (folder / "stat").write_text(f"{pid} ({command}) S " + "1 " * 50)
        return folder

    def end_process(self, pid: int) -> None:
        shutil.rmtree(self.proc / str(pid))

    def stop(self) -> None:
        self.served.stop()
        for each in self.sockets:
            each.close()
        self._short.cleanup()


def listening(path: Path) -> socket.socket:
    """Listen on a Unix socket without answering connections."""
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(path))
    server.listen()
    return server
