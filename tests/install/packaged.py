"""Installs the packaged chart with Helm on a node with real containers, and inspects the
containers.

    python -m tests.install.packaged

``make images`` builds the images. The API server, etcd, the controllers, the kubelet, containerd,
runc and NVIDIA's device plugin are real. The GPUs, NVIDIA's container runtime and DNS are
simulated. The program prints the result as a line of JSON, which check_packaged.py checks.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer

from release.source import version_of
from tests.controlplane import ROOT, built
from tests.driver import GIB, Gpu
from tests.images.building import Builder
from tests.install import network
from tests.install.cgroups import CGROUPS
from tests.install.cluster import GPU_BYTES, Plane, bring_up, until
from tests.install.containerd import ContainerdNode
from tests.install.load import GPUNODES
from tests.install.play import NAMESPACE, Play
from tests.install.versions import REGISTRY, working_tree
from tests.install.workloads import WORKLOADS
from tests.processes import DIE_WITH_PARENT

VERSION = version_of(ROOT)
EXTENDER = f"{REGISTRY}/headroom-extender:{VERSION}"
AGENT = f"{REGISTRY}/headroom-agent:{VERSION}"
PAUSE = f"{REGISTRY}/pause:{VERSION}"
#: Environment variable that passes the folder of the image archives to the command in the
#: namespaces.
_ARCHIVES = "TEST_INSTALL_ARCHIVES"
#: A larger limit means no limit, because cgroup v1 shows the largest multiple of a page for an
#: unlimited cgroup.
_NO_LIMIT = 1 << 62
FINALIZER = "tests.headroom.gpu/kept"
#: Command of a process that waits for SIGTERM. The driver's table gives it GPU memory.
WORKLOAD = ["python3", "-c", "import signal; signal.sigwait([signal.SIGTERM])"]


def scheduler() -> str:
    """Return the name of the kube-scheduler image that the chart uses with this version of the API
    server.
    """
    command = [built("kube-apiserver")["kube-apiserver"], "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return f"{REGISTRY}/kube-scheduler:{done.stdout.split()[-1]}"


def archives(folder: Path) -> Mapping[str, Path]:
    """Return the path of each image's archive in the folder, by image name."""
    images = EXTENDER, AGENT, scheduler(), PAUSE
    return {each: folder / f"{each.rpartition('/')[2].partition(':')[0]}.tar" for each in images}


def build(folder: Path) -> None:
    """Build all images and save them in the folder. This needs the machine's network."""
    builder = Builder()
    builder.build(VERSION, REGISTRY)
    binary = built("kube-scheduler")["kube-scheduler"]
    text = f"FROM scratch\nCOPY {binary.name} /usr/local/bin/kube-scheduler\n"
    builder.build_from(text, binary.parent, scheduler())
    builder.build_from(f'FROM {builder.base()}\nCMD ["sleep", "infinity"]\n', folder, PAUSE)
    for image, archive in archives(folder).items():
        builder.save(image, archive)


class Packaged(Play):
    def __init__(self, plane: Plane, node: ContainerdNode) -> None:
        super().__init__(plane, [node], {"image": AGENT, "command": WORKLOAD})
        self.node = node
        #: IDs of the processes that hold GPU memory.
        self.holders: list[int] = []

    def run(self) -> None:
        self.act(self.install, self.place, self.look, self.end_pods, self.uninstall)

    def install(self) -> None:
        self.install_package(working_tree(self.plane.folder))

    def look(self) -> None:
        """Inspect each container of Headroom from outside, in /proc."""
        self.found["containers"] = {
            f"{component}/{status['name']}": self.seen(status)
            for component in ("extender", "webhook", "console", "agent")
            for pod in self.ours(component)[:1]
            for status in pod["status"]["containerStatuses"]
        }
        handlers = self.node.object()["status"].get("runtimeHandlers", [])
        self.found["recursive read-only mounts"] = any(
            each.get("features", {}).get("recursiveReadOnlyMounts") for each in handlers
        )
        self.found["files of the agent"] = sorted(os.listdir("/run/headroom"))

    def seen(self, status: Mapping[str, Any]) -> dict[str, Any]:
        pids = self.node.pids(status["containerID"].removeprefix("containerd://"))
        proc = Path(f"/proc/{pids[0]}")
        lines = (proc / "status").read_text().splitlines()
        fields = {name: text.strip() for name, _, text in (line.partition(":") for line in lines)}
        mounts = [line.split() for line in (proc / "mountinfo").read_text().splitlines()]
        limit_bytes, most_bytes = _memory(proc)
        return {
            "processes": [
                Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip() for pid in pids
            ],
            "user": fields["Uid"].split()[0],
            "group": fields["Gid"].split()[0],
            "groups": fields["Groups"].split(),
            "capabilities": {each: fields[each] for each in ("CapEff", "CapPrm", "CapBnd")},
            "no_new_privs": fields["NoNewPrivs"],
            "seccomp": fields["Seccomp"],
            "writable": sorted(
                mount[4]
                for mount in mounts
                # A mount is writable if both its own options and the options of its file system are
                # "rw".
                if "rw" in mount[5].split(",") and "rw" in mount[-1].split(",")
                if not mount[4].startswith("/proc")
            ),
            "limit_bytes": limit_bytes,
            "most_bytes": most_bytes,
            "restarts": status["restartCount"],
        }

    def place(self) -> None:
        """Create more pods than fit, and wait until the agent attributes the memory of their
        processes to them.
        """
        self.workloads.start()
        for number in range(7):
            self.workloads.create(f"pod-{number}", 7)
        until(lambda: len(self.workloads.running()) == 6, "6 pods that run")
        until(lambda: len(self.workloads.rejections()) == 1, "a pod that does not fit")
        self.found["messages"] = self.workloads.rejections()
        self.found["schedulers"] = sorted(
            {pod["spec"]["schedulerName"] for pod in self.workloads.all()}
        )
        by_device: Counter[str] = Counter()
        with self.node.driver.batch():
            for pod in self.workloads.bound():
                (status,) = pod["status"]["containerStatuses"]
                (pid,) = self.node.pids(status["containerID"].removeprefix("containerd://"))
                device = _environment(pid)["NVIDIA_VISIBLE_DEVICES"]
                by_device[device] += 1
                self.holders.append(pid)
                self.node.driver.use(pid, {device: 7 * GIB})
        self.found["pods_by_device"] = sorted(by_device.values())
        names = {f"{WORKLOADS}/{pod['metadata']['name']}" for pod in self.workloads.running()}
        wanted = dict.fromkeys(names, 7 * GIB)
        until(lambda: self.attributed() == wanted, "a report that attributes all memory", 60.0)
        self.found["attributed"] = sorted(self.attributed().values())

    def attributed(self) -> dict[str, int]:
        """Return the bytes that the agent's report shows for each pod."""
        observed = self.plane.call("GET", f"{GPUNODES}/{self.node.name}")["status"].get("pods", [])
        return {f"{each['namespace']}/{each['name']}": each.get("used", 0) for each in observed}

    def end_pods(self) -> None:
        """Delete a pod of each component. A finalizer keeps the pod, so that its exit codes can be
        read.
        """
        self.found["ends"] = {}
        for component in ("extender", "webhook", "console", "agent"):
            name = self.ours(component)[0]["metadata"]["name"]
            path = f"/api/v1/namespaces/{NAMESPACE}/pods/{name}"
            self.plane.call("PATCH", path, {"metadata": {"finalizers": [FINALIZER]}})
            began_s = time.monotonic()
            self.plane.call("DELETE", path)

            def ended(path: str = path) -> list[Any]:
                statuses = self.plane.call("GET", path)["status"]["containerStatuses"]
                states = [each["state"].get("terminated") for each in statuses]
                return states if all(states) else []

            until(ended, f"{name} has ended")
            self.found["ends"][component] = {
                "took_s": round(time.monotonic() - began_s, 1),
                "codes": [each["exitCode"] for each in ended()],
            }
            self.plane.call("PATCH", path, {"metadata": {"finalizers": None}})
        until(self.ready, "the Deployments and the agents again")

    def uninstall(self) -> None:
        self.workloads.delete_all()
        for pid in self.holders:  # the driver forgets processes that have ended
            self.node.driver.use(pid, {})
        super().uninstall()

    def processes(self) -> list[str]:
        """Return the containers of Headroom that have running processes."""
        ours = f'labels."io.kubernetes.pod.namespace"=={NAMESPACE}'
        ids = self.node.ctr("containers", "list", "--quiet", ours).split()
        return [each for each in ids if self.node.pids(each)]

    def trouble(self) -> str:
        out = [self.plane.kubectl("get", "pods,jobs,events", "-A", "-o", "wide")]
        logs = self.node.root / "pod-logs"
        out += [
            f"--- {each.relative_to(logs)}\n{each.read_text()[-3000:]}"
            for each in sorted(logs.rglob("*.log"))
        ]
        out.append(self.node.logs())
        return "\n".join(out)


def _memory(proc: Path) -> tuple[int | None, int]:
    """Return the memory limit and the peak memory use of a process's cgroup in bytes. Supports
    cgroup v1 and v2.
    """
    for line in (proc / "cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        folder = CGROUPS / controllers / path[1:]
        if controllers == "memory":
            limit = int((folder / "memory.limit_in_bytes").read_text())
            most_bytes = int((folder / "memory.max_usage_in_bytes").read_text())
            return (limit if limit < _NO_LIMIT else None), most_bytes
        if number == "0" and (folder / "memory.max").exists():
            text = (folder / "memory.max").read_text().strip()
            most_bytes = int((folder / "memory.peak").read_text())
            return (None if text == "max" else int(text)), most_bytes
    raise LookupError(f"{proc} has no cgroup that limits memory")


def _environment(pid: int) -> dict[str, str]:
    pairs = Path(f"/proc/{pid}/environ").read_text().rstrip("\0").split("\0")
    return dict(pair.split("=", 1) for pair in pairs)


def main() -> None:
    if _ARCHIVES not in os.environ:
        with tempfile.TemporaryDirectory(prefix="headroom-images-") as folder:
            build(Path(folder))
            environment = os.environ | {_ARCHIVES: folder}
            command = [sys.executable, "-m", "tests.install.packaged"]
            done = subprocess.run(
                [*DIE_WITH_PARENT, str(os.getpid()), *command], env=environment, check=False
            )
        raise typer.Exit(done.returncode)
    network.alone()
    network.build()
    with contextlib.ExitStack() as stack:
        plane = Plane()
        stack.callback(plane.stop)
        plane.start()
        plane.start_controller_manager()
        gpus = [Gpu(f"GPU-{i}", GPU_BYTES, reserved_bytes=0) for i in range(2)]
        images = archives(Path(os.environ[_ARCHIVES]))
        node = ContainerdNode(plane, "gpu-0", gpus, 4, images, PAUSE)
        stack.callback(node.stop)
        play = Packaged(plane, node)
        try:
            bring_up(plane, [node])
            play.run()
        except BaseException:
            typer.echo(play.trouble(), err=True)
            raise
        typer.echo(json.dumps(play.found))


if __name__ == "__main__":
    typer.run(main)
