"""Tests a ResourceQuota of GPU memory on a real API server, without the in-tree mirror."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.admission.site import counting
from tests.controlplane import ApiRefused, ControlPlane
from tests.e2e.cluster import NAMESPACE, PODS, PlayedCluster, quota_controller
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import Shape
from tests.e2e.test_cordoning import plugin
from tests.e2e.test_mirror import QUOTAS

COUNTED = "requests.headroom.gpu/vram-bytes"


@pytest.fixture
def cluster(
    plane: ControlPlane, new_cluster: NewCluster, tmp_path: Path
) -> Iterator[PlayedCluster]:
    """A cluster with a node that has one GPU, a webhook that counts memory, and the quota
    controller.
    """
    cluster = new_cluster(1, Shape())
    with counting(plane, tmp_path), quota_controller(plane):
        cluster.bring_up()
        yield cluster


def created(cluster: PlayedCluster, name: str, vram: str, **spec: Any) -> str:
    """Create the pod. Return the API server's error, or an empty string if it accepts the pod."""
    try:
        cluster.create_pod(name, vram, **spec)
    except ApiRefused as err:
        return str(err)
    return ""


def test_a_quota_counts_memory_although_no_node_offers_the_resource(cluster: PlayedCluster) -> None:
    def used() -> str | None:
        quota: dict[str, Any] = cluster.plane.call("GET", f"{QUOTAS}/gpu-memory")
        amount: str | None = quota.get("status", {}).get("used", {}).get(COUNTED)
        return amount

    quota = {"metadata": {"name": "gpu-memory"}, "spec": {"hard": {COUNTED: "12Gi"}}}
    cluster.plane.call("POST", QUOTAS, quota)
    try:
        cluster.until(lambda: used() == "0", "the quota is counted")
        # Wait, because the API server follows the quota's status with a separate watch.
        cluster.until(lambda: created(cluster, "a", "8Gi") == "", "the first pod is accepted")
        message = created(cluster, "b", "5Gi")
        assert (
            f"exceeded quota: gpu-memory, requested: {COUNTED}=5Gi, used: {COUNTED}=8Gi, "
            f"limited: {COUNTED}=12Gi"
        ) in message
        cluster.until(lambda: cluster.node_of("a") != "", "kube-scheduler ignores the resource")
        # Half of the only GPU (24 GiB) exceeds the rest of the quota.
        assert "exceeded quota" in created(cluster, "c", "50%")
        assert created(cluster, "d", "4Gi", nodeSelector={"no": "node"}) == ""
        raised = {"metadata": {"annotations": {"headroom.gpu/vram": "20Gi"}}}
        with pytest.raises(ApiRefused, match="counts as 4Gi"):
            cluster.plane.call("PATCH", f"{PODS}/d", raised)
        shown = plugin(cluster, "quota", "-n", NAMESPACE).stdout.splitlines()
        assert shown[1].split("  ")[0] == NAMESPACE
        assert shown[1].split()[1:6] == ["gpu-memory", "12.0", "GiB", "12.0", "GiB"]
    finally:
        cluster.plane.call("DELETE", f"{QUOTAS}/gpu-memory")
