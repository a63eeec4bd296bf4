"""A node with a real GPU of this machine and a real kubelet, containerd, runc and NVIDIA device
plugin.

Pods use the network of the machine. A container sees the programs and libraries of the machine, and
gets the driver's device files if it names visible devices. On usual nodes, NVIDIA's container
runtime mounts the libraries and device files.
"""

import contextlib
import hashlib
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.controlplane import ROOT, ApiRefused, ControlPlane, built
from tests.install import cgroups, runtime_files
from tests.kubelet.node_objects import (
    INSIDE,
    KERNEL,
    RESOURCE,
    is_ready,
    kubelet_configuration,
    write_mounts,
)
from tests.processes import Processes, free_ports
from tests.waiting import until

IMAGE = "headroom.test/machine:1"
#: Code that mounts folders of the machine into a container and allows the driver's device files.
_EDIT = """
for source, how in {folders}:
    options = ["rbind", how, "nosuid"]
    mount = dict(type="bind", source=source, destination=source, options=options)
    config["mounts"].append(mount)
for name in glob.glob("/dev/nvidia*") if sees_devices else ():
    found = os.stat(name)
    if stat.S_ISCHR(found.st_mode):
        major, minor = os.major(found.st_rdev), os.minor(found.st_rdev)
        device, linux = dict(type="c", major=major, minor=minor), config["linux"]
        linux.setdefault("devices", []).append(dict(device, path=name, fileMode=0o666))
        allowed = dict(device, allow=True, access="rwm")
        linux.setdefault("resources", {{}}).setdefault("devices", []).append(allowed)
"""
#: A CNI configuration that pods do not use. Without a CNI configuration, a kubelet never becomes
#: ready.
_NETWORK = {"cniVersion": "0.4.0", "name": "none", "plugins": [{"type": "loopback"}]}
#: The root folder and the program name of the MPS daemon that the device plugin expects.
MPS_ROOT, MPS_CONTROL = Path("/mps"), "nvidia-cuda-mps-control"
_PATIENCE_S = 60.0
#: PYTHONPATH of the agent. It contains the repository and the PYTHONPATH of this process.
_PATH = os.pathsep.join((str(ROOT), os.environ.get("PYTHONPATH", "")))


class GpuNode(Processes):
    """A node with a GPU. Start the node as root in its own mount namespace, because it hides /run,
    /var/lib and /var/log.

    ``driver`` are the environment variables with which the plugin and the agent find the driver
    library. Containers can write to the folders in ``writable``. If ``mps_limit_mib`` is given, MPS
    shares the GPU instead of time-slicing, and limits the memory of each process.
    """

    def __init__(
        self,
        plane: ControlPlane,
        name: str,
        replicas: int,
        driver: Mapping[str, str],
        writable: Sequence[str] = (),
        mps_limit_mib: int | None = None,
    ) -> None:
        super().__init__(cgroups.KIND)
        self.plane, self.name, self.replicas, self._driver = plane, name, replicas, driver
        self._mps_limit_mib = mps_limit_mib
        self._binaries = built("kubelet", "nvidia-device-plugin")
        for each in ("kubelet", "cdi"):
            (self.folder / each).mkdir()
        kernel = {f"/proc/sys/{setting}": f"{value}\n" for setting, value in KERNEL.items()}
        for path, text in kernel.items():
            file = self.folder / f"over{path}"
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
        write_mounts(self.folder, kernel)
        settings = kubelet_configuration(self.folder, plane.certificate)
        settings |= runtime_files.kubelet_settings(self.folder)
        self._write("kubelet.yaml", settings)
        self._write("plugin.yaml", {"version": "v1", "sharing": self._sharing()})
        folders = [(str(each), "ro") for each in _folders()] + [(each, "rw") for each in writable]
        edit = _EDIT.format(folders=folders)
        self._containerd = runtime_files.write(self.folder, IMAGE, edit, _NETWORK)

    def _write(self, name: str, content: Mapping[str, Any]) -> None:
        (self.folder / name).write_text(json.dumps(content))

    def _sharing(self) -> dict[str, Any]:
        shared = {"resources": [{"name": RESOURCE, "replicas": self.replicas}]}
        return {"timeSlicing" if self._mps_limit_mib is None else "mps": shared}

    def start(self) -> None:
        """Start the node and wait until its status shows all replicas of the device plugin."""
        subprocess.run(["sh", "-c", INSIDE, "sh", str(self.folder), "true"], check=True)
        cgroups.create(self.folder.name)
        self.spawn("containerd", *self._containerd)
        self.wait((self.folder / "containerd.sock").exists, "containerd listens")
        self._import_image()
        self.spawn(
            "kubelet",
            str(self._binaries["kubelet"]),
            f"--config={self.folder}/kubelet.yaml",
            f"--kubeconfig={self.plane.kubeconfig()}",
            f"--hostname-override={self.name}",
            "--v=2",
        )
        self.wait(self._is_ready, "a node that is ready")
        if self._mps_limit_mib is not None:
            self._start_mps(self._mps_limit_mib)
        self.spawn(
            "nvidia-device-plugin",
            str(self._binaries["nvidia-device-plugin"]),
            f"--config-file={self.folder}/plugin.yaml",
            "--device-discovery-strategy=nvml",
            f"--mps-root={MPS_ROOT}",
            env=self._driver,
        )
        self.wait(lambda: self.allocatable() == self.replicas, "every replica in the node's status")
        # Remove the taint that admission adds to every new node, because the controller that
        # usually removes it does not run.
        path, body = f"/api/v1/nodes/{self.name}", {"spec": {"taints": None}}
        self.plane.call("PATCH", path, body)

    def _start_mps(self, limit_mib: int) -> None:
        """Start MPS as NVIDIA's DaemonSet does, but leave the compute mode unchanged."""
        pipe, shared = MPS_ROOT / RESOURCE / "pipe", MPS_ROOT / "shm"
        for folder in (pipe, shared):
            folder.mkdir(parents=True)
        subprocess.run(["mount", "--bind", "/dev/shm", str(shared)], check=True)
        places = {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(self.folder)}
        self._mps = {**self._driver, **places}
        self.spawn(MPS_CONTROL, MPS_CONTROL, "-f", env=self._mps)
        self.wait((pipe / "control").exists, "the MPS daemon listens")
        self._tell_mps(f"set_default_device_pinned_mem_limit 0 {limit_mib}M")

    def _tell_mps(self, command: str) -> None:
        environment = {**os.environ, **self._mps}
        subprocess.run([MPS_CONTROL], input=command, env=environment, text=True, check=True)

    def _end_mps(self) -> None:
        if self.runs(MPS_CONTROL):
            self._tell_mps("quit")
            self._processes[MPS_CONTROL].wait(_PATIENCE_S)
            subprocess.run(["umount", str(MPS_ROOT / "shm")], check=True)
            shutil.rmtree(MPS_ROOT)

    def start_agent(self) -> None:
        """Start the agent with the arguments of the DaemonSet, as a process of the machine."""
        (port,) = free_ports(1)
        kubeconfig = self.plane.kubeconfig("agent-of-the-tests")
        self.spawn(
            *("agent", sys.executable, "-m", "agent", f"--node={self.name}"),
            *("--interval=1", "--heartbeat=10", f"--listen=127.0.0.1:{port}", "--local-port=0"),
            env={"PYTHONPATH": _PATH, **self._driver, "KUBECONFIG": str(kubeconfig)},
        )

    def stop(self) -> None:
        for name in ("kubelet", "containerd"):
            if self.runs(name):
                self.kill(name)
        self._end_shims()
        cgroups.remove(self.folder.name)
        self._end_mps()
        super().stop()

    def _end_shims(self) -> None:
        """Kill the container shims, which keep running after containerd has ended."""
        socket = f"{self.folder}/containerd.sock".encode()
        for each in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if socket in each.read_bytes():
                    os.kill(int(each.parent.name), signal.SIGKILL)

    def allocatable(self) -> int:
        return int(self._object()["status"]["allocatable"].get(RESOURCE, "0"))

    def output(self, pod: str) -> list[str]:
        """Return the lines that the containers of a pod wrote to stdout."""
        files = (self.folder / "kubelet/pod-logs").glob(f"*_{pod}_*/*/*.log")
        lines = [line for file in files for line in file.read_text().splitlines()]
        # A log line has a time, a stream, a flag for complete lines, and the text.
        return [line.split(" ", 3)[3] for line in lines if " stdout " in line]

    def pod_logs(self) -> str:
        """Return the last 2,000 characters of each container's output."""
        folder = self.folder / "kubelet/pod-logs"
        return "\n".join(each.read_text()[-2000:] for each in sorted(folder.rglob("*.log")))

    def wait(self, done: Callable[[], object], what: str) -> None:
        def runs() -> object:
            self.raise_if_ended()
            return done()

        until(runs, what, _PATIENCE_S, 0.1, self.logs)

    def _object(self) -> dict[str, Any]:
        return self.plane.call("GET", f"/api/v1/nodes/{self.name}")

    def _is_ready(self) -> bool:
        try:
            return is_ready(self._object())
        except ApiRefused:
            return False

    def _import_image(self) -> None:
        archive = self.folder / "machine.tar"
        archive.write_bytes(_archive())
        command = ["ctr", f"--address={self.folder}/containerd.sock", "--namespace=k8s.io"]
        command += ["images", "import", str(archive)]
        subprocess.run(command, check=True, capture_output=True)


def _folders() -> list[Path]:
    """Return the folders of the machine that are mounted into containers."""
    python = {ROOT, *map(Path, (sys.prefix, sys.base_prefix))} - {Path("/usr")}
    python |= {each.resolve() for each in python}
    libraries = map(Path, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep))
    folders = {Path("/usr"), *python, *(each for each in libraries if each.is_absolute())}
    return sorted(each for each in folders if not folders & set(each.parents))


def _archive() -> bytes:
    """Return an image in the format of ``docker save``. It contains empty folders and the symbolic
    links of the machine's root folder.
    """
    layer = io.BytesIO()
    with tarfile.open(fileobj=layer, mode="w") as files:
        for name in ("usr", "etc", "tmp", "proc", "sys", "dev", "run"):
            entry = tarfile.TarInfo(name)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o755
            files.addfile(entry)
        for link in (each for each in Path("/").iterdir() if each.is_symlink()):
            entry = tarfile.TarInfo(link.name)
            entry.type, entry.linkname = tarfile.SYMTYPE, str(link.readlink())
            files.addfile(entry)
        files.add("/etc/ld.so.cache", "etc/ld.so.cache")
    content = layer.getvalue()
    digest = hashlib.sha256(content).hexdigest()
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Env": ["PATH=/usr/bin:/usr/sbin"], "Cmd": ["sleep", "infinity"]},
        "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
    }
    manifest = [{"Config": "config.json", "RepoTags": [IMAGE], "Layers": ["layer.tar"]}]
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w") as files:
        for name, data in (
            ("layer.tar", content),
            ("config.json", json.dumps(config).encode()),
            ("manifest.json", json.dumps(manifest).encode()),
        ):
            entry = tarfile.TarInfo(name)
            entry.size = len(data)
            files.addfile(entry, io.BytesIO(data))
    return archive.getvalue()
