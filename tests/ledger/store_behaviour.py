"""Tests the behavior that the bind protocol requires of every store.

A test module derives from ``StoreBehaviour`` and provides the fixture ``stage``, which has a store
and the actions of users and agents. The tests run on the in-memory store (test_embedded.py), on the
store of the model checker, and on the real API server (test_kubernetes_store.py).
"""

import threading
from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import pytest

from extender.ledger.store import Binding, Store
from headroom.contract.annotations import TOUCHED
from headroom.contract.gpunode import Charge, GPUNode, GPUNodeSpec, GPUNodeStatus, Reservation
from headroom.contract.kube import ObjectMeta, Pod
from headroom.errors import StoreConflict, StoreError, StoreNotFound, StoreRejected


class Stage(Protocol):
    """A store and the actions of other clients."""

    @property
    def store(self) -> Store: ...

    def new_name(self) -> str: ...

    def new_pod(self, name: str, annotations: Mapping[str, str]) -> Pod:
        """Create a pod as a user does."""

    def delete_pod(self, pod: Pod) -> None: ...

    def delete_gpunode(self, name: str) -> None: ...


def binding(pod: Pod, **changes: Any) -> Binding:
    values = {
        "namespace": pod.metadata.namespace,
        "name": pod.metadata.name,
        "uid": pod.metadata.uid,
        "resource_version": pod.metadata.resource_version,
        "node": "node-a",
        "annotations": {"headroom.gpu/placement": "{}"},
    }
    return Binding(**(values | changes))


def reservation(attempt: str) -> Reservation:
    charge = Charge(resource="nvidia.com/gpu", count=1, candidates={"GPU-0": 5})
    return Reservation(namespace="a", name="p", charges=[charge], attempt=attempt)


def reserving(attempt: str, uid: str = "uid-1") -> GPUNodeSpec:
    return GPUNodeSpec(initialised=True, reservations={uid: reservation(attempt)})


class StoreBehaviour:
    """The tests for every store. Subclasses define the fixture ``stage``."""

    def new_gpunode(self, stage: Stage) -> GPUNode:
        return stage.store.create_gpunode(GPUNode(metadata=ObjectMeta(name=stage.new_name())))

    def test_an_absent_gpunode_is_none(self, stage: Stage) -> None:
        assert stage.store.read_gpunode("nobody") is None

    def test_a_created_gpunode_can_be_read_and_has_no_status(self, stage: Stage) -> None:
        forged = GPUNode(
            metadata=ObjectMeta(name=stage.new_name(), finalizers=["headroom.gpu/ledger"]),
            spec=reserving("1"),
            status=GPUNodeStatus(agent_version="forged"),
        )
        created = stage.store.create_gpunode(forged)
        assert (created.spec, created.status) == (forged.spec, None)
        assert created.metadata.finalizers == ["headroom.gpu/ledger"]
        assert created.metadata.uid
        assert created.metadata.resource_version
        assert stage.store.read_gpunode(created.name) == created

    def test_creating_a_gpunode_twice_is_a_conflict(self, stage: Stage) -> None:
        created = self.new_gpunode(stage)
        with pytest.raises(StoreConflict):
            stage.store.create_gpunode(GPUNode(metadata=ObjectMeta(name=created.name)))
        assert stage.store.read_gpunode(created.name) == created

    def test_the_first_of_two_writes_to_one_version_wins(self, stage: Stage) -> None:
        before = self.new_gpunode(stage)
        won = stage.store.write_spec(before, reserving("1"))
        assert won.spec == reserving("1")
        assert won.metadata.resource_version != before.metadata.resource_version
        with pytest.raises(StoreConflict):
            stage.store.write_spec(before, reserving("2"))
        assert stage.store.read_gpunode(before.name) == won

    def test_an_unchanged_write_keeps_the_version(self, stage: Stage) -> None:
        """Because of this behavior, every attempt writes a unique ID."""
        before = stage.store.write_spec(self.new_gpunode(stage), reserving("1"))
        again = stage.store.write_spec(before, reserving("1"))
        assert again.metadata.resource_version == before.metadata.resource_version
        assert stage.store.write_spec(before, reserving("2")).spec == reserving("2")

    def test_writing_a_deleted_gpunode_is_not_found(self, stage: Stage) -> None:
        before = self.new_gpunode(stage)
        stage.delete_gpunode(before.name)
        assert stage.store.read_gpunode(before.name) is None
        with pytest.raises(StoreNotFound):
            stage.store.write_spec(before, reserving("1"))

    def test_a_recreated_gpunode_is_not_overwritten(self, stage: Stage) -> None:
        before = self.new_gpunode(stage)
        stage.delete_gpunode(before.name)
        anew = stage.store.create_gpunode(GPUNode(metadata=ObjectMeta(name=before.name)))
        assert anew.metadata.uid != before.metadata.uid
        with pytest.raises(StoreConflict):
            stage.store.write_spec(before, reserving("1"))
        assert stage.store.read_gpunode(before.name) == anew

    def test_one_of_several_concurrent_writers_wins_each_version(self, stage: Stage) -> None:
        name, writers, rounds = self.new_gpunode(stage).name, 4, 5
        together = threading.Barrier(writers)

        def write(me: int) -> None:
            together.wait()
            for turn in range(rounds):
                while True:
                    before = stage.store.read_gpunode(name)
                    assert before is not None
                    uid = f"{me}.{turn}"
                    reservations = before.spec.reservations | {uid: reservation(uid)}
                    try:
                        stage.store.write_spec(before, GPUNodeSpec(reservations=reservations))
                    except StoreConflict:
                        continue
                    break

        run_together(writers, write)
        after = stage.store.read_gpunode(name)
        assert after is not None
        written = {f"{me}.{turn}" for me in range(writers) for turn in range(rounds)}
        assert after.spec.reservations.keys() == written

    def new_pod(self, stage: Stage, **annotations: str) -> Pod:
        return stage.new_pod(stage.new_name(), annotations)

    def again(self, stage: Stage, pod: Pod) -> Pod:
        found = stage.store.read_pod(pod.metadata.namespace, pod.metadata.name)
        assert found is not None
        return found

    def test_a_pod_is_read_and_listed(self, stage: Stage) -> None:
        pod = self.new_pod(stage, **{"headroom.gpu/vram": "8Gi"})
        assert self.again(stage, pod).annotation("headroom.gpu/vram") == "8Gi"
        waits = self.new_pod(stage)
        stage.store.bind(binding(pod))
        listed = {pod.metadata.uid: pod.node for pod in stage.store.list_pods()}
        assert listed[pod.metadata.uid] == "node-a"
        there = {each.metadata.uid for each in stage.store.list_pods("node-a")}
        unbound = {each.metadata.uid for each in stage.store.list_pods("")}
        assert pod.metadata.uid in there
        assert waits.metadata.uid in unbound
        assert there == {uid for uid, node in listed.items() if node == "node-a"}
        assert unbound == {uid for uid, node in listed.items() if not node}
        stage.delete_pod(pod)
        assert stage.store.read_pod(pod.metadata.namespace, pod.metadata.name) is None
        assert pod.metadata.uid not in {pod.metadata.uid for pod in stage.store.list_pods()}

    def test_annotations_are_written_with_the_binding(self, stage: Stage) -> None:
        pod = self.new_pod(stage, **{"headroom.gpu/vram": "8Gi", "headroom.gpu/placement": "old"})
        stage.store.bind(binding(pod))
        bound = self.again(stage, pod)
        assert bound.node == "node-a"
        assert bound.annotation("headroom.gpu/vram") == "8Gi"
        assert bound.annotation("headroom.gpu/placement") == "{}"

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param({"uid": "00000000-0000-0000-0000-000000000000"}, id="another uid"),
            pytest.param({"resource_version": "1"}, id="an older version"),
            pytest.param({"resource_version": ""}, id="no version"),
        ],
    )
    def test_a_binding_with_wrong_preconditions_fails(
        self, stage: Stage, change: dict[str, str]
    ) -> None:
        pod = self.new_pod(stage)
        with pytest.raises(StoreError):
            stage.store.bind(binding(pod, **change))
        assert self.again(stage, pod).node == ""

    def test_a_bound_pod_is_not_bound_again_even_to_the_same_node(self, stage: Stage) -> None:
        pod = self.new_pod(stage)
        stage.store.bind(binding(pod))
        bound = self.again(stage, pod)
        with pytest.raises(StoreConflict, match="already assigned to node"):
            stage.store.bind(binding(bound, annotations={"headroom.gpu/placement": "second"}))
        assert self.again(stage, pod) == bound

    def test_a_missing_pod_is_neither_bound_nor_touched(self, stage: Stage) -> None:
        pod = self.new_pod(stage)
        stage.delete_pod(pod)
        with pytest.raises(StoreNotFound):
            stage.store.bind(binding(pod))
        with pytest.raises(StoreNotFound):
            stage.store.touch_pod(pod, "1")

    def test_a_touch_makes_a_binding_to_the_older_version_fail(self, stage: Stage) -> None:
        pod = self.new_pod(stage)
        touched = stage.store.touch_pod(pod, "1")
        assert touched.annotation(TOUCHED) == "1"
        with pytest.raises(StoreConflict):
            stage.store.bind(binding(pod))
        stage.store.bind(binding(touched))
        assert self.again(stage, pod).node == "node-a"

    def test_a_touch_of_an_older_version_is_a_conflict(self, stage: Stage) -> None:
        pod = self.new_pod(stage)
        stage.store.touch_pod(pod, "1")
        with pytest.raises(StoreConflict):
            stage.store.touch_pod(pod, "2")
        assert self.again(stage, pod).annotation(TOUCHED) == "1"

    def test_a_new_pod_with_the_same_name_is_neither_bound_nor_touched(self, stage: Stage) -> None:
        pod = self.new_pod(stage)
        stage.delete_pod(pod)
        heir = stage.new_pod(pod.metadata.name, {})
        version = heir.metadata.resource_version
        forged = msgspec.structs.replace(pod.metadata, resource_version=version)
        with pytest.raises(StoreConflict):
            stage.store.touch_pod(pod, "1")
        # This cannot happen in a cluster, because a version is never used twice. The API server
        # would also reject the changed UID, because the field is immutable.
        with pytest.raises((StoreConflict, StoreRejected)):
            stage.store.touch_pod(msgspec.structs.replace(pod, metadata=forged), "1")
        with pytest.raises(StoreConflict):
            stage.store.bind(binding(pod, resource_version=version))
        assert self.again(stage, heir) == heir


def run_together(count: int, work: Any) -> None:
    """Run ``work(i)`` on ``count`` threads, and re-raise an exception of any thread."""
    failed: list[BaseException] = []

    def guarded(i: int) -> None:
        try:
            work(i)
        except BaseException as err:  # noqa: BLE001 - raised again below, in the test's thread
            failed.append(err)

    threads = [threading.Thread(target=guarded, args=(i,)) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failed:
        raise failed[0]
