"""A fake container runtime that serves CRI to the kubelet on a Unix socket, and keeps its state in
memory.

Sandboxes and containers pass through the states that the kubelet expects, and keep the
configuration that it sent. A container runs until the kubelet stops it or a test ends it with
``exit``. There are three exceptions: the command ``["exit", "3"]`` ends immediately with code 3,
``["stubborn"]`` uses its whole grace period to stop, and ``["hangs"]`` does not stop. A running
container holds GPU memory. The variable ``TAKES_VRAM`` has the bytes that it uses on each of its
devices, and ``use`` changes them later. The devices are in ``NVIDIA_VISIBLE_DEVICES`` or are CDI
devices, which are resolved with the specs in ``cdi``. The container's process is an ID in the
driver's table and a cgroup in a folder like ``/proc``. Each pod has a directory in ``cgroups`` from
the start of its sandbox to the stop. A kubelet that manages cgroups creates the directory slightly
earlier and removes it slightly later.

The runtime runs the commands of Headroom, which begin with ``headroom`` or ``python -I -m``, as
real processes. ``reach`` has the variables with which they find the node on loopback.
"""

import contextlib
import itertools
import os
import secrets
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any

import grpc
import yaml

from tests.controlplane import ROOT
from tests.driver import Driver
from tests.forks import Forked
from tests.kubelet.cri_objects import Container, Sandbox, cri, services
from tests.processes import DIE_WITH_PARENT
from tests.waiting import PATIENCE_S

FIRST_PID = 100_000


class Runtime(services.RuntimeServiceServicer, services.ImageServiceServicer):  # type: ignore[name-defined,misc]
    def __init__(self, socket: Path, proc: Path, driver: Driver, cdi: Path) -> None:
        self.proc = proc
        self.cgroups = proc.with_name("cgroup")
        self.driver = driver
        self.cdi = cdi
        #: Environment variables of the commands that run as real processes.
        self.reach: Mapping[str, str] = {}
        self.sandboxes: dict[str, Sandbox] = {}
        self.containers: dict[str, Container] = {}
        #: Pods in which a container other than Headroom's has run.
        self.ever_ran: set[str] = set()
        self._commands: list[tuple[subprocess.Popen[str] | Forked, threading.Thread]] = []
        self.lock = threading.RLock()
        self._pids = itertools.count(FIRST_PID)
        self._server = grpc.server(futures.ThreadPoolExecutor(16))
        services.add_RuntimeServiceServicer_to_server(self, self._server)
        services.add_ImageServiceServicer_to_server(self, self._server)
        self._server.add_insecure_port(f"unix:{socket}")

    def start(self) -> None:
        self._server.start()

    def stop(self) -> None:
        self._server.stop(grace=None).wait()

    def end_commands(self) -> None:
        """Kill the real processes of all containers."""
        for process, thread in self._commands:
            process.kill()
            thread.join()

    # The methods below are called by tests.

    def running(self, pod: str) -> dict[str, Container]:
        """Return the running containers of a pod by name."""
        with self.lock:
            return {
                each.name: each
                for each in self.containers.values()
                if each.pod == pod and each.state == cri.CONTAINER_RUNNING
            }

    def use(self, container: Container, used_bytes: int) -> None:
        """Change the memory that the container holds on each of its devices."""
        with self.lock:
            if container.pid:
                self.driver.use(container.pid, dict.fromkeys(container.devices, used_bytes))

    def exit(self, container: Container, code: int) -> None:
        """End the container's process with this exit code."""
        self._end(container, code)

    def reboot(self) -> None:
        """Reboot the machine. All processes end, and the network is lost, so a starting kubelet
        creates new sandboxes.
        """
        with self.lock:
            for container in list(self.containers.values()):
                self._end(container, 255)
            for sandbox in self.sandboxes.values():
                sandbox.ready = False

    def _run(self, container: Container, module: str, arguments: Sequence[str]) -> None:
        container.process = subprocess.Popen(
            [*DIE_WITH_PARENT, str(os.getpid()), sys.executable, "-m", module, *arguments],
            env={
                **container.environment,
                "PATH": os.environ["PATH"],
                "PYTHONPATH": str(ROOT),
                **self.reach,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        thread = threading.Thread(target=self._follow, args=(container, container.process))
        thread.start()
        self._commands.append((container.process, thread))

    def _follow(self, container: Container, process: subprocess.Popen[str] | Forked) -> None:
        if isinstance(process, subprocess.Popen):  # stderr is written to a file.
            assert process.stdout is not None
            for line in process.stdout:
                container.output += line
            process.stdout.close()
        self._end(container, process.wait())

    def _resolved(self, config: Any) -> list[str]:
        """Return the devices that the CDI specs in ``cdi`` define for a container's CDI device
        names.
        """
        named = {each.name for each in config.CDI_devices}
        for key, value in config.annotations.items():
            if key.startswith("cdi.k8s.io/"):
                named.update(value.split(","))
        known = {
            f"{spec['kind']}={device['name']}": device["name"]
            for file in self.cdi.glob("*")
            for spec in [yaml.safe_load(file.read_text())]
            for device in spec["devices"]
        }
        return sorted(known[name] for name in named)

    def _end(self, container: Container, code: int) -> None:
        with self.lock:
            if container.state == cri.CONTAINER_RUNNING:
                if container.process is not None:
                    container.process.terminate()
                self.driver.use(container.pid, {})
                shutil.rmtree(self.proc / str(container.pid))
                container.pid = 0
                container.exit_code = code
                container.finished_ns = time.time_ns()
                container.ended.set()

    # The methods below implement the RuntimeService of CRI.

    def Version(self, request: Any, context: Any) -> Any:
        return cri.VersionResponse(
            version="0.1.0",
            runtime_name="nothing",
            runtime_version="1.0.0",
            runtime_api_version="v1",
        )

    def Status(self, request: Any, context: Any) -> Any:
        conditions = [{"type": kind, "status": True} for kind in ("RuntimeReady", "NetworkReady")]
        return cri.StatusResponse(status={"conditions": conditions})

    def RuntimeConfig(self, request: Any, context: Any) -> Any:
        return cri.RuntimeConfigResponse(linux={"cgroup_driver": cri.CGROUPFS})

    def UpdateRuntimeConfig(self, request: Any, context: Any) -> Any:
        return cri.UpdateRuntimeConfigResponse()

    def RunPodSandbox(self, request: Any, context: Any) -> Any:
        sandbox = Sandbox(secrets.token_hex(32), request.config, time.time_ns())
        with self.lock:
            self.sandboxes[sandbox.id] = sandbox
            self._cgroup(sandbox).mkdir(parents=True, exist_ok=True)
        return cri.RunPodSandboxResponse(pod_sandbox_id=sandbox.id)

    def StopPodSandbox(self, request: Any, context: Any) -> Any:
        with self.lock:
            if sandbox := self.sandboxes.get(request.pod_sandbox_id):
                for container in self._inside(sandbox):
                    self._end(container, 137)
                sandbox.ready = False
                with contextlib.suppress(FileNotFoundError):  # The sandbox has already stopped.
                    self._cgroup(sandbox).rmdir()
        return cri.StopPodSandboxResponse()

    def RemovePodSandbox(self, request: Any, context: Any) -> Any:
        with self.lock:
            if sandbox := self.sandboxes.pop(request.pod_sandbox_id, None):
                for container in self._inside(sandbox):
                    self._end(container, 137)
                    del self.containers[container.id]
        return cri.RemovePodSandboxResponse()

    def PodSandboxStatus(self, request: Any, context: Any) -> Any:
        with self.lock, known(context):
            sandbox = self.sandboxes[request.pod_sandbox_id]
            return cri.PodSandboxStatusResponse(
                status=cri.PodSandboxStatus(**sandbox.listed(), network={"ip": sandbox.address})
            )

    def ListPodSandbox(self, request: Any, context: Any) -> Any:
        with self.lock:
            items = [cri.PodSandbox(**each.listed()) for each in self.sandboxes.values()]
        return cri.ListPodSandboxResponse(items=[x for x in items if passes(x, request.filter)])

    def CreateContainer(self, request: Any, context: Any) -> Any:
        with self.lock, known(context):
            sandbox = self.sandboxes[request.pod_sandbox_id]
            container = Container(secrets.token_hex(32), sandbox, request.config, time.time_ns())
            container.cdi_uuids = self._resolved(request.config)
            self.containers[container.id] = container
            return cri.CreateContainerResponse(container_id=container.id)

    def StartContainer(self, request: Any, context: Any) -> Any:
        with self.lock, known(context):
            container = self.containers[request.container_id]
            container.pid = next(self._pids)
            container.started_ns = time.time_ns()
            process = self.proc / str(container.pid)
            process.mkdir(parents=True)
            pod = container.sandbox.config.metadata.uid
            ticks = int(time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK"))
            (process / "stat").write_text(
                f"{container.pid} (python) S " + "0 " * 18 + f"{ticks} " + "0 " * 40
            )
            (process / "cgroup").write_text(f"0::/kubepods/pod{pod}/{container.id}\n")
            (process / "mountinfo").write_text(
                "".join(
                    f"1 1 8:1 {mount.host_path} {mount.container_path} rw - ext4 /dev/sda1 rw\n"
                    for mount in container.config.mounts
                )
            )
            self.use(container, int(container.environment.get("TAKES_VRAM", "0")))
            self._begin(container)
            return cri.StartContainerResponse()

    def _begin(self, container: Container) -> None:
        match list(container.config.command):
            case ["exit", code]:
                self._end(container, int(code))
            case ["headroom", *arguments]:
                self._run(container, "headroom", arguments)
                return
            # Run the module directly, because it is in the repository, which -I does not search.
            case ["python", "-I", "-m", module, *arguments]:
                self._run(container, module, arguments)
                return
        self.ever_ran.add(container.pod)

    def StopContainer(self, request: Any, context: Any) -> Any:
        container = self.containers.get(request.container_id)
        if container is not None:
            match list(container.config.command):
                case ["stubborn"]:
                    container.ended.wait(request.timeout)
                    self._end(container, 137)
                case ["hangs"]:
                    container.ended.wait(PATIENCE_S)
            self._end(container, 143)
        return cri.StopContainerResponse()

    def RemoveContainer(self, request: Any, context: Any) -> Any:
        with self.lock:
            if container := self.containers.pop(request.container_id, None):
                self._end(container, 137)
        return cri.RemoveContainerResponse()

    def ListContainers(self, request: Any, context: Any) -> Any:
        with self.lock:
            items = [
                cri.Container(**each.listed(), pod_sandbox_id=each.sandbox.id)
                for each in self.containers.values()
            ]
        wanted = request.filter
        return cri.ListContainersResponse(
            containers=[
                x
                for x in items
                if passes(x, wanted) and wanted.pod_sandbox_id in ("", x.pod_sandbox_id)
            ]
        )

    def ContainerStatus(self, request: Any, context: Any) -> Any:
        with self.lock, known(context):
            container = self.containers[request.container_id]
            ended = container.state == cri.CONTAINER_EXITED
            reason = ("Error" if container.exit_code else "Completed") if ended else ""
            return cri.ContainerStatusResponse(
                status=cri.ContainerStatus(
                    **container.listed(),
                    started_at=container.started_ns,
                    finished_at=container.finished_ns,
                    exit_code=container.exit_code,
                    reason=reason,
                    log_path=container.config.log_path,
                )
            )

    def ListContainerStats(self, request: Any, context: Any) -> Any:
        return cri.ListContainerStatsResponse()

    def ListPodSandboxStats(self, request: Any, context: Any) -> Any:
        return cri.ListPodSandboxStatsResponse()

    def _cgroup(self, sandbox: Sandbox) -> Path:
        return self.cgroups / f"kubepods/pod{sandbox.config.metadata.uid}"

    def _inside(self, sandbox: Sandbox) -> list[Container]:
        return [each for each in self.containers.values() if each.sandbox is sandbox]

    # The methods below implement the ImageService of CRI. Every image exists.

    def ListImages(self, request: Any, context: Any) -> Any:
        return cri.ListImagesResponse()

    def ImageStatus(self, request: Any, context: Any) -> Any:
        name = request.image.image
        return cri.ImageStatusResponse(
            image={"id": name, "repo_tags": [name], "size": 1, "username": "root"}
        )

    def PullImage(self, request: Any, context: Any) -> Any:
        return cri.PullImageResponse(image_ref=request.image.image)

    def RemoveImage(self, request: Any, context: Any) -> Any:
        return cri.RemoveImageResponse()

    def ImageFsInfo(self, request: Any, context: Any) -> Any:
        usage = {
            "timestamp": time.time_ns(),
            "fs_id": {"mountpoint": "/"},
            "used_bytes": {"value": 1},
            "inodes_used": {"value": 1},
        }
        return cri.ImageFsInfoResponse(image_filesystems=[usage], container_filesystems=[usage])


@contextlib.contextmanager
def known(context: Any) -> Iterator[None]:
    """Answer NOT_FOUND if the context raises ``KeyError``, as runtimes do for an unknown ID."""
    try:
        yield
    except KeyError as missing:
        context.abort(grpc.StatusCode.NOT_FOUND, f"not found: {missing}")


def passes(item: Any, wanted: Any) -> bool:
    """Return whether a sandbox or container matches the filter."""
    labels: Mapping[str, str] = item.labels
    return (
        wanted.id in ("", item.id)
        and (not wanted.HasField("state") or wanted.state.state == item.state)
        and all(labels.get(key) == value for key, value in wanted.label_selector.items())
    )
