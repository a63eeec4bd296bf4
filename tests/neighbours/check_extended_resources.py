"""Tests extended resources that DRA serves, with a real kube-scheduler, kubelet and driver
(docs/how-to/dra.md).

The driver is dra-example-driver with the name of NVIDIA's driver. It offers two whole GPUs of 80
GiB. kube-scheduler calls Headroom with the shipped configuration.
"""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import pytest

from headroom.contract.gpunode import Reservation
from tests.e2e.cluster import Cluster, pod_manifest, scheduling_message
from tests.e2e.conftest import Tell
from tests.neighbours.dra import CLAIMS, GIB, NODE, PODS, DraPlane
from tests.neighbours.dra_node import DRIVER, DraNode
from tests.waiting import until

pytestmark = pytest.mark.slow

CLASSES = "/apis/resource.k8s.io/v1/deviceclasses"
RESOURCE = "nvidia.com/gpu"


class Played:
    """The cluster of a test, with methods that create and check pods."""

    def __init__(self, plane: DraPlane, node: DraNode, cluster: Cluster) -> None:
        self.plane, self.node, self.cluster = plane, node, cluster

    def ask(self, name: str, vram: str | None = None, resource: str = RESOURCE) -> None:
        """Create a pod for Headroom's scheduler that requests one GPU."""
        manifest = pod_manifest(vram)
        manifest["metadata"]["name"] = name
        (container,) = manifest["spec"]["containers"]
        container["resources"]["limits"] = {resource: "1"}
        manifest["spec"] |= {"restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
        self.plane.call("POST", PODS, manifest)

    def run(self, name: str) -> list[str]:
        """Wait until the pod runs. Return the UUIDs of the GPUs that its container sees."""
        self.node.wait(lambda: self.node.runtime.running(name), f"{name} to run")
        container = self.node.runtime.running(name)["main"]
        return list(container.devices)

    def rejection(self, name: str) -> str:
        return scheduling_message(self.plane.call("GET", f"{PODS}/{name}"))

    def rejected(self, name: str, why: str) -> None:
        until(lambda: why in self.rejection(name), f"{name} is rejected: {why}", 60.0, 0.1)

    def claimed(self) -> dict[str, str]:
        """Return the UUID of the GPU in each pod's claim."""
        uuids = self.node.devices()
        return {
            claim["metadata"]["ownerReferences"][0]["name"]: uuids[result["device"]]
            for claim in self.plane.call("GET", CLAIMS)["items"]
            if "allocation" in claim.get("status", {})
            for result in claim["status"]["allocation"]["devices"]["results"]
        }

    def charged(self) -> dict[str, Reservation]:
        reservations = self.cluster.gpunode(NODE).spec.reservations
        return {each.name: each for each in reservations.values()}

    def uses(self, pod: str, gib: int) -> None:
        """Let the pod use ``gib`` GiB, and wait until the agent reports the use."""
        self.node.runtime.use(self.node.runtime.running(pod)["main"], gib * GIB)
        uid = self.node.uid(pod)

        def reported() -> bool:
            status = self.cluster.gpunode(NODE).status
            rows = status.pods if status else ()
            return [row.used_bytes for row in rows if row.uid == uid] == [gib * GIB]

        until(reported, f"the agent reports the use of {pod}", 60.0, 0.1, self.node.logs)


@contextlib.contextmanager
def played(**settings: Any) -> Iterator[Played]:
    if os.geteuid() != 0:
        pytest.fail("a kubelet needs root. Run as root: make neighbours")
    plane, node = DraPlane(), None
    cluster = Cluster(plane, [NODE])
    try:
        plane.start()
        plane.install_crd()
        plane.start_controller_manager()
        spec = {
            "extendedResourceName": RESOURCE,
            "selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}],
        }
        plane.call("POST", CLASSES, {"metadata": {"name": DRIVER}, "spec": spec})
        node = DraNode(plane, NODE, gpus=2, shared=False)
        node.start()
        cluster._create_roles()
        cluster.start_scheduler(cluster.start_extender(settings=settings))
        node.start_agent(plane.kubeconfig("agent-of-the-tests"), "--interval=1", "--heartbeat=30")
        cluster.settle()
        yield Played(plane, node, cluster)
    finally:
        cluster.kill_all()
        if node is not None:
            node.stop()
        plane.stop()


def test_whole_gpus_are_allocated_by_dra_in_mode_enforce(tell: Tell) -> None:
    with played() as scene:
        scene.ask("amount", "8Gi")
        scene.rejected("amount", "headroom convert --to dra")
        got = {}
        implicit = f"deviceclass.resource.kubernetes.io/{DRIVER}"
        for name, resource in (("a", RESOURCE), ("b", implicit)):
            scene.ask(name, resource=resource)
            got[name] = scene.run(name)
        assert {name: [uuid] for name, uuid in scene.claimed().items()} == got
        scene.uses("a", 30)
        assert scene.charged() == {}
        scene.ask("c")
        until(lambda: scene.rejection("c"), "no GPU is left for c", 60.0, 0.1)
        scene.plane.call("DELETE", f"{PODS}/a")
        (uuid,) = scene.run("c")
        assert [uuid] == got["a"]
        assert scene.charged() == {}
        tell("a kubelet ran pods with whole GPUs by DRA, without reservations")


def test_mode_observe_charges_the_devices_of_the_claim(tell: Tell) -> None:
    with played(mode="observe") as scene:
        scene.ask("amount", "1Gi")
        (uuid,) = scene.run("amount")
        until(lambda: "amount" in scene.charged(), "the pod is charged", 60.0, 0.1)
        held = scene.charged()["amount"]
        assert held.flags == ["adopted", "claimed"]
        (charge,) = held.charges
        assert list(charge.candidates) == [uuid]
        assert charge.candidates[uuid] > 79 * GIB
        scene.uses("amount", 30)
        scene.plane.call("DELETE", f"{PODS}/amount")
        until(lambda: not scene.charged(), "its reservation is removed", 60.0, 0.1)
        tell("mode observe charged a pod of 1 GiB the GPU of 80 GiB that its claim held")
