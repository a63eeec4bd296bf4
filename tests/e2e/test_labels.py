"""Checks that whole GPUs of a node without an agent are used according to the node's labels."""

import contextlib

from tests.controlplane import ControlPlane
from tests.e2e.cluster import Cluster
from tests.e2e.nodes import Shape, node_manifest, node_status
from tests.loopback import LOOPBACK

NAME = "silent-1"
REASON = "no GPU report from the node"


def test_whole_gpus_of_a_node_without_an_agent_are_assigned_by_its_labels(
    plane: ControlPlane, binaries: None
) -> None:
    cluster = Cluster(plane, [NAME])
    with contextlib.closing(cluster):
        cluster.create()
        message = {"count": "2", "replicas": "1", "memory": "24576", "sharing-strategy": "none"}
        manifest = node_manifest(NAME)
        manifest["metadata"]["labels"] |= {f"nvidia.com/gpu.{k}": v for k, v in message.items()}
        plane.call("POST", "/api/v1/nodes", manifest)
        plane.call("PATCH", f"/api/v1/nodes/{NAME}", {"spec": {"taints": None}})
        status = node_status(Shape(gpus=2, replicas=1))
        plane.call("PATCH", f"/api/v1/nodes/{NAME}/status", status)
        cluster.bring_up()
        for pod, vram in (("whole", None), ("most", "20Gi")):
            cluster.create_pod(pod, vram)
            cluster.until(lambda pod=pod: cluster.node_of(pod) == NAME, f"{pod} is bound")
        assert len(cluster.gpunode(NAME).spec.reservations) == 2
        nodes = f"{cluster.debug_url()}/v1/nodes"
        (node,) = LOOPBACK.get(nodes).json()["nodes"]
        assert (
            node["unmeasured"] == "not measured, but derived from labels of GPU feature discovery"
        )
        # Share the GPUs, which the administrator has not allowed for nodes without reports.
        shared = {"nvidia.com/gpu.replicas": "8", "nvidia.com/gpu.sharing-strategy": "time-slicing"}
        patch = {"metadata": {"labels": shared}}
        plane.call("PATCH", f"/api/v1/nodes/{NAME}", patch)
        plane.call("PATCH", f"/api/v1/nodes/{NAME}/status", node_status(Shape(gpus=2)))
        # Wait, because otherwise the pod could be rejected for another reason and would keep it.
        cluster.until(lambda: REASON in LOOPBACK.get(nodes).text, "the extender has the labels")
        cluster.create_pod("part", "1Gi")
        cluster.until(
            lambda: cluster.rejection("part").startswith(f"0/1 nodes are available: 1 {REASON}."),
            "it is rejected",
        )
