"""Starts the cluster in which a newcomer installs the chart. It has one node with real containers.

    python -m tests.install.newcomers_cluster FOLDER

Headroom is not installed, but the node has the images that a registry would serve. When the node
accepts pods, this program writes ``kubeconfig``, ``ca.crt`` and then ``ready`` to FOLDER. The
cluster ends with this process.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from tests.driver import Gpu
from tests.images.building import Builder
from tests.install import network, packaged
from tests.install.cluster import GPU_BYTES, Plane, bring_up
from tests.install.containerd import ContainerdNode
from tests.install.versions import REGISTRY
from tests.processes import DIE_WITH_PARENT

_ARCHIVES = "TEST_NEWCOMER_ARCHIVES"


def images(folder: Path) -> Mapping[str, Path]:
    """Return the archive of each image by image name. The image of kube-scheduler has the name of
    its public registry.
    """
    private = packaged.scheduler()
    return {
        image.replace(REGISTRY, "registry.k8s.io") if image == private else image: archive
        for image, archive in packaged.archives(folder).items()
    }


def build(folder: Path) -> None:
    packaged.build(folder)
    builder, private = Builder(), packaged.scheduler()
    public = private.replace(REGISTRY, "registry.k8s.io")
    builder.buildah("tag", private, public)
    builder.save(public, images(folder)[public])


class NewcomersPlane(Plane):
    def spawn_apiserver(self, *flags: str) -> None:
        # The API server forwards ports through the kubelet. Use its address, because no DNS
        # resolves its host name.
        super().spawn_apiserver("--kubelet-preferred-address-types=InternalIP", *flags)


class NewcomersNode(ContainerdNode):
    """A node whose kubelet serves ``kubectl port-forward`` in the network of the cluster."""

    def _spawn_inside(self, name: str, *command: str, env: Mapping[str, str] | None = None) -> None:
        more = [f"--node-ip={network.HOST}"] if name == "kubelet" else []
        super()._spawn_inside(name, *command, *more, env=env)

    def _kubelet_configuration(self) -> dict[str, Any]:
        return super()._kubelet_configuration() | {
            "enableServer": True,
            "address": network.HOST,
            "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
            "authorization": {"mode": "AlwaysAllow"},
        }


def main(folder: Annotated[Path, typer.Argument(exists=True, file_okay=False)]) -> None:
    if _ARCHIVES not in os.environ:
        with tempfile.TemporaryDirectory(prefix="headroom-images-") as archives:
            build(Path(archives))
            command = [sys.executable, "-m", "tests.install.newcomers_cluster", str(folder)]
            done = subprocess.run(
                [*DIE_WITH_PARENT, str(os.getpid()), *command],
                env=os.environ | {_ARCHIVES: archives},
                check=False,
            )
        raise typer.Exit(done.returncode)
    network.alone()
    network.build()
    with contextlib.ExitStack() as stack:
        plane = NewcomersPlane()
        stack.callback(plane.stop)
        plane.start()
        plane.start_controller_manager()
        gpus = [Gpu(f"GPU-{i}", GPU_BYTES, reserved_bytes=0) for i in range(2)]
        archives = images(Path(os.environ[_ARCHIVES]))
        node = NewcomersNode(plane, "gpu-0", gpus, 4, archives, packaged.PAUSE)
        stack.callback(node.stop)
        bring_up(plane, [node])
        shutil.copy(plane.kubeconfig(), folder / "kubeconfig")
        shutil.copy(plane.ca_file, folder / "ca.crt")
        (folder / "ready").touch()
        signal.pause()


if __name__ == "__main__":
    typer.run(main)
