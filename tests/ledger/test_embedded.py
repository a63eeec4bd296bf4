"""Tests the in-memory store: the behavior that every store must have, and its own behavior."""

import itertools
import threading
import time
from collections.abc import Callable, Mapping

import pytest

from extender.ledger.embedded_store import EmbeddedStore
from headroom.contract.annotations import RETRY, TOUCHED
from headroom.contract.gpunode import GPUNode, GPUNodeSpec, GPUNodeStatus
from headroom.contract.kube import ObjectMeta, Pod, PodSpec
from headroom.contract.watched import GPUNodeGone, GPUNodeSeen, PodGone, PodSeen
from headroom.core.cluster.changes import Event
from headroom.errors import OutcomeUnknown, StoreConflict, StoreNotFound
from tests.ledger.store_behaviour import Stage, StoreBehaviour, binding, reserving, run_together
from tests.waiting import PATIENCE_S


def pod(name: str = "p", uid: str = "uid-1", version: str = "100", node: str = "") -> Pod:
    metadata = ObjectMeta(namespace="a", name=name, uid=uid, resource_version=version)
    return Pod(metadata=metadata, spec=PodSpec(node_name=node or None))


class EmbeddedStage:
    """A stage whose pods have their own resource versions, like the pods that
    kube-scheduler sends.
    """

    def __init__(self) -> None:
        self.told: list[Event] = []
        self.embedded = EmbeddedStore(self.told.extend, lambda: 7.0)
        self.store = self.embedded
        self._numbers = itertools.count(100)

    def new_name(self) -> str:
        return f"x{next(self._numbers)}"

    def new_pod(self, name: str, annotations: Mapping[str, str]) -> Pod:
        number = next(self._numbers)
        metadata = ObjectMeta(
            namespace="a",
            name=name,
            uid=f"uid-{number}",
            resource_version=str(number),
            annotations=annotations,
        )
        return self.embedded.admit(Pod(metadata=metadata))

    def delete_pod(self, pod: Pod) -> None:
        self.embedded.delete_pod(pod.metadata.namespace, pod.metadata.name)

    def delete_gpunode(self, name: str) -> None:
        self.embedded.delete_gpunode(name)


class TestBehaviour(StoreBehaviour):
    @pytest.fixture
    def stage(self) -> Stage:
        return EmbeddedStage()


def test_removing_the_finalizer_of_a_changed_gpunode_is_a_conflict() -> None:
    stage = EmbeddedStage()
    before = stage.store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n")))
    after = stage.store.write_spec(before, reserving("1"))
    with pytest.raises(StoreConflict):
        stage.store.remove_finalizer(before)
    assert stage.store.read_gpunode("n") == after
    stage.store.remove_finalizer(after)
    assert stage.store.read_gpunode("n") is None
    assert stage.told[-1] == GPUNodeGone("n")


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def store(told: list[Event]) -> EmbeddedStore:
    return EmbeddedStore(told.extend, lambda: 7.0)


class TestPodsFromRequests:
    def test_a_pod_keeps_its_version(self, store: EmbeddedStore) -> None:
        """kube-scheduler binds the version that it sent to filter."""
        assert store.admit(pod(version="100")).metadata.resource_version == "100"

    def test_a_pod_without_a_version_gets_one(self, store: EmbeddedStore) -> None:
        assert store.admit(pod(version="")).metadata.resource_version
        with pytest.raises(StoreConflict):
            store.bind(binding(pod(version="")))

    def test_a_newer_version_replaces_an_older_one(self, store: EmbeddedStore) -> None:
        store.admit(pod(version="100"))
        assert store.admit(pod(version="101")).metadata.resource_version == "101"

    @pytest.mark.parametrize("shown", ["100", "101"])
    def test_an_older_version_does_not_undo_a_touch(self, store: EmbeddedStore, shown: str) -> None:
        store.admit(pod(version="100"))
        touched = store.touch_pod(store.admit(pod(version="101")), "1")
        assert store.admit(pod(version=shown)) == touched
        with pytest.raises(StoreConflict):
            store.bind(binding(pod(version=shown)))

    def test_a_bound_pod_does_not_become_unbound(self, store: EmbeddedStore) -> None:
        store.bind(binding(store.admit(pod())))
        assert store.admit(pod(version="101")).node == "node-a"

    def test_another_uid_with_the_same_name_deletes_the_old_pod(
        self, store: EmbeddedStore, told: list[Event]
    ) -> None:
        old = store.admit(pod(uid="uid-1"))
        new = store.admit(pod(uid="uid-2"))
        assert told == [PodSeen(old), PodGone("uid-1", ended=True), PodSeen(new)]

    def test_a_terminating_pod_is_not_bound(self, store: EmbeddedStore) -> None:
        metadata = ObjectMeta(
            namespace="a", name="p", uid="u", resource_version="1", deletion_timestamp="now"
        )
        with pytest.raises(StoreConflict, match="being deleted"):
            store.bind(binding(store.admit(Pod(metadata=metadata))))


class TestReports:
    def test_a_report_replaces_the_status_and_keeps_the_reservations(
        self, store: EmbeddedStore
    ) -> None:
        store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n"), spec=reserving("1")))
        store.report([("n", GPUNodeStatus(agent_version="2"))])
        reported = store.read_gpunode("n")
        assert reported is not None
        assert (reported.spec, reported.status) == (
            reserving("1"),
            GPUNodeStatus(agent_version="2"),
        )

    def test_a_report_makes_older_writes_fail(self, store: EmbeddedStore) -> None:
        before = store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n")))
        store.report([("n", GPUNodeStatus())])
        with pytest.raises(StoreConflict):
            store.write_spec(before, reserving("1"))

    def test_reports_are_all_rejected_if_one_node_is_unknown(self, store: EmbeddedStore) -> None:
        before = store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n")))
        with pytest.raises(StoreNotFound):
            store.report([("n", GPUNodeStatus()), ("nobody", GPUNodeStatus())])
        assert store.read_gpunode("n") == before


class TestWatch:
    def test_watchers_receive_each_write_once(
        self, store: EmbeddedStore, told: list[Event]
    ) -> None:
        created = store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n")))
        written = store.write_spec(created, reserving("1"))
        admitted = store.admit(pod())
        touched = store.touch_pod(admitted, "1")
        store.bind(binding(touched))
        bound = store.read_pod("a", "p")
        assert bound is not None
        store.delete_pod("a", "p")
        store.delete_gpunode("n")
        assert told == [
            GPUNodeSeen(created, 7.0),
            GPUNodeSeen(written, 7.0),
            PodSeen(admitted),
            PodSeen(touched),
            PodSeen(bound),
            PodGone("uid-1", ended=True),
            GPUNodeGone("n"),
        ]

    def test_failed_and_unchanged_writes_send_no_event(
        self, store: EmbeddedStore, told: list[Event]
    ) -> None:
        before = store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n")))
        touched = store.touch_pod(store.admit(pod()), "1")
        touched = store.touch_pod(touched, "1", RETRY)
        assert touched.annotation(RETRY) == "1"
        del told[:]
        store.write_spec(before, GPUNodeSpec())
        store.touch_pod(touched, "1")
        store.touch_pod(touched, "1", RETRY)
        store.admit(pod())
        with pytest.raises(StoreConflict):
            store.bind(binding(pod()))
        assert told == []

    def test_watchers_receive_events_in_the_order_of_writes(
        self, store: EmbeddedStore, told: list[Event]
    ) -> None:
        store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n")))

        def report(_: int) -> None:
            for _ in range(50):
                store.report([("n", GPUNodeStatus())])

        run_together(4, report)
        versions = [
            int(event.gpunode.metadata.resource_version)
            for event in told
            if isinstance(event, GPUNodeSeen)
        ]
        assert versions == list(range(1, 202))


def only(operation: str, when: str) -> Callable[[str, str], None]:
    """Return a fault that loses the message before or after this operation."""

    def fault(*at: str) -> None:
        if at == (operation, when):
            raise OutcomeUnknown(f"{operation} {when}")

    return fault


class TestFaults:
    def faulty(self, operation: str, when: str) -> EmbeddedStore:
        return EmbeddedStore(lambda events: None, lambda: 7.0, only(operation, when))

    def test_a_lost_request_changes_nothing(self) -> None:
        store = self.faulty("bind", "before")
        shown = store.admit(pod())
        with pytest.raises(OutcomeUnknown):
            store.bind(binding(shown))
        assert store.read_pod("a", "p") == shown

    def test_a_request_takes_effect_even_if_its_answer_is_lost(self) -> None:
        store = self.faulty("touch_pod", "after")
        shown = store.admit(pod())
        with pytest.raises(OutcomeUnknown):
            store.touch_pod(shown, "1")
        held = store.read_pod("a", "p")
        assert held is not None
        assert held.annotation(TOUCHED) == "1"

    def test_a_rejection_can_be_lost(self) -> None:
        store = self.faulty("bind", "after")
        store.admit(pod())
        with pytest.raises(OutcomeUnknown):
            store.bind(binding(pod(version="99")))

    def test_every_call_has_latency_outside_the_lock(self) -> None:
        """The barrier lets no call return before all calls have begun."""
        all_there = threading.Barrier(8)

        def far(operation: str, when: str) -> None:
            all_there.wait(PATIENCE_S)

        store = EmbeddedStore(lambda events: None, time.monotonic, far)
        run_together(8, lambda i: store.read_gpunode("n"))
        assert not all_there.broken
