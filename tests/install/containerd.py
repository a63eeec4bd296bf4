"""A node with real containers. The kubelet uses containerd, runc and the CNI bridge plugin.

The node runs in the namespaces of ``tests.install.network``. Its GPUs are simulated. A stand-in for
NVIDIA's container runtime mounts the fake driver library into containers that name visible devices.
"""

import contextlib
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.controlplane import ControlPlane
from tests.debian import containers
from tests.driver import Gpu, library_folder
from tests.install import cgroups, network, runtime_files
from tests.kubelet.node import Node
from tests.kubelet.node_objects import INSIDE

#: Path at which NVIDIA's container runtime mounts the driver library into containers.
LIBRARY = "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1"
TABLE = "/run/fake-nvml"

#: Code that mounts the fake driver library into a container.
_EDIT = """
if sees_devices:
    for source, target in {mounts}.items():
        options = ["rbind", "ro", "nosuid", "nodev"]
        mount = dict(type="bind", source=source, destination=target, options=options)
        config["mounts"].append(mount)
    environment.append("FAKE_NVML_TABLE={table}")
"""


class Containerd:
    """The container runtime of a node, with the interface that ``Node`` expects."""

    def __init__(self, node: "ContainerdNode") -> None:
        self._node = node

    def start(self) -> None:
        self._node.start_containerd()

    def end_commands(self) -> None:
        self._node.end_containers()

    def stop(self) -> None:
        pass


class ContainerdNode(Node):
    """A node with real containers.

    ``archives`` maps image names to archives. ``pause`` is the image of pod sandboxes.
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        gpus: list[Gpu],
        replicas: int,
        archives: Mapping[str, Path],
        pause: str,
    ) -> None:
        super().__init__(plane, name, gpus, replicas)
        self._archives = archives
        self.cgroup = self.folder.name
        settings = self.folder / "kubelet.yaml"
        configuration = yaml.safe_load(settings.read_text())
        configuration |= runtime_files.kubelet_settings(self.folder)
        settings.write_text(yaml.safe_dump(configuration))
        mounts = {
            str(library_folder() / "libnvidia-ml.so.1"): LIBRARY,
            str(self.driver.table.parent): TABLE,
        }
        edit = _EDIT.format(mounts=mounts, table=f"{TABLE}/{self.driver.table.name}")
        self._command = runtime_files.write(self.folder, pause, edit, _network(self.folder))
        network.run("sh", "-c", containers())
        network.run("sh", "-c", INSIDE, "sh", str(self.folder), "true")
        cgroups.create(self.cgroup)

    def _new_runtime(self, cdi: Path) -> Any:
        return Containerd(self)

    def _kubelet_user(self) -> Sequence[str]:
        return ()  # The node needs root, because it mounts volumes and creates cgroups.

    def _spawn_inside(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        """Start the process without a separate mount namespace, because kubelet and containerd
        share mounts.
        """
        driver = {"FAKE_NVML_TABLE": str(self.driver.table)}
        if name == "nvidia-device-plugin":
            driver["LD_LIBRARY_PATH"] = str(library_folder())
        self.spawn(name, *command, env={**driver, **(env or {})})

    def show_processes(self) -> None:
        """Do nothing, because the agent sees all processes of the node."""

    def start_containerd(self) -> None:
        self.spawn("containerd", *self._command)
        self.wait(lambda: (self.folder / "containerd.sock").exists(), "containerd listens")
        for archive in self._archives.values():
            self.ctr("images", "import", str(archive))

    def ctr(self, *arguments: str) -> str:
        command = ["ctr", f"--address={self.folder}/containerd.sock", "--namespace=k8s.io"]
        done = subprocess.run([*command, *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"ctr {' '.join(arguments)}: {done.stdout}{done.stderr}")
        return done.stdout

    def pids(self, container_id: str) -> list[int]:
        """Return the sorted process IDs of a container. They are read from its cgroup."""
        found = []
        for each in Path("/proc").glob("[0-9]*/cgroup"):
            with contextlib.suppress(OSError):
                if f"/{container_id}" in each.read_text():
                    found.append(int(each.parent.name))
        return sorted(found)

    def end_containers(self) -> None:
        """Kill all processes of pods and remove their cgroups."""
        for name in ("kubelet", "containerd"):
            if self.runs(name):
                self.kill(name)
        cgroups.remove(self.cgroup)


def _network(folder: Path) -> Mapping[str, Any]:
    """Return the CNI configuration that connects pods to the bridge of
    ``tests.install.network``.
    """
    return {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": network.BRIDGE,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": "10.77.0.0/16", "rangeStart": "10.77.1.1"}]],
                    "routes": [{"dst": "0.0.0.0/0", "gw": network.HOST}],
                    "dataDir": str(folder / "addresses"),
                },
            }
        ],
    }
