"""Checks that the later bind is declined and retried if two schedulers choose the same node."""

from typing import Any

from headroom.contract.reasons import Reason
from tests.e2e.cluster import PODS, pod_manifest
from tests.e2e.conftest import NewCluster
from tests.loopback import LOOPBACK


def with_cpus(name: str, vram: str | None, **spec: Any) -> dict[str, Any]:
    """Return a pod that requests 100 of the node's 128 CPUs."""
    manifest = pod_manifest(vram, gpus=int(vram is not None))
    manifest["metadata"]["name"] = name
    manifest["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "100"
    manifest["spec"] |= spec
    return manifest


def test_a_bind_to_a_node_that_another_scheduler_has_filled_is_declined(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(1)
    url = cluster.start_extender()
    cluster.settle()
    (node,) = cluster.names
    pod = cluster.plane.call("POST", PODS, with_cpus("gpu", "8Gi"))["metadata"]
    # This pod is bound after kube-scheduler has chosen the node for the other pod.
    other = with_cpus("other", None, schedulerName="default-scheduler", nodeName=node)
    cluster.plane.call("POST", PODS, other)
    body = {
        "PodName": "gpu",
        "PodNamespace": pod["namespace"],
        "PodUID": pod["uid"],
        "Node": node,
    }
    declined = LOOPBACK.post(f"{url}/bind", json=body)
    assert declined.json() == {"Error": Reason.NODE_FILLED.sentence}
    assert not cluster.node_of("gpu")
    assert not cluster.gpunode(node).spec.reservations
    cluster.delete_by_force("other")
    # kube-scheduler retries the pod.
    cluster.until(
        lambda: LOOPBACK.post(f"{url}/bind", json=body).json() == {"Error": ""}, "it is bound"
    )
    assert cluster.node_of("gpu") == node
    assert set(cluster.gpunode(node).spec.reservations) == {pod["uid"]}
