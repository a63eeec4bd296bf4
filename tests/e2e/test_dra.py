"""Tests extended resources that DRA serves (KEP-5004), with a real kube-scheduler and API server.

Node ``gpu-1`` has a device plugin. Node ``gpu-2`` has a ResourceSlice with the GPU that its agent
reports. No DRA driver runs, because only kube-scheduler allocates devices.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from tests.controlplane import ControlPlane, built, scheduler_configuration
from tests.e2e.cluster import NAMESPACE, PlayedCluster
from tests.e2e.nodes import GIB, RESOURCE, Shape
from tests.kubernetes_version import not_newer
from tests.loopback import LOOPBACK
from tests.waiting import until

pytestmark = pytest.mark.since("1.36")

DRIVER = "gpu.nvidia.com"
IMPLICIT = f"deviceclass.resource.kubernetes.io/{DRIVER}"
DRA = "/apis/resource.k8s.io/v1"
CLAIMS = f"{DRA}/namespaces/{NAMESPACE}/resourceclaims"
PLUGIN_NODE, DRA_NODE = "gpu-1", "gpu-2"
ONE_WHOLE_GPU = Shape(gpus=1, replicas=1)


class DraCluster(PlayedCluster):
    """A cluster of two nodes with one 24 GiB GPU each."""

    def __init__(self, plane: ControlPlane, shape: Shape = ONE_WHOLE_GPU) -> None:
        super().__init__(plane, 2, shape)

    def create(self) -> None:
        super().create()
        spec = {
            "extendedResourceName": RESOURCE,
            "selectors": [{"cel": {"expression": f"device.driver == '{DRIVER}'"}}],
        }
        self.plane.call(
            "POST", f"{DRA}/deviceclasses", {"metadata": {"name": DRIVER}, "spec": spec}
        )

    def bring_up(
        self, scheduler: str = "kube-scheduler", one_entry: bool = False, **settings: Any
    ) -> None:
        """Start an extender and a kube-scheduler. Then remove the device plugin of ``gpu-2``.

        With ``one_entry``, the scheduler is the cluster's default scheduler with
        ``managedResources``.
        """
        url = self.start_extender(settings=settings)
        self.start_scheduler(url, scheduler, one_entry=one_entry)
        self.settle()
        self.publish(DRA_NODE)
        self.set_allocatable(DRA_NODE, None)
        self.until(lambda: self.reason(DRA_NODE) == "dra_manages", "the extender has seen it")

    def reason(self, node: str) -> str | None:
        """Return why the node takes no pods whose memory Headroom reserves."""
        listed = LOOPBACK.get(f"{self.debug_url()}/v1/nodes").json()["nodes"]
        found: str | None = next(each["reason"] for each in listed if each["name"] == node)
        return found

    def publish(self, node: str) -> None:
        """Publish the GPU of the node in a ResourceSlice."""
        device = {"name": "gpu-0", "attributes": {"uuid": {"string": f"GPU-{node}-0"}}}
        pool = {"name": node, "generation": 1, "resourceSliceCount": 1}
        spec = {"driver": DRIVER, "nodeName": node, "pool": pool, "devices": [device]}
        body = {"metadata": {"name": f"slice-of-{node}"}, "spec": spec}
        self.plane.call("POST", f"{DRA}/resourceslices", body)

    def set_allocatable(self, node: str, count: str | None) -> None:
        """Set the number of GPUs that the node's device plugin offers. None means that the node has
        no plugin.
        """
        status = {"capacity": {RESOURCE: count}, "allocatable": {RESOURCE: count}}
        path = f"/api/v1/nodes/{node}/status"
        self.plane.call("PATCH", path, {"status": status}, "application/merge-patch+json")

    def claims(self) -> dict[str, list[str]]:
        """Return the devices in the ResourceClaim of each pod."""
        return {
            claim["metadata"]["ownerReferences"][0]["name"]: [
                result["device"] for result in claim["status"]["allocation"]["devices"]["results"]
            ]
            for claim in self.plane.call("GET", CLAIMS)["items"]
            if "allocation" in claim.get("status", {})
        }

    def placed(self, name: str) -> str:
        """Wait until the pod is bound. Return its node."""
        self.until(lambda: bool(self.node_of(name)), f"{name} is bound")
        return self.node_of(name)

    def rejected(self, name: str, why: str) -> None:
        self.until(lambda: why in self.rejection(name), f"{name} is rejected: {why}")
        assert not self.node_of(name)

    def charged(self, node: str) -> dict[str, int]:
        """Return the bytes that are reserved for each pod on the node."""
        return {
            each.name: sum(charge.total_bytes for charge in each.charges)
            for each in self.gpunode(node).spec.reservations.values()
        }

    def explain(self, name: str) -> dict[str, Any]:
        url = f"{self.debug_url()}/v1/explain?pod={NAMESPACE}/{name}"
        answer: dict[str, Any] = LOOPBACK.get(url).json()
        return answer

    def ask(self, name: str, resource: str, vram: str | None = None) -> None:
        """Create a pod that requests one unit of this resource."""
        limits = {"resources": {"limits": {resource: "1"}}}
        self.create_pod(name, vram, containers=[{"name": "main", "image": "none", **limits}])

    def close(self) -> None:
        for pod in self.pods():
            self.delete_by_force(pod["metadata"]["name"])
        for claim in self.plane.call("GET", CLAIMS)["items"]:
            path = f"{CLAIMS}/{claim['metadata']['name']}"
            # Remove the finalizer, because the controller that removes it does not run.
            self._unless(404, "PATCH", path, {"metadata": {"finalizers": None}})
            self._unless(404, "DELETE", path, {})
        for path in (f"{DRA}/resourceslices", f"{DRA}/deviceclasses"):
            self.plane.call("DELETE", path, {})
        super().close()


@pytest.fixture
def cluster(plane: ControlPlane) -> Iterator[DraCluster]:
    built("kube-scheduler")
    with contextlib.closing(DraCluster(plane)) as made:
        made.create()
        yield made


def reasons(explained: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of nodes for each reason. The result is empty until the extender has
    received the pod.
    """
    return {each["reason"]: each["nodes"] for each in explained.get("reasons", ())}


@pytest.mark.parametrize("scheduler", not_newer("kube-scheduler-1.36", "kube-scheduler"))
def test_a_pod_without_a_memory_request_uses_the_plugin_first_and_then_dra(
    cluster: DraCluster, scheduler: str
) -> None:
    cluster.bring_up(scheduler)
    cluster.create_pod("first", None)
    assert cluster.placed("first") == PLUGIN_NODE
    assert cluster.charged(PLUGIN_NODE) == {"first": 24 * GIB}
    # Pods with a memory request, even from the namespace's default, stay on nodes with a device
    # plugin.
    cluster.create_pod("amount", "4Gi")
    cluster.rejected("amount", "headroom convert --to dra")
    why = {"dra_manages": 1, "no_replica": 1}
    cluster.until(lambda: reasons(cluster.explain("amount")) == why, "why shows the reasons")
    cluster.create_pod("second", None)
    assert cluster.placed("second") == DRA_NODE
    second = cluster.pod("second")
    assert second["status"]["extendedResourceClaimStatus"]["resourceClaimName"]
    assert "headroom.gpu/placement" not in second["metadata"].get("annotations", {})
    assert cluster.claims() == {"second": ["gpu-0"]}
    # Headroom has bound the pod without a reservation. Wait, because the API server shows the
    # Binding before the extender counts it.
    binds = 'headroom_binds_total{outcome="bound"}'
    cluster.until(lambda: cluster.metric(binds) == 2, "the binds are counted")
    bound = {"verdict": "bound", "bound_to": DRA_NODE}
    cluster.until(lambda: bound.items() <= cluster.explain("second").items(), "why shows the node")
    # kube-scheduler no longer calls Headroom, because no GPU is free.
    cluster.create_pod("third", None)
    cluster.until(lambda: bool(cluster.rejection("third")), "the third pod is rejected")
    assert cluster.charged(DRA_NODE) == {}


def test_a_pending_pod_is_bound_when_a_device_class_names_the_resource(
    cluster: DraCluster,
) -> None:
    cluster.bring_up()
    path = f"{DRA}/deviceclasses/{DRIVER}"
    merge = "application/merge-patch+json"
    cluster.plane.call("PATCH", path, {"spec": {"extendedResourceName": None}}, merge)
    cluster.create_pod("first", None)
    assert cluster.placed("first") == PLUGIN_NODE
    cluster.create_pod("second", None)
    cluster.until(lambda: bool(cluster.rejection("second")), "the second pod is rejected")
    why = {"no_such_resource": 1, "no_replica": 1}
    cluster.until(lambda: reasons(cluster.explain("second")) == why, "why shows the reasons")
    cluster.plane.call("PATCH", path, {"spec": {"extendedResourceName": RESOURCE}}, merge)
    assert cluster.placed("second") == DRA_NODE


def test_namespaces_without_headroom_can_use_dra(cluster: DraCluster) -> None:
    """The rule matters because the cluster's default scheduler calls Headroom for the pods of all
    namespaces.
    """
    cluster.bring_up(one_entry=True)
    name = "without-headroom"
    labels = {"headroom.gpu/scheduler": "none"}
    body = {"metadata": {"name": name, "labels": labels}}
    cluster._unless(409, "POST", "/api/v1/namespaces", body)
    path = f"/api/v1/namespaces/{name}/pods"
    annotations = {"headroom.gpu/vram": "4Gi"}
    container = {"name": "main", "image": "none", "resources": {"limits": {RESOURCE: "1"}}}
    spec = {
        "schedulerName": "headroom",
        "nodeSelector": {"kubernetes.io/hostname": DRA_NODE},
        "containers": [container],
    }
    pod = {"metadata": {"name": "theirs", "annotations": annotations}, "spec": spec}
    cluster.plane.call("POST", path, pod)
    theirs = f"{path}/theirs"
    try:
        cluster.until(
            lambda: cluster.plane.call("GET", theirs)["spec"].get("nodeName") == DRA_NODE,
            "the pod of the other namespace is bound",
        )
        assert cluster.charged(DRA_NODE) == {}
    finally:
        cluster.plane.call("DELETE", theirs, {"gracePeriodSeconds": 0})
        claims = f"{DRA}/namespaces/{name}/resourceclaims"
        for claim in cluster.plane.call("GET", claims)["items"]:
            own = f"{claims}/{claim['metadata']['name']}"
            cluster._unless(404, "PATCH", own, {"metadata": {"finalizers": None}})
            cluster._unless(404, "DELETE", own, {})


def test_a_node_with_plugin_and_slices_is_also_closed_for_an_implicit_resource_name(
    cluster: DraCluster,
) -> None:
    """Headroom's own scheduler calls Headroom for each pod, with any name of the resource."""
    cluster.bring_up()
    cluster.ask("by-dra", IMPLICIT)
    assert cluster.placed("by-dra") == DRA_NODE
    assert cluster.charged(DRA_NODE) == {}
    cluster.publish(PLUGIN_NODE)
    cluster.until(lambda: cluster.reason(PLUGIN_NODE) == "dra_and_plugin", "the node is closed")
    closed = "offered by a device plugin and by a DRA driver"
    cluster.ask("beside", IMPLICIT)
    cluster.rejected("beside", closed)
    cluster.create_pod("amount", "4Gi")
    cluster.rejected("amount", closed)
    assert cluster.charged(PLUGIN_NODE) == {}


def test_headroom_reserves_memory_when_the_default_scheduler_allocates_an_implicit_name_by_dra(
    cluster: DraCluster,
) -> None:
    """The default scheduler calls Headroom only for ``managedResources``, which cannot contain
    implicit names.
    """
    cluster.bring_up(one_entry=True)
    cluster.ask("by-dra", IMPLICIT)
    assert cluster.placed("by-dra") == DRA_NODE
    assert cluster.charged(DRA_NODE) == {}
    assert cluster.metric('headroom_verb_duration_seconds_count{verb="filter"}') == 0
    cluster.create_pod("by-plugin", None)
    assert cluster.placed("by-plugin") == PLUGIN_NODE
    cluster.publish(PLUGIN_NODE)
    cluster.ask("beside", IMPLICIT)
    assert cluster.placed("beside") == PLUGIN_NODE
    both = {"by-plugin": 24 * GIB, "beside": 24 * GIB}
    cluster.until(lambda: cluster.charged(PLUGIN_NODE) == both, "both are charged")
    reservations = cluster.gpunode(PLUGIN_NODE).spec.reservations
    (beside,) = [each for each in reservations.values() if each.name == "beside"]
    assert beside.flags == ["adopted", "claimed"]
    cluster.until(lambda: cluster.reason(PLUGIN_NODE) == "dra_and_plugin", "the node is closed")
    cluster.delete_pod("by-plugin")
    cluster.create_pod("next", "4Gi")
    cluster.rejected("next", "offered by a device plugin and by a DRA driver")


def test_kube_scheduler_rejects_an_implicit_name_as_a_managed_resource(
    cluster: DraCluster,
) -> None:
    kubeconfig = cluster.plane.kubeconfig("scheduler-of-the-tests")
    configuration = scheduler_configuration("http://127.0.0.1:1", kubeconfig, one_entry=True)
    managed = configuration["extenders"][0]["managedResources"]
    managed.append({"name": IMPLICIT, "ignoredByScheduler": False})
    cluster.start_scheduler_as("refused", configuration)
    refusal = f'{IMPLICIT}\\": is an invalid extended resource name'
    until(lambda: refusal in cluster.plane.log("refused"), refusal)


@pytest.mark.parametrize("allocatable", [None, "0"])
def test_mode_observe_reserves_the_devices_of_the_claim(
    cluster: DraCluster, allocatable: str | None
) -> None:
    """After the end of its plugin, a resource stays in the node's allocatable with the value 0."""
    cluster.bring_up(mode="observe")
    cluster.set_allocatable(DRA_NODE, allocatable)
    selector = {"kubernetes.io/hostname": DRA_NODE}
    cluster.create_pod("annotated", "1Gi", nodeSelector=selector)
    assert cluster.placed("annotated") == DRA_NODE
    assert cluster.claims() == {"annotated": ["gpu-0"]}
    whole = {"annotated": 24 * GIB}
    cluster.until(lambda: cluster.charged(DRA_NODE) == whole, "the whole GPU is charged")
    uid = cluster.pod("annotated")["metadata"]["uid"]
    (charge,) = cluster.gpunode(DRA_NODE).spec.reservations[uid].charges
    assert charge.candidates == {f"GPU-{DRA_NODE}-0": 24 * GIB}


def test_mode_enforce_rejects_a_memory_request_on_a_node_without_a_plugin(
    cluster: DraCluster,
) -> None:
    cluster.bring_up()
    cluster.set_allocatable(DRA_NODE, "0")
    selector = {"kubernetes.io/hostname": DRA_NODE}
    cluster.create_pod("annotated", "1Gi", nodeSelector=selector)
    cluster.rejected("annotated", "allocated by DRA")
    cluster.create_pod("whole", None, nodeSelector=selector)
    assert cluster.placed("whole") == DRA_NODE
