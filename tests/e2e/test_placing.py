"""What users see: pods that land, pods that wait, and what they are told."""

import pytest

from tests.e2e.cluster import placement
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import GIB


@pytest.mark.parametrize(
    "scheduler", ["kube-scheduler", "kube-scheduler-1.35", "kube-scheduler-1.34"]
)
def test_every_supported_scheduler_binds_through_the_extender(
    new_cluster: NewCluster, scheduler: str
) -> None:
    cluster = new_cluster(1)
    cluster.start_scheduler(cluster.start_extender(), scheduler)
    cluster.settle()
    cluster.create_pod("p", "20Gi")
    cluster.until(lambda: cluster.node_of("p") == "gpu-1", "the pod is bound")
    pod = cluster.pod("p")
    assert placement(pod)["containers"]["main"]["bytes"] == {"GPU-gpu-1-0": 20 * GIB}
    assert pod["metadata"]["annotations"]["headroom.gpu/bytes.0"] == str(20 * GIB)
    assert set(cluster.gpunode("gpu-1").spec.reservations) == {pod["metadata"]["uid"]}
