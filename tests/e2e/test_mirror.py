"""The in-tree mirror: what ResourceQuota and kube-scheduler make of memory that they can see."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.admission.site import ADMISSION, webhooks
from tests.certificates import Authority
from tests.controlplane import ROOT, ApiRefused, built, free_ports
from tests.e2e.cluster import NAMESPACE, PODS, RBAC, Cluster, pod_manifest, role_binding
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import GIB, Shape

MIRROR = "headroom.gpu/vram"
QUOTAS = f"/api/v1/namespaces/{NAMESPACE}/resourcequotas"
ROLE = "headroom-extender-mirror"
KCM = "kube-controller-manager"


@dataclass(frozen=True, slots=True)
class Mirrored:
    cluster: Cluster
    authority: Authority
    port: int

    def serve(self, mirror: bool) -> str:
        """Start the extender with its webhook; returns the verbs' address."""
        signed = self.authority.sign("webhook")
        settings = {
            "webhook_port": self.port,
            "webhook_tls_cert": str(signed.cert),
            "webhook_tls_key": str(signed.key),
            "mirror_vram": mirror,
        }
        return self.cluster.start_extender(settings=settings)

    def shown(self) -> tuple[str | None, str | None]:
        """Capacity and allocatable of the node."""
        status = self.cluster.plane.call("GET", "/api/v1/nodes/gpu-1")["status"]
        return status["capacity"].get(MIRROR), status["allocatable"].get(MIRROR)


@pytest.fixture
def mirrored(new_cluster: NewCluster, tmp_path: Path) -> Iterator[Mirrored]:
    """One node of two GPUs of 24 GiB, webhook and mirror on; quotas are counted."""
    cluster = new_cluster(1, Shape(gpus=2, memory_bytes=24 * GIB, replicas=8))
    plane = cluster.plane
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
    for path, body in made:
        plane.call("POST", path, body)
    plane.spawn(
        KCM,
        str(built(KCM)[KCM]),
        f"--kubeconfig={plane.kubeconfig('controllers-of-the-tests')}",
        f"--service-account-private-key-file={plane.folder / 'service-account.key'}",
        "--controllers=resourcequota-controller",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        "--secure-port=0",
    )
    url = mirrored.serve(mirror=True)
    cluster.start_scheduler(url)
    cluster.settle()
    try:
        yield mirrored
    finally:
        plane.kill(KCM)
        for path, body in made:
            plane.call("DELETE", f"{path}/{body['metadata']['name']}")


def created(cluster: Cluster, name: str, vram: str) -> str:
    """What the API server says; empty where it takes the pod."""
    manifest = pod_manifest(vram)
    manifest["metadata"]["name"] = name
    try:
        cluster.plane.call("POST", PODS, manifest)
    except ApiRefused as err:
        return str(err)
    return ""


def test_kubernetes_counts_the_memory_that_we_charge(mirrored: Mirrored) -> None:
    cluster = mirrored.cluster
    cluster.until(lambda: mirrored.shown() == ("49152", "49152"), "the node shows 48 GiB")
    quota = {"metadata": {"name": "team"}, "spec": {"hard": {f"requests.{MIRROR}": "40960"}}}
    cluster.plane.call("POST", QUOTAS, quota)
    try:
        cluster.until(lambda: used(cluster) == "0", "the quota is counted")
        assert created(cluster, "a", "20Gi") == ""
        assert created(cluster, "b", "20Gi") == ""
        said = created(cluster, "c", "10Gi")
        assert "exceeded quota: team, requested: requests.headroom.gpu/vram=10" in said
    finally:
        cluster.plane.call("DELETE", f"{QUOTAS}/team")

    # The ledger charges each of them once.
    cluster.until(lambda: all(map(cluster.node_of, ("a", "b"))), "both are bound")
    assert cluster.gpunode("gpu-1").spec.promised == "40Gi"

    # Neither on any device nor on the node: kube-scheduler says so before it asks us.
    cluster.until(lambda: created(cluster, "c", "10Gi") == "", "nothing is counted any more")
    cluster.until(lambda: bool(cluster.refusal("c")), "there is no room")
    assert cluster.refusal("c").startswith(f"0/1 nodes are available: 1 Insufficient {MIRROR}.")

    cluster.kill("extender")
    mirrored.serve(mirror=False)
    cluster.until(lambda: mirrored.shown() == (None, None), "the node shows nothing any more")


def used(cluster: Cluster) -> str | None:
    status = cluster.plane.call("GET", f"{QUOTAS}/team").get("status", {})
    amount: str | None = status.get("used", {}).get(f"requests.{MIRROR}")
    return amount
