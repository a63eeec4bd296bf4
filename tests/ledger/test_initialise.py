"""Checks that nodes are initialised, and that finalizers are removed, after a fault at any call to
the store.
"""

from contextlib import suppress

import msgspec
import pytest

from extender.ledger.bind_call import Declined
from extender.ledger.store import Binding
from headroom.contract.annotations import FINALIZER, TOUCHED
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Node, ObjectMeta, PodStatus
from headroom.contract.reasons import Reason
from headroom.errors import OutcomeUnknown, StoreError, StoreRejected, StoreTimeout
from tests.ledger.stage import DEVICES, Stage, once, pod, raises

AT_ONCE = 50
FEW_NODES = 16


class TestInitialise:
    @pytest.fixture(autouse=True)
    def fresh(self, stage: Stage) -> None:
        stage.store.delete_gpunode("n")

    def test_a_gpunode_is_created_with_finalizer_and_owner_and_waits_for_a_report(
        self, stage: Stage
    ) -> None:
        assert stage.initialise("n") == []
        made = stage.node()
        assert made.metadata.finalizers == [FINALIZER]
        (owner,) = made.metadata.owner_references or []
        assert (owner.kind, owner.name, owner.uid) == ("Node", "n", "node-n")
        assert stage.initialise("n") == []
        assert not stage.node().spec.initialised
        stage.store.report([("n", DEVICES)])
        assert stage.initialise("n") == ["n"]
        assert stage.node().spec.initialised

    def test_a_report_without_devices_does_not_initialise_the_node(self, stage: Stage) -> None:
        stage.new_node("n", devices=False)
        assert stage.initialise("n") == []
        assert not stage.node().spec.initialised

    def test_an_uninitialised_node_takes_no_pods(self, stage: Stage) -> None:
        stage.new_node("n")
        assert stage.bind() == Declined(Reason.NOT_INITIALISED)

    def test_unbound_pods_of_headroom_are_touched_and_bound_ones_are_charged(
        self, stage: Stage
    ) -> None:
        stage.new_node("n")
        for other in (pod("plain", asked=0), pod("q", node="n"), pod("far", node="m")):
            stage.store.admit(other)
        ended = pod("ended", node="n")
        stage.store.admit(msgspec.structs.replace(ended, status=PodStatus(phase="Failed")))
        assert stage.initialise("n") == ["n"]
        assert stage.pod().annotation(TOUCHED)
        assert not stage.pod("plain").annotation(TOUCHED)
        assert not stage.pod("q").annotation(TOUCHED)
        assert stage.reserved == {"uid-q"}
        reservation = stage.node().spec.reservations["uid-q"]
        assert reservation.attempt
        assert reservation.since

    @pytest.mark.parametrize("when", ["before", "after"])
    def test_a_pod_bound_during_the_touch_is_charged(self, stage: Stage, when: str) -> None:
        stage.new_node("n")

        def bind_by_another_scheduler() -> None:
            version = stage.pod().metadata.resource_version
            stage.store.bind(Binding("a", "p", "uid-p", version, "n"))

        stage.fault = once("touch_pod", when, bind_by_another_scheduler)
        assert stage.initialise("n") == ["n"]
        assert stage.reserved == {"uid-p"}

    @pytest.mark.parametrize("operation", ["touch_pod", "list_pods"])
    def test_a_pod_deleted_meanwhile_is_not_an_error(self, stage: Stage, operation: str) -> None:
        stage.new_node("n")
        stage.fault = once(operation, "before", lambda: stage.store.delete_pod("a", "p"))
        assert stage.initialise("n") == ["n"]
        assert not stage.reserved

    def test_a_conflict_on_one_node_does_not_affect_others(self, stage: Stage) -> None:
        stage.new_node("n")
        stage.new_node("m")
        stage.fault = once("write_spec", "before", lambda: stage.store.delete_gpunode("n"))
        assert stage.initialise("n", "m") == ["m"]

    def test_a_concurrent_status_write_of_an_agent_delays_nothing(self, stage: Stage) -> None:
        stage.new_node("n")
        stage.store.admit(pod("on-n", node="n"))
        reports = iter(range(3))

        def report(*at: str) -> None:
            if at == ("write_spec", "before") and next(reports, None) is not None:
                stage.store.report([("n", DEVICES)])

        stage.fault = report
        assert stage.initialise("n") == ["n"]
        assert stage.reserved == {"uid-on-n"}
        assert stage.calls.count("touch_pod") == 1
        assert stage.calls.count("write_spec") == 4

    def test_a_gpunode_recreated_meanwhile_is_left_for_the_next_round(self, stage: Stage) -> None:
        """A Binding can still arrive although its reservation was in the old GPUNode."""
        stage.new_node("n")

        def made_anew() -> None:
            stage.store.delete_gpunode("n")
            stage.new_node("n")

        stage.fault = once("write_spec", "before", made_anew)
        assert stage.initialise("n") == []
        assert not stage.node().spec.initialised
        assert stage.initialise("n") == ["n"]
        assert stage.calls.count("touch_pod") == 1

    def test_a_pod_that_cannot_be_touched_does_not_block_the_node(self, stage: Stage) -> None:
        stage.new_node("n")
        stage.store.admit(pod("also"))
        stage.fault = once("touch_pod", "before", raises(StoreRejected))
        assert stage.initialise("n") == ["n"]
        assert stage.pod("also").annotation(TOUCHED)

    def test_pods_are_touched_once_per_gpunode(self, stage: Stage) -> None:
        stage.new_node("n")
        stage.fault = once("write_spec", "before", raises(OutcomeUnknown))
        with pytest.raises(OutcomeUnknown):
            stage.initialise("n")
        assert stage.calls.count("touch_pod") == 1
        assert stage.initialise("n") == ["n"]
        assert "touch_pod" not in stage.calls

    @pytest.mark.parametrize("answer", [StoreRejected, OutcomeUnknown])
    @pytest.mark.parametrize("operation", ["read_gpunode", "create_gpunode", "write_spec"])
    def test_a_rejected_write_of_one_node_does_not_affect_others(
        self, stage: Stage, operation: str, answer: type[StoreError]
    ) -> None:
        if operation != "create_gpunode":
            stage.new_node("n")
        stage.new_node("m")
        stage.fault = once(operation, "before", raises(answer))
        with pytest.raises(answer):
            stage.initialise("n", "m")
        assert stage.node("m").spec.initialised

    def test_the_round_ends_if_the_store_does_not_answer(self, stage: Stage) -> None:
        stage.fault = once("read_gpunode", "before", raises(StoreTimeout))
        with pytest.raises(StoreTimeout):
            stage.initialise("n", "m")
        assert stage.calls == ["read_gpunode"]

    def test_a_gpunode_created_by_another_replica_is_left_to_it(self, stage: Stage) -> None:
        stage.new_node("m")
        stage.fault = once("create_gpunode", "before", lambda: stage.new_node("n"))
        assert stage.initialise("n", "m") == ["m"]
        assert stage.initialise("n", "m") == ["n"]

    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize(
        "operation", ["read_gpunode", "create_gpunode", "list_pods", "touch_pod", "write_spec"]
    )
    def test_initialisation_completes_after_any_fault(
        self, stage: Stage, operation: str, when: str
    ) -> None:
        stage.new_node("m")
        stage.store.admit(pod("q", node="n"))
        stage.fault = once(operation, when, raises(OutcomeUnknown))
        for _ in range(3):
            with suppress(OutcomeUnknown):
                stage.initialise("n", "m")
            if stage.store.read_gpunode("n") and not stage.node().status:
                assert not stage.node().spec.initialised
                stage.store.report([("n", DEVICES)])
        assert stage.node().spec.initialised
        assert stage.node("m").spec.initialised
        assert stage.reserved == {"uid-q"}

    @pytest.mark.parametrize(
        ("more", "lists"),
        [
            pytest.param(
                FEW_NODES - 1, FEW_NODES + 1, id="few nodes: unbound pods, and pods of each node"
            ),
            pytest.param(FEW_NODES, 2, id="many nodes: unbound pods, and all pods"),
        ],
    )
    def test_pods_are_listed_by_node_or_all_at_once(
        self, stage: Stage, more: int, lists: int
    ) -> None:
        names = ["n", *(f"m{number}" for number in range(more))]
        for name in names:
            stage.new_node(name)
            stage.store.admit(pod(f"on-{name}", node=name))
        assert stage.initialise(*names) == names
        assert stage.calls.count("list_pods") == lists
        assert [set(stage.node(name).spec.reservations) for name in names] == [
            {f"uid-on-{name}"} for name in names
        ]

    def test_initialisation_does_not_block_other_tasks(self, stage: Stage) -> None:
        stage.new_node("n")
        for number in range(2 * AT_ONCE + 1):
            stage.store.admit(pod(f"on-{number}", node="n"))
        work = stage.ledger.awaited.initialiser.initialise(
            [Node(metadata=ObjectMeta(name="n", uid="n"))]
        )
        turns = 0
        with suppress(StopIteration):
            while work.send(None) is None:
                turns += 1
        assert turns >= 3
        assert len(stage.reserved) == 2 * AT_ONCE + 1

    def test_an_initialised_node_is_not_changed(self, stage: Stage) -> None:
        stage.new_node("n", initialised=True)
        before = stage.node()
        assert stage.initialise("n") == []
        assert stage.calls == ["read_gpunode"]
        assert stage.node() == before


class TestRemoveFinalizer:
    @pytest.mark.parametrize("operation", ["read_gpunode", "remove_finalizer"])
    def test_a_rejected_write_of_one_node_does_not_affect_others(
        self, stage: Stage, operation: str
    ) -> None:
        for name in ("l", "m"):
            held = ObjectMeta(name=name, finalizers=[FINALIZER], deletion_timestamp="now")
            stage.store.create_gpunode(GPUNode(metadata=held))
        stage.fault = once(operation, "before", raises(StoreRejected))
        with pytest.raises(StoreRejected):
            stage.remove_finalizer("l", "m")
        assert stage.store.read_gpunode("l") is not None
        assert stage.store.read_gpunode("m") is None
