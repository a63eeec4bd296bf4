"""A container runtime that really runs our images and kube-scheduler's, and pretends to run others.

A container is a process in namespaces of its own: the pod's network, and a file system that is an
overlay over the machine's, with what the kubelet mounts into it; it has the user, the groups and
the capabilities that its manifest leaves it. What an image would bring is the machine's: the
interpreter with what is installed for the tests, and the sources.
"""

import os
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import grpc

from tests.driver import Driver
from tests.install.network import PodNetwork
from tests.kubelet.cri_objects import Container, cri
from tests.kubelet.runtime import Runtime
from tests.processes import DIE_WITH_PARENT

#: "$1" is a folder for the container, "$2" whether its file system may be written, "$3" how many
#: mounts follow, as source, target and ro or rw; of what is to be open every user may pass through
#: the target. Then the command, to be run in there.
INSIDE = """
set -e
base=$1 writable=$2 mounts=$3
shift 3
mkdir -p "$base"
mount -t tmpfs tmpfs "$base"
mkdir "$base/upper" "$base/work" "$base/root"
mount -t overlay overlay -o "lowerdir=/,upperdir=$base/upper,workdir=$base/work" "$base/root"
mount -t tmpfs tmpfs "$base/root/run"
while [ "$mounts" -gt 0 ]; do
  target=$base/root$2
  if [ "$3" = open ]; then
    chmod a+x "$target"
    mounts=$((mounts - 1))
    shift 3
    continue
  fi
  if [ -d "$1" ]; then mkdir -p "$target"; else mkdir -p "${target%/*}"; touch "$target"; fi
  mount --rbind "$1" "$target"
  if [ "$3" = ro ]; then mount -o remount,bind,ro "$target"; fi
  mounts=$((mounts - 1))
  shift 3
done
for each in dev proc sys; do mount --rbind "/$each" "$base/root/$each"; done
if [ "$writable" = no ]; then mount -o remount,ro "$base/root"; fi
exec chroot "$base/root" "$@"
"""

_POWERS = {"SYS_PTRACE": "sys_ptrace", "SYS_ADMIN": "sys_admin"}


class Images:
    """Entrypoints and files of images, by the last part of the repository.

    ``sources``: the folder of Headroom's sources for each tag; "" stands for all other tags.
    """

    def __init__(self, kube_scheduler: Path, folder: Path, sources: Mapping[str, Path]) -> None:
        self.kube_scheduler = kube_scheduler
        self._sources = sources
        python = [sys.executable, "-m"]
        self.entrypoints: Mapping[str, Sequence[str]] = {
            "headroom-extender": (*python, "extender"),
            "headroom-agent": (*python, "agent"),
            "kube-scheduler": (),
        }
        #: The sources, the interpreter, and the commands of images.
        folders = list(_python_folders(sources.values()))
        above = sorted({str(each) for folder in folders for each in folder.parents} - {"/"})
        self.mounts = [("", each, "open") for each in above]
        self.mounts += [(str(each), str(each), "ro") for each in folders]
        self.mounts.append((str(kube_scheduler), "/usr/local/bin/kube-scheduler", "ro"))
        headroom = folder / "headroom"
        headroom.write_text(f'#!/bin/sh\nexec {sys.executable} -m headroom "$@"\n')
        headroom.chmod(0o755)
        self.mounts.append((str(headroom), "/usr/local/bin/headroom", "ro"))

    def entrypoint(self, image: str) -> Sequence[str] | None:
        """None where the image is only pretended."""
        name = image.rpartition("/")[2].partition("@")[0].partition(":")[0]
        return self.entrypoints.get(name)

    def sources(self, image: str) -> Path:
        """Return the folder of the sources that the image runs, by its tag."""
        return self._sources.get(image.rpartition(":")[2], self._sources[""])


def _python_folders(sources: Iterable[Path]) -> Iterator[Path]:
    """Those that the overlay may not show, as they may be mounts of their own."""
    folders = {*sources, Path(sys.prefix), Path(sys.base_prefix)} - {Path("/usr")}
    folders |= {folder.resolve() for folder in folders}
    # Not what is in another of them, and shown with it.
    yield from sorted(each for each in folders if not folders & set(each.parents))


class ProcessRuntime(Runtime):
    """``hardware`` are variables by which an agent finds what stands for driver and processes."""

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
        #: Root of the kubelet, in whose mounts the volumes are.
        self.kubelet_pid = 0

    def RunPodSandbox(self, request: Any, context: Any) -> Any:
        answer = super().RunPodSandbox(request, context)
        with self.lock:
            network = PodNetwork(next(self._pods))
            self._networks[answer.pod_sandbox_id] = network
            self.sandboxes[answer.pod_sandbox_id].address = network.address
        return answer

    def StopPodSandbox(self, request: Any, context: Any) -> Any:
        answer = super().StopPodSandbox(request, context)
        with self.lock:
            if network := self._networks.pop(request.pod_sandbox_id, None):
                network.close()
        return answer

    def StopContainer(self, request: Any, context: Any) -> Any:
        """With its grace period, as runtimes do."""
        container = self.containers.get(request.container_id)
        if container is not None and container.process is not None:
            container.process.terminate()
            container.ended.wait(request.timeout)
            container.process.kill()
        return super().StopContainer(request, context)

    def ExecSync(self, request: Any, context: Any) -> Any:
        """A probe's command, inside of the container as its own command is."""
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

    def _environment(self, container: Container) -> dict[str, str]:
        is_agent = "agent" in container.config.image.image
        return {
            "PATH": f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin:/usr/sbin",
            "PYTHONPATH": str(self._images.sources(container.config.image.image)),
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
        container.process = subprocess.Popen(
            [
                *(*DIE_WITH_PARENT, str(os.getpid())),
                *self._networks[container.sandbox.id].enter,
                *("nsenter", "--target", str(self.kubelet_pid), "--mount"),
                *("unshare", "--mount", "sh", "-c", INSIDE, "sh"),
                str(self._folder / container.id),
                "no" if security.readonly_rootfs else "yes",
                str(len(mounts)),
                *(part for mount in mounts for part in mount),
                *_as_told(security),
                *(config.command or entrypoint),
                *config.args,
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self._environment(container),
        )
        thread = threading.Thread(target=self._follow, args=(container, container.process))
        thread.start()
        self._commands.append((container.process, thread))


def _inside(path: str) -> str:
    """Without the one link on the way to volumes, which would lead out of the container."""
    return path.removeprefix("/var") if path.startswith("/var/run/") else path


def _as_told(security: Any) -> Iterator[str]:
    """The command that takes from the next one what its manifest does not leave it."""
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
