"""Resizes a GPU pod in place when it has to wait for CPU, with kube-scheduler 1.37 or newer."""

import pytest

from tests.e2e.cluster import PODS
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import GIB
from tests.e2e.preempting import Kubelets, Stage, manifest_of

pytestmark = pytest.mark.since("1.37")

GATE = "InPlacePodVerticalScalingSchedulerPreemption=true"
PATCH = "application/strategic-merge-patch+json"


def test_a_deferred_resize_evicts_pods_and_keeps_the_reservation(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1)
    stage = Stage(cluster)
    stage.create_classes()
    cluster.start_scheduler(cluster.start_extender(), gates=[GATE])
    cluster.settle()
    manifest = manifest_of("resized", 20, "prod", mirrored=False)
    cluster.plane.call("POST", PODS, manifest)
    cluster.until(lambda: bool(cluster.node_of("resized")), "the pod is bound")
    (node,) = cluster.names
    resized = cluster.pod("resized")
    cluster.nodes.give(resized, 0, 20 * GIB)
    cluster.nodes.report([node])
    uid = resized["metadata"]["uid"]
    reserved = cluster.gpunode(node).spec.reservations[uid]
    other = manifest_of("other", 1, "batch", mirrored=False)
    other["spec"]["containers"][0]["resources"]["limits"] |= {"cpu": "120"}
    cluster.plane.call("POST", PODS, other)
    cluster.until(lambda: bool(cluster.node_of("other")), "the other pod is bound")
    resources = {"requests": {"cpu": "20"}, "limits": {"cpu": "20"}}
    resize = {"spec": {"containers": [{"name": "main", "resources": resources}]}}
    with Kubelets(cluster, 0.5, reports=False) as kubelets:
        cluster.plane.call("PATCH", f"{PODS}/resized/resize", resize, PATCH)
        # A kubelet writes this condition if the node has too little CPU.
        pending = {"type": "PodResizePending", "status": "True", "reason": "Deferred"}
        status = {"status": {"conditions": [pending]}}
        cluster.plane.call("PATCH", f"{PODS}/resized/status", status, PATCH)
        cluster.until(lambda: "other" in kubelets.leaving, "the other pod is evicted")
    assert cluster.node_of("resized") == node
    assert cluster.gpunode(node).spec.reservations[uid] == reserved
