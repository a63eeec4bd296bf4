"""Tests the store on a real API server, and on a server with scripted faults."""

import dataclasses
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal

import msgspec
import pytest

from headroom.contract.annotations import FINALIZER, TOUCHED
from headroom.contract.gpunode import Device, GPUNode, GPUNodeSpec, GPUNodeStatus, Reservation
from headroom.contract.kube import ObjectMeta, Pod
from headroom.core.rules.bound_pods import BoundPod, bound_demands
from headroom.errors import (
    OutcomeUnknown,
    StoreConflict,
    StoreError,
    StoreNotFound,
    StoreRejected,
)
from headroom.runtime.kube.client import KubeApi
from tests.blocking import Blocking, Loop
from tests.controlplane import STRANGER_TOKEN, ControlPlane
from tests.ledger.client import over, reservation
from tests.ledger.store_behaviour import Stage, StoreBehaviour, binding
from tests.waiting import PATIENCE_S, until

NAMESPACE = "store-tests"
PODS = f"/api/v1/namespaces/{NAMESPACE}/pods"
GPUNODES = "/apis/headroom.gpu/v1alpha1/gpunodes"
_numbers = itertools.count()


@pytest.fixture(scope="module")
def api(plane: ControlPlane) -> Iterator[KubeApi]:
    plane.call("POST", "/api/v1/namespaces", {"metadata": {"name": NAMESPACE}})
    api = KubeApi(plane.configuration())
    yield api
    api.close()


@pytest.fixture
def store(loop: Loop, plane: ControlPlane, api: KubeApi) -> Blocking:
    return loop.store(plane.configuration(), api)


def new_name() -> str:
    return f"x{next(_numbers)}"


def new_pod(plane: ControlPlane, annotations: dict[str, str] | None = None, name: str = "") -> Pod:
    body = {
        "metadata": {"name": name or new_name(), "annotations": annotations or {}},
        "spec": {"containers": [{"name": "main", "image": "none"}]},
    }
    return msgspec.convert(plane.call("POST", PODS, body), Pod)


def again(store: Blocking, pod: Pod) -> Pod:
    found = store.read_pod(pod.metadata.namespace, pod.metadata.name)
    assert found is not None
    return found


class PlaneStage:
    """Acts as users and the garbage collector on the API server."""

    def __init__(self, plane: ControlPlane, store: Blocking) -> None:
        self.plane = plane
        self.store = store

    def new_name(self) -> str:
        return new_name()

    def new_pod(self, name: str, annotations: Mapping[str, str]) -> Pod:
        return new_pod(self.plane, dict(annotations), name)

    def delete_pod(self, pod: Pod) -> None:
        now = {"gracePeriodSeconds": 0}
        self.plane.call("DELETE", f"{PODS}/{pod.metadata.name}", now)

    def delete_gpunode(self, name: str) -> None:
        self.plane.call("DELETE", f"{GPUNODES}/{name}")


class TestBehaviour(StoreBehaviour):
    """Tests the behavior that every store must have."""

    @pytest.fixture
    def stage(self, plane: ControlPlane, store: Blocking) -> Stage:
        return PlaneStage(plane, store)


class TestGPUNode:
    def test_an_absent_gpunode_is_none(self, store: Blocking) -> None:
        assert store.read_gpunode("nobody") is None

    def test_creation_keeps_the_spec_and_strips_the_status(self, store: Blocking) -> None:
        name = new_name()
        spec = GPUNodeSpec(reservations={"uid-1": reservation(**{"GPU-0": 5})})
        metadata = ObjectMeta(name=name, finalizers=["headroom.gpu/ledger"], resource_version="5")
        created = store.create_gpunode(
            GPUNode(metadata=metadata, spec=spec, status=GPUNodeStatus(agent_version="forged"))
        )
        assert created.spec == spec
        assert created.status is None
        assert created.metadata.finalizers == ["headroom.gpu/ledger"]
        assert store.read_gpunode(name) == created

    def test_creating_a_gpunode_twice_raises_conflict(self, store: Blocking) -> None:
        node = GPUNode(metadata=ObjectMeta(name=new_name()))
        store.create_gpunode(node)
        with pytest.raises(StoreConflict, match=rf"create GPUNode {node.name}.*409.*AlreadyExists"):
            store.create_gpunode(node)

    def test_an_invalid_name_is_rejected(self, store: Blocking) -> None:
        with pytest.raises(StoreRejected, match="422 Invalid"):
            store.create_gpunode(GPUNode(metadata=ObjectMeta(name="Not_A_Name")))

    def test_compare_and_swap_lets_one_of_two_writers_win(self, store: Blocking) -> None:
        before = store.create_gpunode(GPUNode(metadata=ObjectMeta(name=new_name())))
        first = GPUNodeSpec(initialised=True, reservations={"uid-1": reservation()})
        won = store.write_spec(before, first)
        assert won.spec == first
        with pytest.raises(StoreConflict, match=r"write spec of GPUNode .*409"):
            store.write_spec(before, GPUNodeSpec(reservations={"uid-2": reservation()}))
        assert store.read_gpunode(before.name) == won

    def test_missing_keys_of_nested_maps_are_removed(self, store: Blocking) -> None:
        before = GPUNodeSpec(
            initialised=True,
            reserved="3Gi",
            reservations={
                "uid-1": Reservation(
                    namespace="a", name="p", attempt="1", since="2026-11-21T00:00:00Z"
                ),
                "uid-2": reservation(**{"GPU-0": 1, "GPU-1": 2}),
            },
        )
        after = GPUNodeSpec(
            reservations={
                "uid-1": Reservation(namespace="a", name="p", attempt="2"),
                "uid-3": reservation(**{"GPU-1": 2}),
            }
        )
        node = store.create_gpunode(GPUNode(metadata=ObjectMeta(name=new_name()), spec=before))
        written = store.write_spec(node, after)
        assert written.spec == after
        emptied = store.write_spec(written, GPUNodeSpec())
        assert emptied.spec == GPUNodeSpec()
        assert store.read_gpunode(node.name) == emptied

    def test_writes_remove_managed_fields(self, store: Blocking, plane: ControlPlane) -> None:
        def kept(name: str) -> bool:
            found = plane.call("GET", f"{GPUNODES}/{name}")
            return "managedFields" in found["metadata"]

        metadata = ObjectMeta(name=new_name(), finalizers=[FINALIZER])
        node = store.create_gpunode(GPUNode(metadata=metadata))
        assert kept(node.name)
        store.write_spec(node, GPUNodeSpec(initialised=True))
        assert not kept(node.name)
        # The agent's report does not reset the field either.
        path, kind = f"{GPUNODES}/{node.name}/status", "application/merge-patch+json"
        plane.call("PATCH", path, {"status": {"agentVersion": "1"}}, kind)
        assert not kept(node.name)

    def test_a_deleted_gpunode_stays_until_its_finalizer_is_removed(
        self, store: Blocking, plane: ControlPlane
    ) -> None:
        metadata = ObjectMeta(name=new_name(), finalizers=[FINALIZER])
        before = store.create_gpunode(GPUNode(metadata=metadata))
        plane.call("DELETE", f"{GPUNODES}/{before.name}")
        dying = store.read_gpunode(before.name)
        assert dying is not None
        assert dying.metadata.deletion_timestamp
        with pytest.raises(StoreConflict):
            store.remove_finalizer(before)
        store.remove_finalizer(dying)
        assert store.read_gpunode(before.name) is None

    def test_writing_the_spec_keeps_status_and_unknown_fields(
        self, store: Blocking, plane: ControlPlane
    ) -> None:
        node = store.create_gpunode(GPUNode(metadata=ObjectMeta(name=new_name())))
        path = f"{GPUNODES}/{node.name}"
        status = {"status": {"agentVersion": "1", "devices": [{"uuid": "GPU-0"}]}}
        plane.call("PATCH", f"{path}/status", status)
        found = store.read_gpunode(node.name)
        assert found is not None
        written = store.write_spec(found, GPUNodeSpec(initialised=True))
        assert written.status == GPUNodeStatus(agent_version="1", devices=[Device(uuid="GPU-0")])

    def test_an_unchanged_write_keeps_the_version_and_checks_it(self, store: Blocking) -> None:
        spec = GPUNodeSpec(initialised=True)
        first = store.create_gpunode(GPUNode(metadata=ObjectMeta(name=new_name()), spec=spec))
        second = store.write_spec(first, spec)
        assert second.metadata.resource_version == first.metadata.resource_version
        store.write_spec(second, GPUNodeSpec(reserved="1Gi", initialised=True))
        with pytest.raises(StoreConflict):
            store.write_spec(first, spec)

    def test_writing_a_missing_gpunode_is_not_found(
        self, store: Blocking, plane: ControlPlane
    ) -> None:
        node = store.create_gpunode(GPUNode(metadata=ObjectMeta(name=new_name())))
        plane.call("DELETE", f"{GPUNODES}/{node.name}")
        with pytest.raises(StoreNotFound, match=f"write spec of GPUNode {node.name}"):
            store.write_spec(node, GPUNodeSpec(initialised=True))

    def test_a_recreated_gpunode_is_not_written(self, store: Blocking, plane: ControlPlane) -> None:
        node = store.create_gpunode(GPUNode(metadata=ObjectMeta(name=new_name())))
        plane.call("DELETE", f"{GPUNODES}/{node.name}")
        anew = store.create_gpunode(GPUNode(metadata=ObjectMeta(name=node.name)))
        with pytest.raises(StoreConflict):
            store.write_spec(node, GPUNodeSpec(initialised=True))
        assert store.read_gpunode(node.name) == anew


class TestBinding:
    def test_annotations_are_written_with_the_binding(
        self, store: Blocking, api: KubeApi, plane: ControlPlane
    ) -> None:
        pod = new_pod(plane, {"headroom.gpu/vram": "8Gi", "headroom.gpu/placement": "old"})
        store.bind(binding(pod))
        wanted = {"headroom.gpu/vram": "8Gi", "headroom.gpu/placement": "{}"}
        bound = again(store, pod)
        assert (bound.node, bound.metadata.annotations) == ("node-a", wanted)
        query = {
            "watch": "true",
            "timeoutSeconds": "1",
            "fieldSelector": f"metadata.name={pod.metadata.name}",
            "resourceVersion": pod.metadata.resource_version,
        }
        body = api.call("GET", PODS, query=query)
        changes = [msgspec.convert(json.loads(line)["object"], Pod) for line in body.splitlines()]
        assert changes == [bound]

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param({"uid": "00000000-0000-0000-0000-000000000000"}, id="another uid"),
            pytest.param({"resource_version": "1"}, id="an older version"),
        ],
    )
    def test_a_failed_precondition_is_a_conflict(
        self, store: Blocking, plane: ControlPlane, change: dict[str, str]
    ) -> None:
        pod = new_pod(plane)
        with pytest.raises(StoreConflict, match=rf"bind pod {NAMESPACE}/x\d+ to node node-a.*409"):
            store.bind(binding(pod, **change))
        assert again(store, pod).node == ""

    def test_a_bound_pod_is_a_conflict_even_for_the_same_node(
        self, store: Blocking, plane: ControlPlane
    ) -> None:
        pod = new_pod(plane)
        store.bind(binding(pod))
        bound = again(store, pod)
        with pytest.raises(StoreConflict, match="already assigned to node"):
            store.bind(binding(bound, annotations={"headroom.gpu/placement": "second"}))
        assert again(store, pod) == bound

    def test_a_missing_pod_is_not_found(self, store: Blocking, plane: ControlPlane) -> None:
        pod = new_pod(plane)
        plane.call("DELETE", f"{PODS}/{pod.metadata.name}")
        with pytest.raises(StoreNotFound):
            store.bind(binding(pod))
        assert store.read_pod(NAMESPACE, pod.metadata.name) is None

    def test_a_call_without_precondition_is_rejected_locally(self, store: Blocking) -> None:
        pod = Pod(metadata=ObjectMeta(name="p", namespace=NAMESPACE, uid="u"))
        with pytest.raises(StoreRejected, match="the write would be unconditional"):
            store.bind(binding(pod))


class TestTouch:
    def test_a_touch_makes_a_binding_to_the_older_version_fail(
        self, store: Blocking, plane: ControlPlane
    ) -> None:
        pod = new_pod(plane)
        touched = store.touch_pod(pod, "attempt-1")
        assert touched.annotation(TOUCHED) == "attempt-1"
        with pytest.raises(StoreConflict):
            store.bind(binding(pod))
        store.bind(binding(touched))
        assert again(store, pod).node == "node-a"

    def test_touching_an_older_version_is_a_conflict(
        self, store: Blocking, plane: ControlPlane
    ) -> None:
        pod = new_pod(plane)
        store.touch_pod(pod, "1")
        with pytest.raises(StoreConflict, match=rf"annotate pod {NAMESPACE}/x\d+.*409"):
            store.touch_pod(pod, "2")
        assert again(store, pod).annotation(TOUCHED) == "1"

    def test_a_new_pod_with_the_same_name_is_not_touched(
        self, store: Blocking, plane: ControlPlane
    ) -> None:
        pod = new_pod(plane)
        path = f"{PODS}/{pod.metadata.name}"
        plane.call("DELETE", path)
        body = {
            "metadata": {"name": pod.metadata.name},
            "spec": {"containers": [{"name": "main", "image": "none"}]},
        }
        second = msgspec.convert(plane.call("POST", PODS, body), Pod)
        with pytest.raises(StoreConflict):
            store.touch_pod(pod, "1")
        version = second.metadata.resource_version
        forged = msgspec.structs.replace(pod.metadata, resource_version=version)
        with pytest.raises(StoreRejected, match=r"metadata\.uid"):
            store.touch_pod(msgspec.structs.replace(pod, metadata=forged), "1")
        assert again(store, second) == second

    def test_a_missing_pod_is_not_found(self, store: Blocking, plane: ControlPlane) -> None:
        pod = new_pod(plane)
        plane.call("DELETE", f"{PODS}/{pod.metadata.name}")
        with pytest.raises(StoreNotFound):
            store.touch_pod(pod, "1")


def test_pods_are_listed_completely_in_pages(api: KubeApi, plane: ControlPlane, loop: Loop) -> None:
    made = {new_pod(plane).metadata.uid for _ in range(5)}
    store = loop.store(plane.configuration(), api, page_size=2)
    listed = [pod.metadata.uid for pod in store.list_pods()]
    assert made <= set(listed)
    assert len(listed) == len(set(listed))


def test_the_pods_of_a_node_are_listed_until_they_end(
    api: KubeApi, plane: ControlPlane, loop: Loop
) -> None:
    node, requests = new_name(), {"cpu": "2", "memory": "1Gi"}
    for name, on in (("runs", node), ("ended", node), ("elsewhere", f"{node}-2")):
        container = {"name": "main", "image": "none", "resources": {"requests": requests}}
        spec = {"containers": [container], "nodeName": on}
        body = {"metadata": {"name": f"{node}-{name}"}, "spec": spec}
        plane.call("POST", PODS, body)
    ended = {"status": {"phase": "Failed"}}
    plane.call("PATCH", f"{PODS}/{node}-ended/status", ended)
    store = loop.store(plane.configuration(), api)
    (found,) = until_listed(lambda: store.list_bound(node), 1)
    assert found.metadata.name == f"{node}-runs"
    assert found.spec.scheduler_name == "default-scheduler"
    assert found.status.start_time is None
    assert bound_demands(found) == {"cpu": Decimal(2), "memory": Decimal(1 << 30)}


def until_listed(list_them: Callable[[], list[BoundPod]], number: int) -> list[BoundPod]:
    """Wait until the list has this number of pods, because it comes from the API server's cache.
    Return the list.
    """
    found: list[BoundPod] = []

    def is_complete() -> bool:
        found[:] = list_them()
        return len(found) == number

    until(is_complete, f"{number} pods are listed")
    return found


def test_the_heartbeat_version_is_read(api: KubeApi, plane: ControlPlane, loop: Loop) -> None:
    store = loop.store(plane.configuration(), api, lease_namespace=NAMESPACE)
    node = new_name()
    assert store.read_heartbeat_version(node) == ""
    leases = f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases"
    made = plane.call("POST", leases, {"metadata": {"name": node}})
    assert store.read_heartbeat_version(node) == made["metadata"]["resourceVersion"]


@pytest.mark.parametrize(
    ("token", "error", "words"),
    [
        # The result is unknown, because a token that was just rotated may be accepted a moment
        # later.
        pytest.param("nobody", OutcomeUnknown, "401 Unauthorized", id="unknown"),
        pytest.param(
            STRANGER_TOKEN, StoreRejected, "403 Forbidden: pods .* is forbidden", id="no right"
        ),
    ],
)
def test_a_user_without_rights_is_rejected(
    plane: ControlPlane, loop: Loop, token: str, error: type[StoreError], words: str
) -> None:
    pod = new_pod(plane)
    with (
        over(plane.configuration(token), loop) as store,
        pytest.raises(error, match=rf"bind pod {NAMESPACE}/x\d+ .*{words}"),
    ):
        store.bind(binding(pod))


def test_an_object_too_large_for_etcd_is_a_permanent_error(
    loop: Loop, plane: ControlPlane, api: KubeApi
) -> None:
    """The API server returns 409 for a Binding and 500 for a write of the GPUNode."""
    # A busy machine needs long for the largest objects.
    patience = {"read_timeout_s": PATIENCE_S, "total_timeout_s": PATIENCE_S}
    store = loop.store(plane.configuration(), api, **patience)
    env = [{"name": "FILLS", "value": "x" * 1_000} for _ in range(1_515)]
    containers = [{"name": "main", "image": "none", "env": env}]
    large = msgspec.convert(
        plane.call(
            "POST", PODS, {"metadata": {"name": new_name()}, "spec": {"containers": containers}}
        ),
        Pod,
    )
    annotations = {"headroom.gpu/placement": "x" * 100_000}
    with pytest.raises(StoreRejected, match=r"409 Conflict: .*request is too large"):
        store.bind(dataclasses.replace(binding(large), annotations=annotations))
    with pytest.raises(StoreRejected, match=r"500 .*request is too large"):
        store.touch_pod(large, "x" * 100_000)
    assert again(store, large).metadata.resource_version == large.metadata.resource_version
