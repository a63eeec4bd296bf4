"""Tests how quotas, kube-scheduler and kubelets handle mirrored memory."""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.admission.server import start_webhook
from tests.admission.site import ADMISSION, webhooks
from tests.certificates import Authority
from tests.controlplane import ROOT, ApiRefused, ControlPlane
from tests.e2e.cluster import NAMESPACE, RBAC, quota_controller, role_binding
from tests.e2e.real import RealCluster
from tests.processes import free_ports

MIRROR = "headroom.gpu/vram"
QUOTAS = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
#: The capacity and the allocatable memory of two 24 GiB GPUs, in MiB.
WHOLE = ("49152", "49152")
WEBHOOK = "mirror-webhook"


@dataclass(frozen=True, slots=True)
class Mirrored:
    cluster: RealCluster
    authority: Authority
    port: int

    def serve(self, mirror: bool, count: bool = False) -> str:
        """Start the webhook and the extender. Return the extender's URL for kube-scheduler."""
        plane = self.cluster.plane
        kubeconfig = plane.kubeconfig()
        self.stop_webhook()
        start_webhook(
            *(plane, WEBHOOK, self.authority, kubeconfig),
            port=self.port,
            mirror_vram=mirror,
            count_vram=count,
        )
        return self.cluster.start_extender(settings={"mirror_vram": mirror})

    def stop_webhook(self) -> None:
        if self.cluster.plane.runs(WEBHOOK):
            self.cluster.plane.kill(WEBHOOK)

    def shown(self) -> tuple[str | None, str | None]:
        """Return the mirrored memory in the node's capacity and allocatable."""
        (name,) = self.cluster.names
        status = self.cluster.plane.call("GET", f"/api/v1/nodes/{name}")["status"]
        return status["capacity"].get(MIRROR), status["allocatable"].get(MIRROR)

    def heartbeat(self) -> str:
        """Return the time at which the kubelet last wrote the node's status."""
        (name,) = self.cluster.names
        status = self.cluster.plane.call("GET", f"/api/v1/nodes/{name}")["status"]
        (ready,) = (each for each in status["conditions"] if each["type"] == "Ready")
        stamp: str = ready["lastHeartbeatTime"]
        return stamp


@pytest.fixture
def mirrored(plane: ControlPlane, binaries: None, tmp_path: Path) -> Iterator[Mirrored]:
    """A cluster with one real node that has two 24 GiB GPUs, and with the webhook, the mirror and
    the quota controller.
    """
    cluster = RealCluster(plane, 1, gpus=2, replicas=4)
    (port,) = free_ports(1)
    mirrored = Mirrored(cluster, Authority(tmp_path, "webhook-ca"), port)
    made: list[tuple[str, dict[str, Any]]] = []
    text = (ROOT / "deploy/components/in-tree-mirror/rbac.yaml").read_text()
    role, _ = yaml.safe_load_all(text)
    binding = role_binding(role)
    binding["subjects"][0]["name"] = "headroom-extender"
    made += [(f"{RBAC}/clusterroles", role), (f"{RBAC}/clusterrolebindings", binding)]
    for each in webhooks(f"https://127.0.0.1:{port}", mirrored.authority):
        made.append((f"{ADMISSION}/{each['kind'].lower()}s", each))
    with contextlib.ExitStack() as undo:
        undo.callback(cluster.close)
        undo.callback(mirrored.stop_webhook)
        cluster.create()
        for path, body in made:
            plane.call("POST", path, body)
            undo.callback(plane.call, "DELETE", f"{path}/{body['metadata']['name']}")
        undo.enter_context(quota_controller(plane))
        url = mirrored.serve(mirror=True)
        cluster.start_scheduler(url)
        cluster.settle()
        yield mirrored


def created(cluster: RealCluster, name: str, gib: int) -> str:
    """Create the pod. Return the API server's error, or an empty string if it accepts the pod."""
    try:
        cluster.ask(name, gib)
    except ApiRefused as err:
        return str(err)
    return ""


def test_kubernetes_counts_the_memory_that_headroom_reserves(mirrored: Mirrored) -> None:
    cluster = mirrored.cluster
    cluster.until(lambda: mirrored.shown() == WHOLE, "the node shows 48 GiB")
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {f"requests.{MIRROR}": "40960"}}}
    cluster.plane.call("POST", QUOTAS, quota)
    try:
        cluster.until(lambda: used(cluster) == "0", "the quota is counted")
        # Wait, because the API server follows the quota's status with a separate watch.
        cluster.until(lambda: created(cluster, "a", 20) == "", "the first pod is accepted")
        assert created(cluster, "b", 20) == ""
        message = created(cluster, "c", 10)
        assert "exceeded quota: team, requested: requests.headroom.gpu/vram=10" in message
    finally:
        cluster.plane.call("DELETE", f"{QUOTAS}/team")

    # Each pod counts once, and the kubelet admits both pods.
    cluster.until(lambda: len(cluster.bound()) == 2 and cluster.decided(), "both run")
    assert {pod["status"]["phase"] for pod in cluster.pods()} == {"Running"}
    (gpunode,) = cluster.gpunodes()
    assert gpunode.spec.reserved == "40.0 GiB"

    # kube-scheduler rejects the pod before it calls the extender, because the pod exceeds the
    # node's mirrored memory.
    cluster.until(lambda: created(cluster, "c", 10) == "", "nothing is counted any more")
    cluster.until(lambda: bool(cluster.rejection("c")), "it fits on no node")
    assert cluster.rejection("c").startswith(f"0/1 nodes are available: 1 Insufficient {MIRROR}.")

    # A restarted kubelet writes the status of its node again.
    (machine,) = cluster.machines.values()
    with machine.kubelet_restarts():
        received = mirrored.heartbeat()
    cluster.until(lambda: mirrored.heartbeat() != received, "it does")
    cluster.until(lambda: mirrored.shown() == WHOLE, "the node shows it again")

    cluster.kill("extender")
    mirrored.serve(mirror=False, count=True)
    cluster.until(lambda: mirrored.shown() == (None, None), "the node shows nothing any more")
    received = mirrored.heartbeat()
    cluster.until(lambda: mirrored.heartbeat() != received, "its kubelet writes its status")
    assert mirrored.shown() == (None, None)

    # Only quotas count the resource, because a kubelet ignores an extended resource that no node
    # offers.
    assert created(cluster, "d", 1) == ""
    counted = {"headroom.gpu/vram-bytes": "1Gi"}
    limits = cluster.pod("d")["spec"]["containers"][0]["resources"]["limits"]
    assert counted.items() <= limits.items()
    cluster.until(lambda: cluster.pod("d")["status"]["phase"] == "Running", "it runs")


def used(cluster: RealCluster) -> str | None:
    status = cluster.plane.call("GET", f"{QUOTAS}/team").get("status", {})
    amount: str | None = status.get("used", {}).get(f"requests.{MIRROR}")
    return amount
