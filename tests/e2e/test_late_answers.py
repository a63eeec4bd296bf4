"""Deletes and recreates a node before the API server answers a write of the old GPUNode."""

import asyncio
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import httpx
from aiohttp import web

from tests.controlplane import ControlPlane
from tests.e2e.cluster import GPUNODES, NODES, PlayedCluster
from tests.e2e.conftest import NewCluster
from tests.e2e.nodes import node_manifest, node_status
from tests.reverse_proxy import Proxies, Service, Wire


class LateWrites(Service):
    """Holds back the responses to writes of GPUNodes while ``holds`` is set. Watches are not
    delayed.
    """

    def __init__(self, wires: Mapping[str, Wire]) -> None:
        super().__init__(wires)
        self.holds = False
        self.held = 0

    async def part_passes(self, request: web.Request, wire: Wire, part: bytes) -> None:
        if self.holds and request.method == "PATCH" and request.path.startswith(GPUNODES):
            self.held += 1
            while self.holds:  # noqa: ASYNC110 - set by another thread
                await asyncio.sleep(0.01)


@contextmanager
def late_writes(plane: ControlPlane) -> Iterator[LateWrites]:
    proxies = Proxies(plane.certificate)
    try:
        service = LateWrites({plane.url: Wire()})
        proxies.serve(service, tls=True)
        yield service
    finally:
        proxies.stop()


def nodes_of_the_extender(cluster: PlayedCluster) -> set[str]:
    body = httpx.get(f"{cluster.debug_url()}/v1/nodes").raise_for_status().json()
    return {node["name"] for node in body["nodes"]}


def test_a_recreated_node_takes_pods_after_a_late_response_about_the_old_gpunode(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(2)
    plane, (name, _) = cluster.plane, cluster.names
    with late_writes(plane) as proxy:
        cluster.start_scheduler(cluster.start_extender(api_port=proxy.port))
        cluster.settle()
        selector = {"kubernetes.io/hostname": name}
        cluster.create_pod("first", "4Gi", nodeSelector=selector)
        cluster.until(lambda: cluster.node_of("first") == name, "the first pod is bound")
        cluster.nodes.observe(cluster.pods())
        old = cluster.gpunode(name).metadata.uid

        # The extender removes the reservation of the deleted pod and waits for the response.
        proxy.holds = True
        cluster.delete_pod("first")
        cluster.nodes.observe(cluster.pods())
        cluster.until(lambda: proxy.held > 0, "an answer is held back")
        assert not cluster.gpunode(name).spec.reservations
        # Create the node first, because an extender creates a node's missing GPUNode.
        plane.call("DELETE", f"{NODES}/{name}")
        plane.call("PATCH", f"{GPUNODES}/{name}", {"metadata": {"finalizers": None}})
        plane.call("DELETE", f"{GPUNODES}/{name}")
        cluster.until(
            lambda: name not in nodes_of_the_extender(cluster),
            "the watches have reported the deletions",
        )
        proxy.holds = False

        made = plane.call("POST", NODES, node_manifest(name) | node_status(cluster.nodes.shape))
        if "taints" in made["spec"]:
            plane.call("PATCH", f"{NODES}/{name}", {"spec": {"taints": None}})
        cluster.settle()
        assert cluster.gpunode(name).metadata.uid != old
        cluster.create_pod("second", "4Gi", nodeSelector=selector)
        cluster.until(lambda: cluster.node_of("second") == name, "the second pod is bound")
