"""The setup for a cluster's own kube-scheduler, step by step as in docs/scheduler.md.

    python -m tests.install.kubeadm

By hand, as it compiles kube-proxy and needs nft. A control plane node and another one, as kubeadm
makes them: kube-scheduler is on the host's network and reads its files in /etc/kubernetes, and a
real kube-proxy carries the address of the Service to extenders in pods. Prints what was found as a
line of JSON, or fails.
"""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer

from tests.controlplane import SCHEDULER_FLAGS, ControlPlane, built
from tests.debian import ip
from tests.e2e.cluster import placement
from tests.install import network
from tests.install.play import (
    MERGE,
    NAMESPACE,
    WORKLOADS,
    Machine,
    Plane,
    Play,
    bring_up,
    make_machines,
    start_default_scheduler,
    until,
)
from tests.processes import free_ports

KUBERNETES = Path("/etc/kubernetes")
FILES = KUBERNETES / "headroom"
#: As kubeadm's.
SERVICES = "10.96.0.0/12"
ROLE = "node-role.kubernetes.io/control-plane"


class KubeadmPlane(Plane):
    """Addresses of its Services, which must be routed to pods."""

    def spawn_apiserver(self, *flags: str) -> None:
        super().spawn_apiserver(*flags, f"--service-cluster-ip-range={SERVICES}")

    def start_kube_proxy(self) -> None:
        """The hosts file of all nodes, which share their network here."""
        health, metrics = free_ports(2)
        self.spawn(
            "kube-proxy",
            str(built("kube-proxy")["kube-proxy"]),
            f"--kubeconfig={self.kubeconfig()}",
            *("--proxy-mode=nftables", "--hostname-override=gpu-0", "--cluster-cidr=10.77.0.0/16"),
            *("--conntrack-max-per-core=0", f"--healthz-bind-address=127.0.0.1:{health}"),
            f"--metrics-bind-address=127.0.0.1:{metrics}",
        )


class Variant(Play):
    components = ("default-scheduler",)
    deployments = ("headroom-extender", "headroom-webhook", "headroom-console")

    def run(self) -> None:
        for step in (self.install, self.configure, self.place, self.lose_an_extender):
            typer.echo(step.__name__, err=True)
            step()

    def install(self) -> None:
        """Step 1."""
        self.apply("v1")
        until(self.rolled_out, "the Deployment")
        until(self.agents_ready, "the agents")
        until(self.initialised, "GPUNodes that are initialised")
        until(lambda: (FILES / "ca.crt").exists(), "the files on the control plane node")
        self.found["files"] = {
            each.name: oct(each.stat().st_mode & 0o777) for each in sorted(FILES.glob("*.*"))
        }

    def configure(self) -> None:
        """Steps 2 and 3: the kubelet would restart the static pod."""
        shutil.copy(self._deploy / "default-scheduler/kube-scheduler.yaml", FILES)
        config = FILES / "kube-scheduler.yaml"
        command = [sys.executable, "-m", "headroom", "doctor", f"--scheduler-config={config}"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        self.found["doctor"] = [shown.returncode, *(shown.stdout + shown.stderr).splitlines()]
        self.plane.write_kubeconfig(
            KUBERNETES / "scheduler.conf", {"token": "scheduler-of-the-tests"}
        )
        self.plane.kill("default-scheduler")
        start_default_scheduler(self.plane, config, *SCHEDULER_FLAGS)

    def place(self) -> None:
        """Step 4, until the GPUs are full."""
        self.plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": WORKLOADS}})
        until(self.has_account, "a service account for pods of the namespace")
        room = 2 * len(self.machines) * 3
        for number in range(room + 1):
            self.create_pod(f"pod-{number}", 7)
        until(lambda: len(self.bound()) == room, f"{room} bound pods")
        until(lambda: self.rejections()[:1] and self.rejections()[0].startswith("0/"), "a refusal")
        self.found["rejections"] = self.rejections()
        self.found["schedulers"] = sorted({pod["spec"]["schedulerName"] for pod in self.pods()})
        self.found["reserved"] = sum(bool(placement(pod)) for pod in self.bound())

    def lose_an_extender(self) -> None:
        """The address leads to the other one."""
        gone = self.ours("extender")[0]["metadata"]["name"]
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{gone}"
        self.plane.call("DELETE", path, {"gracePeriodSeconds": 0})
        before = {pod["metadata"]["name"] for pod in self.bound()}
        (one, *_) = sorted(before)
        self.plane.call("DELETE", f"/api/v1/namespaces/{WORKLOADS}/pods/{one}")
        took_s = until(
            lambda: {pod["metadata"]["name"] for pod in self.bound()} - before, "another is bound"
        )
        self.found["bound_after_an_extender_was_lost_s"] = round(took_s, 1)


def own_etc(folder: Path) -> None:
    """Files that are written there stay in this namespace."""
    for each in ("upper", "work"):
        (folder / each).mkdir(parents=True)
    layers = f"lowerdir=/etc,upperdir={folder}/upper,workdir={folder}/work"
    network.run("mount", "-t", "overlay", "overlay", "-o", layers, "/etc")
    FILES.mkdir(parents=True, exist_ok=True)


def make_control_plane_node(plane: ControlPlane, machines: Sequence[Machine]) -> None:
    first, *_ = machines
    labels: dict[str, Any] = {"metadata": {"labels": {ROLE: ""}}}
    plane.call("PATCH", f"/api/v1/nodes/{first.name}", labels, MERGE)


def main() -> None:
    if not shutil.which("nft"):
        raise SystemExit("needs nft on PATH, for kube-proxy: install the package nftables")
    network.alone()
    network.build()
    # As a host's default route does: what has no route is never looked up among Services.
    network.run(*ip(), "route", "add", SERVICES, "dev", network.BRIDGE)
    with contextlib.ExitStack() as stack:
        plane = KubeadmPlane()
        stack.callback(plane.stop)
        own_etc(plane.folder / "etc")
        plane.start()
        plane.start_controller_manager()
        machines = make_machines(plane, 2)
        for machine in machines:
            stack.callback(machine.stop)
        bring_up(plane, machines)
        make_control_plane_node(plane, machines)
        plane.start_kube_proxy()
        variant = Variant(plane, machines)
        try:
            variant.run()
        except BaseException:
            typer.echo(f"{variant.trouble()}\n{plane.logs()}", err=True)
            raise
        typer.echo(json.dumps(variant.found))


if __name__ == "__main__":
    typer.run(main)
