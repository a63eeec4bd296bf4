"""Tests every step of bind, with a fault at every call to the store."""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import pytest

from extender.ledger.bind_call import Bound, Declined, Failed
from extender.ledger.embedded_store import no_fault
from headroom.contract.annotations import PLACEMENT, TOUCHED
from headroom.contract.reasons import Reason
from headroom.errors import OutcomeUnknown, StoreConflict, StoreError, StoreRejected
from tests.blocking import Ledger
from tests.ledger.stage import DEVICES, WALL_S, Stage, adopt, judge, once, pod, raises


class TestBind:
    def test_a_cached_gpunode_is_not_read_again(self, stage: Stage) -> None:
        assert stage.bind(stage.ask(pod())) == Bound()
        assert stage.calls == ["write_spec", "bind"]
        assert stage.pod().node == "n"
        assert stage.pod().annotation(PLACEMENT) == "6 on n"
        (reservation,) = stage.node().spec.reservations.values()
        assert (reservation.name, reservation.attempt) == ("p", "L-1")
        assert reservation.since == "1970-01-12T13:46:40.000+00:00"
        assert stage.written == [stage.node()]

    def test_an_uncached_gpunode_is_read(self, stage: Stage) -> None:
        assert stage.bind(stage.ask(pod(), held=False)) == Bound()
        assert stage.calls == ["read_gpunode", "read_pod", "write_spec", "bind"]

    def test_a_bind_without_free_memory_is_declined_without_a_write(self, stage: Stage) -> None:
        stage.store.admit(pod("q"))
        assert stage.bind(stage.ask(pod("q"))) == Bound()
        assert stage.bind(stage.ask(pod())) == Declined(Reason.MEMORY_ON_ANY)
        assert stage.calls == ["read_gpunode"]
        assert stage.reserved == {"uid-q"}

    def test_a_stale_watch_does_not_decline_a_bind(self, stage: Stage) -> None:
        """Otherwise, kube-scheduler would back off for seconds."""
        stage.store.admit(pod("q"))
        assert stage.bind(stage.ask(pod("q"))) == Bound()
        ask = stage.ask(pod())
        stage.store.delete_pod("a", "q")
        assert stage.remove(uid="uid-q", left=True)
        assert stage.bind(ask) == Bound()
        assert stage.reserved == {"uid-p"}

    def test_a_node_without_a_gpunode_counts_as_not_reported(self, stage: Stage) -> None:
        assert stage.bind(stage.ask(pod(), "elsewhere")) == Declined(Reason.NO_REPORT)

    def test_an_invalid_request_is_reported_before_a_missing_gpunode(self, stage: Stage) -> None:
        stage.store.admit(pod("bad", asked=-1))
        bound = stage.bind(stage.ask(pod("bad", asked=-1), "elsewhere"))
        assert bound == Declined(Reason.BAD_VRAM)

    def test_a_pod_that_requests_no_gpu_is_bound_to_a_node_without_a_gpunode(
        self, stage: Stage
    ) -> None:
        stage.store.admit(pod("plain", asked=0))
        for held in (True, False):
            assert stage.bind(stage.ask(pod("plain", asked=0), "elsewhere", held)) == Bound()
            assert stage.pod("plain").node == "elsewhere"

    def test_a_pod_without_a_gpu_request_is_bound_without_a_reservation(self, stage: Stage) -> None:
        stage.store.admit(pod("plain", asked=0))
        assert stage.bind(stage.ask(pod("plain", asked=0))) == Bound()
        assert stage.calls == ["bind"]
        assert not stage.reserved

    @pytest.mark.parametrize("times", [1, 2, 3])
    def test_a_repeated_bind_has_the_same_answer_and_changes_nothing(
        self, stage: Stage, times: int
    ) -> None:
        first = stage.ask(pod())
        assert stage.bind(first) == Bound()
        node, bound = stage.node(), stage.pod()
        for _ in range(times):
            assert stage.bind(first) == Bound()
            assert stage.bind(stage.ask(pod())) == Bound()
            assert stage.bind(stage.ask(pod(), held=False)) == Bound()
        assert (stage.node(), stage.pod()) == (node, bound)

    @pytest.mark.parametrize("held", [True, False])
    def test_an_existing_reservation_is_written_again(self, stage: Stage, held: bool) -> None:
        stage.fault = once("bind", "before", raises(StoreConflict))
        assert stage.bind(stage.ask(pod(), held=held)) == Bound()
        assert stage.calls.count("write_spec") == 2
        assert stage.node().spec.reservations["uid-p"].attempt == "L-2"

    def test_an_older_filter_call_never_shrinks_a_reservation(self, stage: Stage) -> None:
        old = stage.ask(pod(asked=2, version="99"), held=True)
        stage.rival_binds()
        assert stage.bind(old) == Bound()
        (charge,) = stage.node().spec.reservations["uid-p"].charges
        assert charge.candidates == {"GPU-0": 6}

    def test_a_concurrent_report_is_a_conflict_and_retried(self, stage: Stage) -> None:
        stage.fault = once("write_spec", "before", lambda: stage.store.report([("n", DEVICES)]))
        assert stage.bind() == Bound()
        assert stage.calls == ["write_spec", "read_gpunode", "write_spec", "bind"]

    def test_a_gpunode_deleted_during_the_bind_takes_no_pod(self, stage: Stage) -> None:
        stage.fault = once("write_spec", "before", lambda: stage.store.delete_gpunode("n"))
        assert stage.bind() == Declined(Reason.NO_REPORT)
        assert (stage.calls, stage.pod().node) == (["write_spec", "read_gpunode"], "")

    def test_a_gpunode_recreated_during_the_bind_takes_the_pod(self, stage: Stage) -> None:
        def recreate() -> None:
            stage.store.delete_gpunode("n")
            stage.new_node("n", initialised=True)

        stage.fault = once("write_spec", "before", recreate)
        assert stage.bind() == Bound()
        assert (stage.reserved, stage.pod().node) == ({"uid-p"}, "n")

    def test_a_concurrent_reservation_is_considered(self, stage: Stage) -> None:
        stage.store.admit(pod("q"))
        rival = stage.new_ledger("rival")
        stage.fault = once(
            "write_spec", "before", lambda: rival.bind(stage.ask(stage.pod("q"), held=False))
        )
        assert stage.bind() == Declined(Reason.MEMORY_ON_ANY)
        assert (stage.reserved, stage.pod().node) == ({"uid-q"}, "")

    def test_a_pod_changed_after_filter_is_fitted_in_its_new_version(self, stage: Stage) -> None:
        ask = stage.ask(pod())
        stage.replace_pod(asked=3)
        assert stage.bind(ask) == Bound()
        assert stage.pod().annotation(PLACEMENT) == "3 on n"
        (charge,) = stage.node().spec.reservations["uid-p"].charges
        assert charge.candidates == {"GPU-0": 3}

    def test_charging_gives_up_on_a_node_that_changes_every_time(self, stage: Stage) -> None:
        def report(operation: str, when: str) -> None:
            if (operation, when) == ("write_spec", "before"):
                stage.store.report([("n", DEVICES)])

        stage.fault = report
        outcome = stage.bind()
        assert isinstance(outcome, Failed)
        assert "gave up after 8 attempts: GPUNode n was written by" in outcome.message


class TestBindingThatFails:
    """Tests step 5 of bind, in which the response to the Binding and the state of the pod decide
    the outcome.
    """

    FATES: Mapping[str, tuple[Callable[[Stage], object], str, bool]] = {
        "bound here by a rival": (lambda s: s.rival_binds(), "", True),
        "bound elsewhere": (lambda s: s.rival_binds("m"), "pod a/p is bound to node m", False),
        "replaced": (lambda s: s.replace_pod(uid="heir"), "its uid is heir, not uid-p", False),
        "gone": (lambda s: s.store.delete_pod("a", "p"), "pod a/p does not exist", False),
    }

    @pytest.mark.parametrize("answer", [StoreRejected, StoreConflict, OutcomeUnknown])
    @pytest.mark.parametrize("fate", FATES)
    def test_the_state_of_the_pod_decides_the_result(
        self, stage: Stage, fate: str, answer: type[StoreError]
    ) -> None:
        deed, words, kept = self.FATES[fate]
        stage.new_node("m", initialised=True)

        def then_answers() -> None:
            deed(stage)
            raises(answer)()

        stage.fault = once("bind", "before", then_answers)
        outcome = stage.bind()
        assert outcome == Bound() if kept else isinstance(outcome, Failed)
        if isinstance(outcome, Failed):
            assert words in outcome.message
        # The containers may run, because another scheduler may have bound the pod before it was
        # deleted.
        may_run = fate in ("gone", "replaced")
        assert ("uid-p" in stage.reserved) == (kept or may_run)

    @pytest.mark.parametrize("answer", [StoreConflict, OutcomeUnknown])
    @pytest.mark.parametrize("when", ["before", "after"])
    def test_an_unbound_pod_is_retried_and_a_bound_one_is_a_success(
        self, stage: Stage, answer: type[StoreError], when: str
    ) -> None:
        stage.fault = once("bind", when, raises(answer))
        assert stage.bind() == Bound()
        assert stage.calls.count("bind") == (2 if when == "before" else 1)
        assert stage.pod().node == "n"
        assert stage.reserved == {"uid-p"}

    def test_a_rejection_is_not_retried(self, stage: Stage) -> None:
        stage.fault = once("bind", "before", raises(StoreRejected))
        assert stage.bind() == Failed("a StoreRejected for the tests")
        assert stage.calls.count("bind") == 1
        assert (stage.pod().node, stage.reserved) == ("", set())
        assert stage.pod().annotation(TOUCHED)

    def test_a_terminating_pod_is_not_bound(self, stage: Stage) -> None:
        dying = pod(version="101")
        metadata = msgspec.structs.replace(dying.metadata, deletion_timestamp="now")
        ask = stage.ask(pod())
        stage.store.admit(msgspec.structs.replace(dying, metadata=metadata))
        assert stage.bind(ask) == Failed("pod a/p is being deleted")
        assert stage.calls.count("bind") == 1
        assert not stage.reserved

    def test_the_reservation_stays_if_the_state_of_the_pod_is_unknown(self, stage: Stage) -> None:
        def silent(operation: str, when: str) -> None:
            if operation in ("bind", "read_pod"):
                raise OutcomeUnknown("silence")

        stage.fault = silent
        assert stage.bind() == Failed("silence")
        assert stage.reserved == {"uid-p"}

    def test_a_removal_between_reservation_and_binding_restarts_the_bind(
        self, stage: Stage
    ) -> None:
        rival = stage.new_ledger("rival")
        stage.fault = once("bind", "before", lambda: rival.remove("n", "uid-p"))
        assert stage.bind() == Bound()
        assert stage.pod().annotation(TOUCHED)
        assert stage.reserved == {"uid-p"}


class TestFaultAtEveryCall:
    """Tests that no pod is bound without its reservation after any lost request or response."""

    CALLS: tuple[str, ...] = ("read_gpunode", "read_pod", "write_spec", "bind", "touch_pod")

    @pytest.mark.parametrize("kind", [OutcomeUnknown, StoreConflict, StoreRejected])
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("operation", CALLS)
    @pytest.mark.parametrize("always", [False, True])
    def test_a_reservation_and_its_removal_are_consistent_after_a_fault(
        self, stage: Stage, operation: str, when: str, kind: type[StoreError], always: bool
    ) -> None:
        def fault(*at: str) -> None:
            if at == (operation, when):
                raise kind("lost")

        stage.fault = fault if always else once(operation, when, raises(kind))
        ask = stage.ask(pod(), held=False)
        outcome = stage.bind(ask)
        bound = stage.pod().node == "n"
        assert bound or outcome != Bound()
        assert not bound or "uid-p" in stage.reserved
        removed = stage.remove()
        assert not bound or (not removed and "uid-p" in stage.reserved)
        stage.fault = no_fault
        # When the store works again, the next attempt and reconciliation succeed.
        assert stage.bind(ask) == Bound()
        assert stage.reserved == {"uid-p"}
        stage.store.delete_pod("a", "p")
        assert not stage.remove()
        assert stage.remove(left=True)
        assert not stage.reserved


class TestDeadline:
    """Tests binds that take longer than the deadline. By then, kube-scheduler has dropped its
    assumed bind and can choose another node.
    """

    def ledger(self, stage: Stage, clock: list[float]) -> None:
        ids = (f"T-{number}" for number in itertools.count(1))
        stage.ledger = Ledger(
            stage.store,
            judge,
            adopt,
            stage.written.append,
            lambda: WALL_S,
            lambda: next(ids),
            monotonic_s=lambda: clock[0],
        )

    @pytest.mark.parametrize("operation", ["write_spec", "bind"])
    def test_a_bind_is_not_completed_after_its_deadline(self, stage: Stage, operation: str) -> None:
        clock = [0.0]
        self.ledger(stage, clock)

        def late() -> None:
            clock[0] = 5.0
            stage.store.touch_pod(stage.pod(), "somebody else")
            raise StoreConflict("changed")

        stage.fault = once(operation, "before", late)
        outcome = stage.bind(replace(stage.ask(pod()), until_s=4.0))
        assert isinstance(outcome, Failed)
        assert "took longer than kube-scheduler waits" in outcome.message
        assert not stage.pod().node

    def test_a_bind_is_completed_before_its_deadline(self, stage: Stage) -> None:
        clock = [0.0]
        self.ledger(stage, clock)
        stage.fault = once(
            "bind", "before", lambda: stage.store.touch_pod(stage.pod(), "somebody else")
        )
        ask = replace(stage.ask(pod()), until_s=4.0)
        assert isinstance(stage.bind(ask), Bound)

    def test_a_pod_bound_at_the_deadline_is_a_success(self, stage: Stage) -> None:
        clock = [0.0]
        self.ledger(stage, clock)

        def late() -> None:
            clock[0] = 5.0
            raise OutcomeUnknown("no answer")

        stage.fault = once("bind", "after", late)
        ask = replace(stage.ask(pod()), until_s=4.0)
        assert isinstance(stage.bind(ask), Bound)
