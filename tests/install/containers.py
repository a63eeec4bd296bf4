"""A container runtime that runs the processes of our images and of kube-scheduler, and simulates
other containers.

A container is a process in its own namespaces. It has the network of its pod, and an overlay over
the machine's file system that contains the kubelet's mounts. It has the user, groups and
capabilities from its manifest, but uses the interpreter, installed packages and sources of the
machine. Containers of the extender's image are forked from a process that has already imported the
modules, because a new interpreter takes 2 s of CPU.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from tests.controlplane import ROOT
from tests.driver import Driver
from tests.forks import Forked
from tests.install.inside import INSIDE, Confinement
from tests.install.network import PodNetwork, address
from tests.kubelet.cri_objects import Container, cri
from tests.kubelet.runtime import Runtime
from tests.processes import DIE_WITH_PARENT

_POWERS = {"SYS_PTRACE": "sys_ptrace", "SYS_ADMIN": "sys_admin"}


class Images:
    """The entrypoints and files of images. An image is identified by the last part of its
    repository.
    """

    def __init__(self, kube_scheduler: Path, folder: Path) -> None:
        python = [sys.executable, "-m"]
        self.entrypoints: Mapping[str, Sequence[str]] = {
            "headroom-extender": (*python, "headroom"),
            "headroom-agent": (*python, "agent"),
            "kube-scheduler": (),
        }
        #: Mounts for the sources, the interpreter, and the commands of images.
        folders = list(_python_folders())
        above = sorted({str(each) for folder in folders for each in folder.parents} - {"/"})
        self.mounts = [("", each, "open") for each in above]
        self.mounts += [(str(each), str(each), "ro") for each in folders]
        self.mounts.append((str(kube_scheduler), "/usr/local/bin/kube-scheduler", "ro"))
        headroom = folder / "headroom"
        headroom.write_text(f'#!/bin/sh\nexec {sys.executable} -m headroom "$@"\n')
        headroom.chmod(0o755)
        self.mounts.append((str(headroom), "/usr/local/bin/headroom", "ro"))

    def entrypoint(self, image: str) -> Sequence[str] | None:
        """Return the entrypoint of an image, or None if the image is only simulated."""
        name = image.rpartition("/")[2].partition("@")[0].partition(":")[0]
        return self.entrypoints.get(name)

    def forked(self, image: str, command: Sequence[str]) -> tuple[str, ...] | None:
        """Return the module and the arguments of a command of the extender's image. Return None for
        other images.
        """
        if self.entrypoint(image) != self.entrypoints["headroom-extender"]:
            return None
        return tuple(command[2:] if command[0] == sys.executable else command)


def _python_folders() -> Iterator[Path]:
    """Yield the folders of Python that can be missing in the overlay, because they can be separate
    mounts.
    """
    folders = {ROOT, Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
    folders |= {folder.resolve() for folder in folders}
    # Skip folders inside another folder of the set, because the outer folder is mounted completely.
    yield from sorted(each for each in folders if not folders & set(each.parents))


class ProcessRuntime(Runtime):
    """Runs containers as processes.

    ``hardware`` are the environment variables with which an agent finds the simulated driver and
    its processes.
    """

    def __init__(
        self,
        socket: Path,
        proc: Path,
        driver: Driver,
        cdi: Path,
        images: Images,
        pods: Iterator[int],
        hardware: Mapping[str, str],
    ) -> None:
        super().__init__(socket, proc, driver, cdi)
        self._images = images
        self._pods = pods
        self._hardware = hardware
        self._folder = socket.parent / "containers"
        self._networks: dict[str, PodNetwork] = {}
        #: Process ID of the kubelet, in whose mount namespace the volumes are.
        self.kubelet_pid = 0

    def RunPodSandbox(self, request: Any, context: Any) -> Any:
        answer = super().RunPodSandbox(request, context)
        with self.lock:
            self.sandboxes[answer.pod_sandbox_id].address = address(next(self._pods))
        return answer

    def StopPodSandbox(self, request: Any, context: Any) -> Any:
        answer = super().StopPodSandbox(request, context)
        with self.lock:
            if network := self._networks.pop(request.pod_sandbox_id, None):
                network.close()
        return answer

    def StopContainer(self, request: Any, context: Any) -> Any:
        """Send SIGTERM, wait for the grace period, and send SIGKILL, as other container runtimes
        do.
        """
        container = self.containers.get(request.container_id)
        if container is not None and container.process is not None:
            container.process.terminate()
            container.ended.wait(request.timeout)
            container.process.kill()
        return super().StopContainer(request, context)

    def ExecSync(self, request: Any, context: Any) -> Any:
        """Run the command of a probe inside the container, with the container's user and
        capabilities.
        """
        container = self.containers[request.container_id]
        if container.process is None:
            context.abort(grpc.StatusCode.UNIMPLEMENTED, "this container is only pretended")
        enter = ("nsenter", "--target", str(container.process.pid))
        try:
            done = subprocess.run(
                [
                    *(*enter, "--mount", "--net", "--root"),
                    *_as_told(container.config.linux.security_context),
                    *request.cmd,
                ],
                env=self._environment(container),
                capture_output=True,
                timeout=request.timeout or None,
                check=False,
            )
        except subprocess.TimeoutExpired:
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, f"{request.cmd[0]} takes too long")
        return cri.ExecSyncResponse(
            stdout=done.stdout, stderr=done.stderr, exit_code=done.returncode
        )

    def _network(self, container: Container) -> PodNetwork:
        """Return the network of the container's pod. Create it for the first process of the pod."""
        sandbox = container.sandbox
        if sandbox.id not in self._networks:
            self._networks[sandbox.id] = PodNetwork(sandbox.address)
        return self._networks[sandbox.id]

    def _environment(self, container: Container) -> dict[str, str]:
        is_agent = "agent" in container.config.image.image
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin",
            "PYTHONPATH": str(ROOT),
            "PYTHONDONTWRITEBYTECODE": "1",
            "HOME": "/",
            **container.environment,
            **(self._hardware if is_agent else {}),
        }

    def stop(self) -> None:
        super().stop()
        for network in self._networks.values():
            network.close()

    def _begin(self, container: Container) -> None:
        config = container.config
        entrypoint = self._images.entrypoint(config.image.image)
        if entrypoint is None:
            super()._begin(container)
            return
        security = config.linux.security_context
        mounts = [
            *self._images.mounts,
            *(
                (each.host_path, _inside(each.container_path), "ro" if each.readonly else "rw")
                for each in config.mounts
            ),
        ]
        layout = [
            str(self._folder / container.id),
            "no" if security.readonly_rootfs else "yes",
            str(len(mounts)),
            *(part for mount in mounts for part in mount),
        ]
        command = [*(config.command or entrypoint), *config.args]
        if forked := self._images.forked(config.image.image, command):
            self._fork(container, layout, *forked)
            return
        container.process = subprocess.Popen(
            [
                *(*DIE_WITH_PARENT, str(os.getpid())),
                *self._network(container).enter,
                *("nsenter", "--target", str(self.kubelet_pid), "--mount"),
                *("unshare", "--mount", "sh", "-c", INSIDE, "sh"),
                *layout,
                *_as_told(security),
                *command,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment(container),
        )
        self._watch(container)

    def _fork(self, container: Container, layout: list[str], module: str, *arguments: str) -> None:
        """Start a command of Headroom in the container. The container must not run as root."""
        security = container.config.linux.security_context
        assert security.run_as_user.value
        assert "ALL" in security.capabilities.drop_capabilities
        assert not security.privileged
        assert not security.capabilities.add_capabilities
        confinement = Confinement(
            self._network(container).pid,
            self.kubelet_pid,
            layout,
            security.run_as_user.value,
            security.run_as_group.value,
            list(security.supplemental_groups),
            security.no_new_privs,
        )
        log = self._log(container)
        log.parent.mkdir(exist_ok=True)
        environment = self._environment(container)
        container.process = Forked(module, arguments, log, environment, inside=confinement)
        self._watch(container)

    def output(self, container: Container) -> str:
        """Return the output of the container so far."""
        log = self._log(container)
        return log.read_text(errors="replace") if log.exists() else container.output

    def _log(self, container: Container) -> Path:
        return self._folder / f"{container.id}.log"

    def _watch(self, container: Container) -> None:
        assert container.process is not None
        thread = threading.Thread(target=self._follow, args=(container, container.process))
        thread.start()
        self._commands.append((container.process, thread))


def _inside(path: str) -> str:
    """Return the path without the link /var/run, because the link would lead out of the
    container.
    """
    return path.removeprefix("/var") if path.startswith("/var/run/") else path


def _as_told(security: Any) -> Iterator[str]:
    """Yield the words of a command that drops all privileges that the manifest does not grant."""
    yield "setpriv"
    if security.HasField("run_as_user"):
        yield f"--reuid={security.run_as_user.value}"
    group = security.run_as_group.value if security.HasField("run_as_group") else 0
    yield f"--regid={group}"
    groups = ",".join(map(str, security.supplemental_groups))
    yield f"--groups={groups}" if groups else "--clear-groups"
    if security.no_new_privs:
        yield "--no-new-privs"
    if not security.privileged and "ALL" in security.capabilities.drop_capabilities:
        kept = "".join(f",+{_POWERS[each]}" for each in security.capabilities.add_capabilities)
        yield f"--bounding-set=-all{kept}"
        yield f"--inh-caps=-all{kept}"
