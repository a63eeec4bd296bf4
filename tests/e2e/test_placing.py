"""Checks the messages and views that users get about bound and pending pods."""

import json
import time
from typing import Any

import pytest

from headroom.contract.annotations import FINALIZER
from headroom.contract.reasons import Reason
from tests.accounting import written
from tests.controlplane import SCHEDULER_NAME
from tests.e2e.cluster import NAMESPACE, Cluster, placement
from tests.e2e.conftest import NewCluster, Tell
from tests.e2e.nodes import GIB, Shape
from tests.kubernetes_version import SCHEDULERS
from tests.loopback import LOOPBACK


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_every_supported_scheduler_binds_and_retries_when_memory_is_freed(
    new_cluster: NewCluster, scheduler: str
) -> None:
    cluster = new_cluster(1)
    cluster.start_scheduler(cluster.start_extender(), scheduler)
    cluster.settle()
    cluster.create_pod("first", "20Gi")
    cluster.until(lambda: cluster.node_of("first") == "gpu-1", "the first pod is bound")
    pod = cluster.pod("first")
    assert placement(pod)["containers"]["main"]["bytes"] == {"GPU-gpu-1-0": 20 * GIB}
    assert pod["metadata"]["annotations"]["headroom.gpu/bytes.0"] == str(20 * GIB)
    assert set(cluster.gpunode("gpu-1").spec.reservations) == {pod["metadata"]["uid"]}
    bound = 'headroom_binds_total{outcome="bound"}'
    # Wait, because the API server shows the Binding before the extender has received its response.
    cluster.until(lambda: cluster.metric(bound) == 1, "the bind is counted")
    cluster.nodes.observe(cluster.pods())
    cluster.create_pod("second", "20Gi")
    cluster.until(lambda: bool(cluster.rejection("second")), "the second pod is rejected")
    filtered = 'headroom_verb_duration_seconds_count{verb="filter"}'
    before = cluster.metric(filtered)
    cluster.delete_pod("first")
    # The deletion makes kube-scheduler retry after a back-off, but the memory is still in use.
    cluster.until(lambda: cluster.metric(filtered) > before, "the second pod is filtered again")
    assert not cluster.node_of("second")
    cluster.nodes.observe(cluster.pods())
    cluster.until(lambda: bool(cluster.node_of("second")), "the second pod is bound")
    # Wait, because the pod may be bound before the response to the requeueing write arrives.
    requeued = 'headroom_requeues_total{outcome="requeued"}'
    cluster.until(lambda: cluster.metric(requeued) >= 1, "the wake is counted")


def test_a_new_node_gets_a_gpunode_that_is_deleted_with_the_node(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(2)
    cluster.start_extender()
    cluster.start_controller_manager()
    cluster.settle()
    gpunode = cluster.gpunode("gpu-1")
    assert gpunode.spec.initialised
    assert gpunode.metadata.finalizers == [FINALIZER]
    node = cluster.plane.call("GET", "/api/v1/nodes/gpu-1")
    (owner,) = gpunode.metadata.owner_references or ()
    assert (owner.kind, owner.name, owner.uid) == ("Node", "gpu-1", node["metadata"]["uid"])
    cluster.plane.call("DELETE", "/api/v1/nodes/gpu-1")
    cluster.until(lambda: [n.name for n in cluster.gpunodes()] == ["gpu-2"], "its GPUNode is gone")


def test_a_pod_is_bound_to_the_node_with_enough_free_memory(new_cluster: NewCluster) -> None:
    cluster = new_cluster(2)
    cluster.bring_up()
    cluster.create_pod("first", "20Gi")
    cluster.until(lambda: bool(cluster.node_of("first")), "the first pod is bound")
    cluster.create_pod("second", "20Gi")
    cluster.until(lambda: bool(cluster.node_of("second")), "the second pod is bound")
    cluster.create_pod("third", "4Gi")
    cluster.until(lambda: bool(cluster.node_of("third")), "the third pod is bound")
    assert {cluster.node_of("first"), cluster.node_of("second")} == {"gpu-1", "gpu-2"}
    cluster.create_pod("fourth", "5Gi")
    cluster.until(lambda: "insufficient GPU memory" in cluster.rejection("fourth"), "it waits")

    # The extender returns its decision about each verb for the pod's name.
    debug, first = cluster.debug_url(), cluster.pod("first")
    which = json.loads(first["metadata"]["annotations"]["headroom.gpu/placement"])["decision"]
    decision = LOOPBACK.get(f"{debug}/v1/decisions/{which}").json()["decision"]
    assert (decision["filter"]["offered"], decision["filter"]["fits"]) == (2, 2)
    assert decision["prioritize"]["winner"] == cluster.node_of("first")
    assert (decision["bind"]["node"], decision["bind"]["outcome"]) == (decision["node"], "bound")
    page = LOOPBACK.get(f"{debug}/v1/decisions?uid={cluster.pod('fourth')['metadata']['uid']}")
    assert page.json()["decisions"][0]["filter"]["fits"] == 0
    status = LOOPBACK.get(f"{debug}/v1/status").json()
    assert {source["synced"] for source in status["sources"]} == {True}
    assert len(status["sources"]) > 4


@pytest.mark.parametrize(
    ("resource", "settings"),
    [
        # Other plugins can offer resources with other names, but the stock plugin ignores such
        # names in its configuration.
        ("example.com/l4", {"resources": ["example.com/*"]}),
        # This profile belongs to a GPU that is newer than the list in deploy/default-scheduler.
        ("nvidia.com/mig-9g.999gb", {}),
    ],
)
def test_any_resource_in_the_settings_is_managed(
    resource: str, settings: dict[str, Any], new_cluster: NewCluster
) -> None:
    cluster = new_cluster(1, Shape(replicas=4, resource=resource))
    url = cluster.start_extender(settings=settings)
    cluster.start_scheduler(url)
    cluster.settle()
    limits = {"resources": {"limits": {resource: "1"}}}
    containers = [{"name": "main", "image": "none", **limits}]
    for name in ("first", "second"):
        cluster.create_pod(name, "16Gi", containers=containers)
        cluster.until(
            lambda name=name: cluster.node_of(name) or cluster.rejection(name), "it is decided"
        )
    assert "headroom.gpu/placement" in cluster.pod("first")["metadata"]["annotations"]
    assert "insufficient GPU memory on any device" in cluster.rejection("second")


def test_a_pod_that_is_too_large_gets_the_reason_and_few_retries(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(20)
    cluster.bring_up()
    cluster.create_pod("large", "25Gi")
    cluster.until(lambda: bool(cluster.rejection("large")), "the pod is rejected")
    assert filter_calls(cluster) >= 1
    # The rest of the message differs between versions of kube-scheduler.
    reported = "0/20 nodes are available: 20 insufficient GPU memory on any device."
    assert cluster.rejection("large").startswith(reported)
    # kube-scheduler reports the constant reason, and Headroom adds the numbers.
    numbers = (
        "The pod needs 25.0 GiB, larger than any GPU that it may use (24.0 GiB). "
        "More: kubectl headroom why -n e2e large"
    )
    saying = {("FailedScheduling", SCHEDULER_NAME): reported, ("NoGPUFits", "headroom"): numbers}

    def shown() -> set[tuple[str, str]]:
        found = set()
        for event in described_events(cluster, "large"):
            kind, reason, _, source, message = event.split(maxsplit=4)
            found.add((reason, source))
            assert kind == "Warning"
            assert message.startswith(saying[reason, source])
        return found

    cluster.until(lambda: shown() == saying.keys(), "both events are shown")
    written = 'headroom_events_total{outcome="written",reason="NoGPUFits"}'
    cluster.until(lambda: cluster.metric(written) == 1, "the event is counted")
    asked = filter_calls(cluster)
    time.sleep(10.0)
    assert filter_calls(cluster) <= asked + 1


def test_pods_of_headrooms_scheduler_wait_while_the_extender_is_down(
    new_cluster: NewCluster,
) -> None:
    """Pods without a GPU wait too. Pods of other schedulers do not wait (test_schedulers)."""
    cluster = new_cluster(1)
    cluster.bring_up()
    cluster.kill("extender")
    cluster.create_pod("gpu", "1Gi")
    cluster.create_pod("plain", None, gpus=0)
    for name in ("gpu", "plain"):
        cluster.until(
            lambda name=name: "connection refused" in cluster.rejection(name), f"{name} waits"
        )
    cluster.start_extender()
    for name in ("gpu", "plain"):
        cluster.until(lambda name=name: bool(cluster.node_of(name)), f"{name} is bound")
    assert "annotations" not in cluster.pod("plain")["metadata"]


def test_a_force_deleted_pod_keeps_its_reservation_until_a_later_sample_does_not_show_it(
    new_cluster: NewCluster,
) -> None:
    cluster = new_cluster(1)
    cluster.bring_up()
    cluster.create_pod("first", "20Gi")
    cluster.until(lambda: bool(cluster.node_of("first")), "the first pod is bound")
    uid = cluster.pod("first")["metadata"]["uid"]
    cluster.delete_by_force("first")  # The pod may be starting, because no sample has shown it yet.
    cluster.create_pod("second", "20Gi")
    cluster.until(lambda: bool(cluster.rejection("second")), "the second pod is rejected")

    def noted() -> bool:
        lines = cluster.plane.log("extender").splitlines()
        return any(uid in line and "reservation_waits_for_sample" in line for line in lines)

    cluster.until(noted, "its removal is noted")
    cluster.nodes.beat(["gpu-1"])  # This sample may be older than the deletion.
    reserved = lambda: cluster.gpunode("gpu-1").spec.reservations  # noqa: E731
    # Another scheduler binds two pods, one after another. Each time the new pod is adopted, the
    # other pods of the node are checked.
    late = []
    for name in ("late-1", "late-2"):
        cluster.create_pod(name, "1Gi", nodeName="gpu-1")
        late.append(cluster.pod(name)["metadata"]["uid"])
        cluster.until(lambda: late[-1] in reserved(), f"{name} is charged")
    assert uid in reserved()
    assert not cluster.node_of("second")
    cluster.nodes.beat(["gpu-1"])
    cluster.until(lambda: bool(cluster.node_of("second")), "the second pod is bound")
    assert set(reserved()) == {*late, cluster.pod("second")["metadata"]["uid"]}


@pytest.mark.since("1.34")
def test_gpus_that_a_dra_driver_also_offers_are_left_to_the_driver(new_cluster: NewCluster) -> None:
    cluster = new_cluster(1)
    cluster.bring_up()
    slices = "/apis/resource.k8s.io/v1/resourceslices"
    spec = {
        "driver": "gpu.nvidia.com",
        "nodeName": "gpu-1",
        "pool": {"name": "gpu-1", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "gpu-0"}],
    }
    cluster.plane.call("POST", slices, {"metadata": {"name": "gpu-1-gpus"}, "spec": spec})
    try:
        cluster.until(lambda: node_reason(cluster) == "dra_and_plugin", "the slice is seen")
        cluster.create_pod("p", "8Gi")
        cluster.until(lambda: bool(cluster.rejection("p")), "the pod is rejected")
        assert cluster.rejection("p").startswith(
            f"0/1 nodes are available: 1 {Reason.DRA_AND_PLUGIN.sentence}."
        )
    finally:
        cluster.plane.call("DELETE", f"{slices}/gpu-1-gpus")
    cluster.until(lambda: cluster.node_of("p") == "gpu-1", "the pod is bound")


@pytest.mark.since("1.34")
def test_a_pod_that_requests_only_a_claim_is_bound_when_the_claim_is_allocated(
    new_cluster: NewCluster,
) -> None:
    """kube-scheduler calls the extender for such a pod, as for every pod of Headroom's
    scheduler.
    """
    cluster = new_cluster(2)
    cluster.bring_up()
    call, resources = cluster.plane.call, "/apis/resource.k8s.io/v1"
    claims = f"{resources}/namespaces/{NAMESPACE}/resourceclaims"
    driver = "nic.example.com"
    spec = {
        "driver": driver,
        "nodeName": "gpu-2",
        "pool": {"name": "gpu-2", "generation": 1, "resourceSliceCount": 1},
        "devices": [{"name": "nic-0"}],
    }
    request = {"name": "nic", "exactly": {"deviceClassName": driver}}
    claim = {"metadata": {"name": "nic"}, "spec": {"devices": {"requests": [request]}}}
    created = {
        f"{resources}/resourceslices": {"metadata": {"name": "gpu-2-nics"}, "spec": spec},
        f"{resources}/deviceclasses": {"metadata": {"name": driver}, "spec": {}},
        claims: claim,
    }
    for path, body in created.items():
        call("POST", path, body)
    try:
        used = [{"name": "nic", "resourceClaimName": "nic"}]
        cluster.create_pod("claims", None, gpus=0, resourceClaims=used)
        cluster.until(lambda: cluster.node_of("claims") == "gpu-2", "the pod is bound")
        allocated = call("GET", f"{claims}/nic")["status"]["allocation"]["devices"]["results"]
        assert [each["device"] for each in allocated] == ["nic-0"]
        bound = 'headroom_binds_total{outcome="bound"}'
        cluster.until(lambda: cluster.metric(bound) == 1, "the bind is counted")
        assert not cluster.gpunode("gpu-2").spec.reservations
    finally:
        cluster.delete_by_force("claims")
        merge = "application/merge-patch+json"
        call("PATCH", f"{claims}/nic", {"metadata": {"finalizers": None}}, merge)
        for path, body in created.items():
            call("DELETE", f"{path}/{body['metadata']['name']}")


def node_reason(cluster: Cluster) -> str | None:
    """Return the reason in the debug API why the first node takes no pods."""
    answer = LOOPBACK.get(f"{cluster.debug_url()}/v1/nodes")
    reason: str | None = answer.json()["nodes"][0]["reason"]
    return reason


def filter_calls(cluster: Cluster) -> float:
    return cluster.metric('headroom_verb_duration_seconds_count{verb="filter"}')


def described_events(cluster: Cluster, pod: str) -> list[str]:
    """Return the Events that ``kubectl describe pod`` shows, without the heading."""
    text = cluster.plane.kubectl("describe", "pod", "--namespace=e2e", pod)
    return text.partition("\nEvents:\n")[2].splitlines()[2:]


def holders(cluster: Cluster, node: str) -> list[str]:
    """Return the pods that hold memory on the node's devices in the extender's state."""
    answer = LOOPBACK.get(f"{cluster.debug_url()}/v1/nodes/{node}").json()
    devices = answer["node"]["devices"]
    return [holder["name"] for device in devices for holder in device["holders"]]


def test_a_pod_causes_few_writes_from_creation_to_end(new_cluster: NewCluster, tell: Tell) -> None:
    """Count the writes of all clients in the API server's metrics."""
    cluster = new_cluster(1)
    cluster.bring_up()
    before = written(cluster.plane)
    lives = 5
    for number in range(lives):
        name = f"p{number}"
        cluster.create_pod(name, "20Gi")
        cluster.until(lambda name=name: bool(cluster.node_of(name)), "the pod is bound")
        cluster.nodes.observe(cluster.pods())
        cluster.delete_pod(name)
        cluster.nodes.observe(cluster.pods())
        cluster.until(lambda: not cluster.gpunode("gpu-1").spec.reservations, "it is forgotten")
        cluster.until(lambda: not holders(cluster, "gpu-1"), "the extender has seen that")
    count = written(cluster.plane) - before
    ours = ("PATCH gpunodes", "POST pods/binding", "PATCH pods", "PATCH gpunodes/status")
    tell(", ".join(f"{count[what] / lives:.1f} {what}" for what in ours) + " for each pod")
    assert count["POST pods/binding"] == lives
    # The reservation and its removal are one write each, and each lost race adds a write.
    assert 2 * lives <= count["PATCH gpunodes"] <= 3 * lives
    # The agent reports the pod once when it appears and once when it is deleted.
    assert count["PATCH gpunodes/status"] <= 2 * lives
    assert count["PATCH pods"] == 0
