"""Follows docs/how-to/kube-scheduler.md to set up the cluster's own kube-scheduler.

python -m tests.install.kubeadm

No test runs this module, because it compiles kube-proxy and needs nft. The cluster has a control
plane node and a worker, as kubeadm creates them. kube-scheduler uses the host's network and reads
its files in /etc/kubernetes. A real kube-proxy routes the Service address to the extender pods. The
module prints the result as a line of JSON, or fails.
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
import yaml

from tests.controlplane import ControlPlane, built
from tests.debian import ip
from tests.deploy.rendered import DEPLOY
from tests.e2e.cluster import placement
from tests.install import network
from tests.install.cluster import (
    Machine,
    Plane,
    bring_up,
    make_machines,
    start_default_scheduler,
    until,
)
from tests.install.load import names
from tests.install.play import NAMESPACE, PLATFORM, Play
from tests.kubernetes_version import scheduler_flags
from tests.processes import free_ports

KUBERNETES = Path("/etc/kubernetes")
FILES = KUBERNETES / "headroom"
#: The default range of Service addresses in kubeadm.
SERVICES = "10.96.0.0/12"
ROLE = "node-role.kubernetes.io/control-plane"


class KubeadmPlane(Plane):
    """A control plane that needs a route from Service addresses to pods."""

    def spawn_apiserver(self, *flags: str) -> None:
        super().spawn_apiserver(*flags, f"--service-cluster-ip-range={SERVICES}")

    def start_kube_proxy(self) -> None:
        """Start one kube-proxy for all nodes, because they share one network."""
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
    deployments = ("headroom-extender", "headroom-webhook", "headroom-console")

    def __init__(self, plane: Plane, machines: Sequence[Machine]) -> None:
        super().__init__(plane, machines, {"image": "none"})
        self._deploy = plane.folder / "deploy"

    def run(self) -> None:
        self.act(self.install, self.configure, self.place, self.lose_an_extender)

    def install(self) -> None:
        """Follow step 1 of the page with kustomize, in enforce mode."""
        shutil.copytree(DEPLOY, self._deploy)
        mine = self._deploy / "overlays/mine"
        mine.mkdir()
        content: dict[str, Any] = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [f"../{PLATFORM}"],
            "components": ["../../default-scheduler", "../../components/control-on-gpu-nodes"],
            "images": [
                {"name": f"set-me.invalid/{name}", "newName": name, "newTag": "1"}
                for name in ("headroom-extender", "headroom-agent", "kube-scheduler")
            ],
        }
        config = {"name": "headroom-config", "namespace": NAMESPACE, "behavior": "merge"}
        content["configMapGenerator"] = [config | {"files": ["headroom.yaml"]}]
        content["generatorOptions"] = {"disableNameSuffixHash": True}
        (mine / "headroom.yaml").write_text("mode: enforce\n")
        (mine / "kustomization.yaml").write_text(yaml.safe_dump(content))
        self.shell(f"kubectl apply --server-side -k {mine}")
        until(self.ready, "the Deployments and the agents")
        until(self.initialised, "GPUNodes that are initialised")
        until(lambda: (FILES / "ca.crt").exists(), "the files on the control plane node")
        self.found["files"] = {
            each.name: oct(each.stat().st_mode & 0o777) for each in sorted(FILES.glob("*.*"))
        }

    def configure(self) -> None:
        """Follow steps 2 and 3. Restart kube-scheduler, as a kubelet restarts a changed
        static pod.
        """
        shutil.copy(self._deploy / "default-scheduler/kube-scheduler.yaml", FILES)
        config = FILES / "kube-scheduler.yaml"
        command = [sys.executable, "-m", "headroom", "doctor", f"--scheduler-config={config}"]
        shown = subprocess.run(command, capture_output=True, text=True, check=False)
        self.found["doctor"] = [shown.returncode, *(shown.stdout + shown.stderr).splitlines()]
        self.plane.write_kubeconfig(
            KUBERNETES / "scheduler.conf", {"token": "scheduler-of-the-tests"}
        )
        self.plane.kill("default-scheduler")
        start_default_scheduler(self.plane, config, *scheduler_flags("kube-scheduler"))

    def place(self) -> None:
        """Follow step 4 until the GPUs are full."""
        self.workloads.start()
        room = 2 * len(self.machines) * 3
        for number in range(room + 1):
            self.workloads.create(f"pod-{number}", 7)
        bound, rejections = self.workloads.bound, self.workloads.rejections
        until(lambda: len(bound()) == room, f"{room} bound pods")
        until(lambda: any(each.startswith("0/") for each in rejections()), "a pod that waits")
        self.found["rejections"] = rejections()
        self.found["schedulers"] = sorted(
            {pod["spec"]["schedulerName"] for pod in self.workloads.all()}
        )
        self.found["reserved"] = sum(bool(placement(pod)) for pod in bound())

    def lose_an_extender(self) -> None:
        """Delete an extender and check that the Service address leads to the other extender."""
        gone = self.ours("extender")[0]["metadata"]["name"]
        path = f"/api/v1/namespaces/{NAMESPACE}/pods/{gone}"
        self.plane.call("DELETE", path, {"gracePeriodSeconds": 0})
        before = names(self.workloads.bound())
        self.workloads.delete(min(before))
        took_s = until(lambda: names(self.workloads.bound()) - before, "another pod is bound")
        self.found["bound_after_an_extender_was_lost_s"] = round(took_s, 1)


def own_etc(folder: Path) -> None:
    """Mount an overlay over /etc, so that written files do not leave this mount namespace."""
    for each in ("upper", "work"):
        (folder / each).mkdir(parents=True)
    layers = f"lowerdir=/etc,upperdir={folder}/upper,workdir={folder}/work"
    network.run("mount", "-t", "overlay", "overlay", "-o", layers, "/etc")
    FILES.mkdir(parents=True, exist_ok=True)


def make_control_plane_node(plane: ControlPlane, machines: Sequence[Machine]) -> None:
    first, *_ = machines
    labels: dict[str, Any] = {"metadata": {"labels": {ROLE: ""}}}
    plane.call("PATCH", f"/api/v1/nodes/{first.name}", labels)


def main() -> None:
    if not shutil.which("nft"):
        raise SystemExit("needs nft on PATH, for kube-proxy: install the package nftables")
    network.alone()
    network.build()
    # Add a route, because the kernel handles Service addresses only if a route exists, such as a
    # host's default route.
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
