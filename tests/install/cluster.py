"""A cluster with real servers and kubelets, in its own namespaces, on which tests install Headroom.

The API server, etcd, the controllers, a scheduler for all other pods, and kubelets with NVIDIA's
device plugin are real. Every container of Headroom also runs: a test runtime starts it as its pod
specifies (tests/install/containers.py). Containers of other images only hold simulated GPU memory.
"""

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tests import forks, waiting
from tests.controlplane import CONTROLLERS, ControlPlane, built
from tests.driver import GIB, Gpu, library_folder
from tests.install import network
from tests.install.containers import Images, ProcessRuntime
from tests.kubelet.node import Node, start

GPU_BYTES = 24 * GIB
PATIENCE_S = 300.0


class Plane(ControlPlane):
    address = network.HOST
    without_admission = ()
    controllers = (
        *CONTROLLERS,
        "cronjob-controller",
        "daemonset-controller",
        "disruption-controller",
        "endpointslice-controller",
        "namespace-controller",
        "root-ca-certificate-publisher-controller",
        "serviceaccount-controller",
        "ttl-after-finished-controller",
    )

    def __init__(self) -> None:
        super().__init__()
        self.port = 443

    def spawn_apiserver(self, *flags: str) -> None:
        # Let the API server call the pods of a Service directly, because there is no load balancer.
        super().spawn_apiserver(
            *("--bind-address=0.0.0.0", "--enable-aggregator-routing=true"),
            "--endpoint-reconciler-type=lease",
            *flags,
        )


class Machine(Node):
    """A node that runs the processes of Headroom's containers."""

    images: Images
    pods: Iterator[int]

    def _new_runtime(self, cdi: Path) -> ProcessRuntime:
        return ProcessRuntime(
            self.folder / "cri.sock",
            self.folder / "proc",
            self.driver,
            cdi,
            self.images,
            self.pods,
            {
                "LD_LIBRARY_PATH": str(library_folder()),
                "FAKE_NVML_TABLE": str(self.driver.table),
                "HEADROOM_PROC": str(self.folder / "proc"),
            },
        )

    def _kubelet_user(self) -> Sequence[str]:
        return ()  # The kubelet needs root to mount the volumes of pods.

    def spawn_kubelet(self, kubeconfig: str = "kubeconfig") -> None:
        super().spawn_kubelet(kubeconfig)
        assert isinstance(self.runtime, ProcessRuntime)
        self.runtime.kubelet_pid = self.pid("kubelet")

    def show_processes(self) -> None:
        """Let the agent see only the processes of the kubelet and the device plugin."""
        (self.runtime.proc / "2").mkdir(parents=True, exist_ok=True)
        (self.runtime.proc / "2/comm").write_text("kthreadd\n")
        self._show("kubelet")
        self._show("nvidia-device-plugin")


def until(done: Callable[[], object], what: str, within_s: float = PATIENCE_S) -> float:
    return waiting.until(done, what, within_s, every_s=0.25)


def start_default_scheduler(plane: ControlPlane, config: Path, *flags: str) -> None:
    binary = str(built("kube-scheduler")["kube-scheduler"])
    plane.spawn("default-scheduler", binary, f"--config={config}", "--secure-port=0", *flags)


def make_machines(plane: ControlPlane, count: int) -> list[Machine]:
    """Return nodes that are not started yet. Each node has two GPUs, and four pods can share a GPU.

    Headroom's images run the code of the working tree, even if they have another tag.
    """
    forks.without_main()
    scheduler = built("kube-scheduler")["kube-scheduler"]
    Machine.images = Images(scheduler, plane.folder)
    Machine.pods = itertools.count()
    return [
        Machine(
            plane,
            f"gpu-{number}",
            [Gpu(f"GPU-{number}-{i}", GPU_BYTES, reserved_bytes=0) for i in range(2)],
            4,
        )
        for number in range(count)
    ]


def bring_up(plane: ControlPlane, machines: Sequence[Node]) -> None:
    """Start nodes with a device plugin, and a scheduler for all other pods."""
    plain: Mapping[str, Any] = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(plane.kubeconfig("scheduler-of-the-tests"))},
    }
    config = plane.folder / "default.json"
    config.write_text(json.dumps(plain))
    start_default_scheduler(plane, config)
    start(machines)
    for machine in machines:
        machine.show_processes()
        labels = {"metadata": {"labels": {"nvidia.com/gpu.present": "true"}}}
        plane.call("PATCH", f"/api/v1/nodes/{machine.name}", labels)
