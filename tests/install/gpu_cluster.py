"""Runs pods on a GPU of this machine, in a one-node cluster with all components of Headroom.

python -m tests.install.gpu_cluster [--mps] [--pretend] [--out FILE]

Needs root, containerd and runc. ``make gpu-cluster`` runs it. etcd, API server, kube-scheduler,
kubelet, containerd, runc, NVIDIA's device plugin, the driver, extender and agent are real. The
pods' processes allocate GPU memory with CUDA. ``--mps`` shares the GPU with MPS instead of
time-slicing. ``--pretend`` simulates the driver on a machine without a GPU.

Prints one line per check, and writes the observations as JSON. The exit status is 1 if a check
failed.
"""

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated

import pynvml
import typer

from benchmarks.gpu.fixtures import Fixtures
from tests.controlplane import ROOT, built, control_plane
from tests.debian import containers
from tests.driver import Driver, cuda_folder, h100, library_folder
from tests.install.gpu_node import MPS_CONTROL
from tests.install.gpu_pods import GpuCluster

BINARIES = "etcd", "kube-apiserver", "kube-scheduler", "kubelet", "nvidia-device-plugin"
_ALONE = "TEST_GPU_CLUSTER_ALONE"


def _total_bytes() -> int:
    """Return the memory of the first GPU in bytes. Raise ``SystemExit`` if there is no GPU."""
    try:
        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(0)
        return int(pynvml.nvmlDeviceGetMemoryInfo(handle, version=pynvml.nvmlMemory_v2).total)
    except pynvml.NVMLError as err:
        raise SystemExit(
            f"the driver cannot be asked: {err}; without a GPU: make gpu-cluster ARGS=--pretend"
        ) from err


def _pretended() -> dict[str, str]:
    """Create a simulated driver in a new folder. Return the environment variables with which
    processes find it.
    """
    folder = tempfile.mkdtemp(prefix="headroom-pretended-")
    table, control = Path(folder, "table"), Path(folder, MPS_CONTROL)
    Driver(table, [h100("GPU-9b07c1d2-3e4f-5a6b-7c8d-9e0f1a2b3c4d")])
    script = (ROOT / "tests/benchmarks/gpu/mps_control.py").read_text()
    control.write_text(f"#!{sys.executable}\n{script}")
    control.chmod(0o755)
    return {
        "PATH": f"{folder}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": f"{library_folder()}:{cuda_folder()}",
        "FAKE_NVML_TABLE": str(table),
        "FAKE_CUDA_FOLDER": folder,
    }


@contextlib.contextmanager
def _cluster(driver: Mapping[str, str], total_bytes: int, mps: bool) -> Iterator[GpuCluster]:
    """Yield a cluster that is not started yet. If an exception is raised, print the state of all
    components.
    """
    with control_plane() as plane:
        cluster = GpuCluster(plane, driver, total_bytes, mps)
        try:
            yield cluster
        except Exception:
            typer.echo(cluster.trouble(), err=True)
            raise
        finally:
            cluster.node.stop()


def main(
    mps: Annotated[bool, typer.Option(help="Share the GPU by MPS.")] = False,
    pretend: Annotated[bool, typer.Option(help="Simulate the driver.")] = False,
    out: Annotated[Path | None, typer.Option(help="File for what was observed.")] = None,
) -> None:
    """Run pods on a GPU of this machine, with all of Headroom."""
    if os.geteuid() != 0:
        raise SystemExit(
            "make gpu-cluster needs root: it mounts file systems and starts containers"
        )
    if _ALONE not in os.environ:
        simulated = _pretended() if pretend else {}
        os.environ.update(simulated | {_ALONE: json.dumps(simulated)})
        os.execvp("unshare", ["unshare", "--mount", sys.executable, *sys.orig_argv[1:]])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    driver = json.loads(os.environ[_ALONE])
    try:
        total_bytes = _total_bytes()
        built(*BINARIES)
        if shutil.which("containerd") is None:
            subprocess.run(["sh", "-c", containers()], check=True)
        with _cluster(driver, total_bytes, mps) as cluster:
            cluster.run()
    finally:
        if folder := driver.get("FAKE_CUDA_FOLDER"):
            shutil.rmtree(folder)
    if out is not None:
        text = json.dumps(cluster.checks.results, indent=1)
        out.write_text(Fixtures().anonymous(text) + "\n")
    raise SystemExit(1 if cluster.checks.failed else 0)


if __name__ == "__main__":
    typer.run(main)
