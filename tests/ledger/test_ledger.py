"""Every step of bind, remove and initialise, with a fault at every call to the store."""

import asyncio
import itertools
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar, cast

import msgspec
import pytest

from contract.annotations import FINALIZER, PLACEMENT, RETRY, TOUCHED, VRAM
from contract.gpunode import Charge, GPUNode, GPUNodeSpec, GPUNodeStatus, PodUse, Reservation
from contract.kube import Node, ObjectMeta, Pod, PodSpec, PodStatus
from contract.reasons import Reason
from extender.errors import OutcomeUnknown, StoreConflict, StoreError, StoreRejected, StoreTimeout
from extender.ledger import ledger as ledger_module
from extender.ledger.bind import BindRequest, Bound, Declined, Failed, Outcome
from extender.ledger.memory_store import EmbeddedStore, Fault, no_fault
from extender.ledger.store import Binding, Store
from extender.placement.placement_record import Placement
from tests.blocking import Faraway, Ledger
from tests.waiting import PATIENCE_S, until_then

AT_ONCE = 50
FEW_NODES = 16

RESOURCE = "nvidia.com/gpu"
WALL_S = 1_000_000.0
T = TypeVar("T")


def pod(
    name: str = "p", uid: str = "", asked: int = 6, version: str = "100", node: str = ""
) -> Pod:
    metadata = ObjectMeta(
        namespace="a",
        name=name,
        uid=uid or f"uid-{name}",
        resource_version=version,
        annotations={VRAM: str(asked)} if asked else {},
    )
    return Pod(metadata=metadata, spec=PodSpec(node_name=node or None))


def judge(pod: Pod, gpunode: GPUNode) -> Placement | Reason:
    """One device of 10 bytes, on every node that is initialised."""
    asked = int(pod.annotation(VRAM) or 0)
    if asked < 0:
        return Reason.BAD_VRAM
    if not asked:
        return Placement((), {})
    if not gpunode.spec.initialised:
        return Reason.NO_REPORT if gpunode.status is None else Reason.NOT_INITIALISED
    others = sum(
        max(charge.candidates.values())
        for uid, reservation in gpunode.spec.reservations.items()
        if uid != pod.metadata.uid
        for charge in reservation.charges
    )
    if others + asked > 10:
        return Reason.MEMORY_ON_ANY
    charge = Charge(resource=RESOURCE, count=1, candidates={"GPU-0": asked})
    return Placement((charge,), {PLACEMENT: f"{asked} on {gpunode.name}"})


def adopt(pod: Pod, gpunode: GPUNode) -> Reservation | None:
    asked = int(pod.annotation(VRAM) or 0)
    charge = Charge(resource=RESOURCE, count=1, candidates={"GPU-0": asked})
    return Reservation(namespace="a", name=pod.metadata.name, charges=[charge]) if asked else None


DEVICES = msgspec.convert({"devices": [{"uuid": "GPU-0"}]}, GPUNodeStatus)


def pending_binds(ledger: Any, node: str = "n") -> int:
    """Return how many binds of the node are queued or running."""
    queue = ledger.binder._batcher._queues.get(node)
    return queue.requests if queue else 0


class StoreWithLease(EmbeddedStore):
    """The in-memory store, with Leases."""

    def read_heartbeat_version(self, node: str) -> str:
        return self._do("read_heartbeat_version", lambda: {"n": "41"}[node])


class Stage:
    """A store with the node ``n`` and the pod ``p``, a ledger over it, and the seam between them.

    ``fault`` is called before and after each call of the ledger, and may do in the meantime what
    others do, or lose a message.
    """

    def __init__(self) -> None:
        self.fault: Fault = no_fault
        self.calls: list[str] = []
        self.written: list[GPUNode] = []
        self._armed = False
        self.store = StoreWithLease(lambda events: None, lambda: 0.0, self._on_the_way)
        self.ledger = self.new_ledger("L")
        self.new_node("n", initialised=True)
        self.store.admit(pod())

    def _on_the_way(self, operation: str, when: str) -> None:
        if self._armed:
            if when == "before":
                self.calls.append(operation)
            self._armed = False
            try:
                self.fault(operation, when)
            finally:
                self._armed = True

    def new_ledger(self, name: str) -> Ledger:
        ids = (f"{name}-{number}" for number in itertools.count(1))
        return Ledger(
            self.store, judge, adopt, self.written.append, lambda: WALL_S, lambda: next(ids)
        )

    def new_node(self, name: str, initialised: bool = False, devices: bool = True) -> None:
        spec = GPUNodeSpec(initialised=initialised)
        self.store.create_gpunode(GPUNode(metadata=ObjectMeta(name=name), spec=spec))
        self.store.report([(name, DEVICES if devices else GPUNodeStatus())])

    def node(self, name: str = "n") -> GPUNode:
        node = self.store.read_gpunode(name)
        assert node is not None
        return node

    def pod(self, name: str = "p") -> Pod:
        found = self.store.read_pod("a", name)
        assert found is not None
        return found

    @property
    def reserved(self) -> set[str]:
        return set(self.node().spec.reservations)

    def ask(self, shown: Pod, node: str = "n", held: bool = True) -> BindRequest:
        metadata = shown.metadata
        return BindRequest(
            metadata.namespace,
            metadata.name,
            metadata.uid,
            node,
            shown if held else None,
            self.store.read_gpunode(node) if held else None,
        )

    def bind(self, ask: BindRequest | None = None) -> Outcome:
        asked = ask or self.ask(pod())
        return self._watched(lambda: self.ledger.bind(asked))

    def remove(self, node: str = "n", uid: str = "uid-p", left: bool = False) -> bool:
        return self._watched(lambda: self.ledger.remove(node, uid, left))

    def departed_by(self, uid: str = "uid-p") -> str | None:
        reservation = self.node().spec.reservations[uid]
        return self._watched(lambda: self.ledger.departed_by("n", uid, reservation))

    def note_choice(self, choice: str, node: str = "n") -> bool:
        return self._watched(lambda: self.ledger.note_choice(node, choice))

    def initialise(self, *names: str) -> list[str]:
        nodes = [Node(metadata=ObjectMeta(name=name, uid=f"node-{name}")) for name in names]
        return self._watched(lambda: self.ledger.initialise(nodes))

    def remove_finalizer(self, *names: str) -> None:
        self._watched(lambda: self.ledger.remove_finalizer(names))

    def _watched(self, work: Callable[[], T]) -> T:
        self.calls.clear()
        self._armed = True
        try:
            return work()
        finally:
            self._armed = False

    # What others do.

    def rival_binds(self, node: str = "n") -> None:
        self.new_ledger("rival").bind(self.ask(self.pod(), node, held=False))

    def replace_pod(self, **changes: Any) -> None:
        self.store.admit(pod(**({"version": "101"} | changes)))

    def end_pod(self) -> None:
        """Only here does a pod come bound: the store takes a newer one while it is not."""
        held = self.pod()
        self.store.delete_pod("a", "p")
        self.store.admit(msgspec.structs.replace(held, status=PodStatus(phase="Succeeded")))


def once(operation: str, when: str, deed: Callable[[], object]) -> Fault:
    """Return a fault that calls ``deed`` at the first such call."""
    left = [deed]

    def fault(*at: str) -> None:
        if at == (operation, when) and left:
            left.pop()()

    return fault


def raises(kind: type[StoreError]) -> Callable[[], None]:
    def deed() -> None:
        raise kind(f"a {kind.__name__} for the tests")

    return deed


@pytest.fixture
def stage() -> Stage:
    return Stage()


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
        """Otherwise kube-scheduler would back off for seconds."""
        stage.store.admit(pod("q"))
        assert stage.bind(stage.ask(pod("q"))) == Bound()
        ask = stage.ask(pod())
        stage.store.delete_pod("a", "q")
        assert stage.remove(uid="uid-q", left=True)
        assert stage.bind(ask) == Bound()
        assert stage.reserved == {"uid-p"}

    def test_a_node_without_an_object_has_not_reported(self, stage: Stage) -> None:
        assert stage.bind(stage.ask(pod(), "elsewhere")) == Declined(Reason.NO_REPORT)

    def test_a_node_without_an_object_is_not_blamed_for_the_pod(self, stage: Stage) -> None:
        stage.store.admit(pod("bad", asked=-1))
        bound = stage.bind(stage.ask(pod("bad", asked=-1), "elsewhere"))
        assert bound == Declined(Reason.BAD_VRAM)

    def test_a_pod_that_requests_no_gpu_is_bound_to_a_node_without_an_object(
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

    def test_a_concurrent_reservation_is_considered(self, stage: Stage) -> None:
        stage.store.admit(pod("q"))
        rival = stage.new_ledger("rival")
        stage.fault = once(
            "write_spec", "before", lambda: rival.bind(stage.ask(stage.pod("q"), held=False))
        )
        assert stage.bind() == Declined(Reason.MEMORY_ON_ANY)
        assert (stage.reserved, stage.pod().node) == ({"uid-q"}, "")

    def test_a_pod_that_changed_after_filter_is_fitted_in_its_new_version(
        self, stage: Stage
    ) -> None:
        ask = stage.ask(pod())
        stage.replace_pod(asked=3)
        assert stage.bind(ask) == Bound()
        assert stage.pod().annotation(PLACEMENT) == "3 on n"
        (charge,) = stage.node().spec.reservations["uid-p"].charges
        assert charge.candidates == {"GPU-0": 3}

    def test_it_gives_up_on_a_node_that_always_changes(self, stage: Stage) -> None:
        def report(operation: str, when: str) -> None:
            if (operation, when) == ("write_spec", "before"):
                stage.store.report([("n", DEVICES)])

        stage.fault = report
        outcome = stage.bind()
        assert isinstance(outcome, Failed)
        assert "gave up after 8 attempts: GPUNode n was written by" in outcome.message


class TestBindingThatFails:
    """Step 5: the store's answer, and the state of the pod."""

    FATES: Mapping[str, tuple[Callable[[Stage], object], str, bool]] = {
        "bound here by a rival": (lambda s: s.rival_binds(), "", True),
        "bound elsewhere": (lambda s: s.rival_binds("m"), "pod a/p is bound to node m", False),
        "replaced": (lambda s: s.replace_pod(uid="heir"), "its uid is heir, not uid-p", False),
        "gone": (lambda s: s.store.delete_pod("a", "p"), "pod a/p does not exist", False),
    }

    @pytest.mark.parametrize("answer", [StoreRejected, StoreConflict, OutcomeUnknown])
    @pytest.mark.parametrize("fate", FATES)
    def test_the_state_of_the_pod_decides(
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
        # Another scheduler may have bound it before it was deleted: then its containers may run.
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

    def test_a_pod_being_deleted_is_left_alone(self, stage: Stage) -> None:
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
    """After any lost request or answer: no pod is bound without its reservation."""

    CALLS: tuple[str, ...] = ("read_gpunode", "read_pod", "write_spec", "bind", "touch_pod")

    @pytest.mark.parametrize("kind", [OutcomeUnknown, StoreConflict, StoreRejected])
    @pytest.mark.parametrize("when", ["before", "after"])
    @pytest.mark.parametrize("operation", CALLS)
    @pytest.mark.parametrize("always", [False, True])
    def test_bind_then_remove(
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
        # The store works again: nothing prevents the next attempt, or reconciling.
        assert stage.bind(ask) == Bound()
        assert stage.reserved == {"uid-p"}
        stage.store.delete_pod("a", "p")
        assert not stage.remove()
        assert stage.remove(left=True)
        assert not stage.reserved


class TestRemove:
    @pytest.fixture
    def reserved(self, stage: Stage) -> Stage:
        """Reserve the pod without binding it, as after a crash."""
        stage.fault = lambda *at: raises(OutcomeUnknown)() if at[0] == "bind" else None
        stage.bind()
        stage.fault = no_fault
        assert stage.reserved == {"uid-p"}
        return stage

    def test_a_reservation_in_use_is_kept(self, stage: Stage) -> None:
        stage.bind()
        before = stage.pod(), stage.node()
        assert not stage.remove()
        assert (stage.pod(), stage.node()) == before

    def test_an_unbound_pod_is_touched_first(self, reserved: Stage) -> None:
        assert reserved.remove()
        assert reserved.calls == ["read_gpunode", "read_pod", "touch_pod", "write_spec"]
        assert not reserved.reserved
        assert reserved.written[-1] == reserved.node()
        late = Binding("a", "p", "uid-p", "100", "n")
        with pytest.raises(StoreConflict):
            reserved.store.bind(late)

    @pytest.mark.parametrize(
        "deed",
        [
            pytest.param(lambda s: s.store.delete_pod("a", "p"), id="gone"),
            pytest.param(lambda s: s.replace_pod(uid="heir"), id="replaced"),
            pytest.param(lambda s: s.rival_binds("m"), id="bound elsewhere"),
            pytest.param(lambda s: (s.rival_binds(), s.end_pod()), id="ended"),
        ],
    )
    def test_a_pod_that_can_never_use_it_is_not_touched(
        self, reserved: Stage, deed: Callable[[Stage], object]
    ) -> None:
        reserved.new_node("m", initialised=True)
        deed(reserved)
        assert reserved.remove(left=True)
        assert reserved.calls == ["read_gpunode", "read_pod", "write_spec"]
        assert not reserved.reserved

    @pytest.mark.parametrize(
        "deed",
        [
            pytest.param(lambda s: s.store.delete_pod("a", "p"), id="gone"),
            pytest.param(lambda s: s.replace_pod(uid="heir"), id="replaced"),
        ],
    )
    def test_a_deleted_pod_may_still_run(
        self, stage: Stage, deed: Callable[[Stage], object]
    ) -> None:
        assert stage.bind() == Bound()
        deed(stage)
        assert not stage.remove()
        late = stage.bind(stage.ask(pod(), held=False))  # an attempt that comes to the same end
        assert isinstance(late, Failed)
        assert stage.reserved == {"uid-p"}

    def test_a_report_with_the_pod_proves_that_it_still_runs(self, reserved: Stage) -> None:
        reserved.store.delete_pod("a", "p")
        shown = msgspec.structs.replace(DEVICES, pods=[PodUse(uid="uid-p", device="GPU-0")])
        reserved.store.report([("n", shown)])
        assert not reserved.remove(left=True)
        assert reserved.reserved == {"uid-p"}

    def test_departure_does_not_remove_the_reservation_of_an_existing_pod(
        self, stage: Stage
    ) -> None:
        stage.bind()
        assert not stage.remove(left=True)
        assert stage.reserved == {"uid-p"}

    @pytest.mark.parametrize("node", ["n", "nowhere"])
    def test_a_missing_reservation_counts_as_removed(self, stage: Stage, node: str) -> None:
        assert stage.remove(node)
        assert stage.calls == ["read_gpunode"]

    @pytest.mark.parametrize("operation", ["touch_pod", "write_spec"])
    def test_a_conflict_with_a_bind_keeps_the_reservation(
        self, reserved: Stage, operation: str
    ) -> None:
        reserved.fault = once(operation, "before", reserved.rival_binds)
        assert not reserved.remove()
        assert reserved.pod().node == "n"
        assert reserved.reserved == {"uid-p"}

    def test_a_pod_deleted_before_the_touch_is_checked_again(self, reserved: Stage) -> None:
        reserved.fault = once("touch_pod", "before", lambda: reserved.store.delete_pod("a", "p"))
        assert reserved.remove(left=True)
        assert not reserved.reserved

    def test_a_deleted_gpunode_has_no_reservations(self, reserved: Stage) -> None:
        reserved.fault = once("write_spec", "before", lambda: reserved.store.delete_gpunode("n"))
        assert reserved.remove()

    @pytest.mark.parametrize("operation", ["read_gpunode", "read_pod", "touch_pod", "write_spec"])
    @pytest.mark.parametrize("kind", [OutcomeUnknown, StoreRejected])
    def test_a_store_that_does_not_answer_keeps_the_reservation(
        self, reserved: Stage, operation: str, kind: type[StoreError]
    ) -> None:
        reserved.fault = once(operation, "before", raises(kind))
        assert not reserved.remove()
        assert reserved.reserved == {"uid-p"}

    def test_other_reservations_stay(self, reserved: Stage) -> None:
        reserved.store.admit(pod("q", asked=4))
        assert reserved.bind(reserved.ask(pod("q", asked=4))) == Bound()
        assert reserved.remove()
        assert reserved.reserved == {"uid-q"}


class TestDeviceChoice:
    def test_the_choice_is_written_with_the_reservations(self, stage: Stage) -> None:
        stage.bind()
        for choice in ("steered", ""):
            assert stage.note_choice(choice)
            assert stage.node().spec.device_choice == choice
            assert stage.reserved == {"uid-p"}

    def test_the_choice_is_written_once(self, stage: Stage) -> None:
        assert stage.note_choice("steered")
        version = stage.node().metadata.resource_version
        assert stage.note_choice("steered")
        assert stage.node().metadata.resource_version == version

    def test_a_concurrent_reservation_is_kept(self, stage: Stage) -> None:
        stage.fault = once("write_spec", "before", stage.rival_binds)
        assert stage.note_choice("steered")
        assert stage.reserved == {"uid-p"}
        assert stage.node().spec.device_choice == "steered"

    def test_without_a_gpunode_no_choice_is_written(self, stage: Stage) -> None:
        assert not stage.note_choice("steered", "gone")


class TestDeparture:
    @pytest.fixture
    def bound(self, stage: Stage) -> Stage:
        stage.bind()
        return stage

    def test_the_heartbeat_is_read_after_the_pod_was_gone(self, bound: Stage) -> None:
        bound.store.delete_pod("a", "p")
        assert bound.departed_by() == "41"
        assert bound.calls == ["read_pod", "read_heartbeat_version"]

    def test_a_new_pod_with_the_same_name_is_another_pod(self, bound: Stage) -> None:
        bound.replace_pod(uid="heir")
        assert bound.departed_by() == "41"

    def test_an_existing_pod_is_not_gone(self, bound: Stage) -> None:
        assert bound.departed_by() is None
        assert bound.calls == ["read_pod"]

    @pytest.mark.parametrize("operation", ["read_pod", "read_heartbeat_version"])
    def test_without_an_answer_no_pod_is_gone(self, bound: Stage, operation: str) -> None:
        bound.store.delete_pod("a", "p")
        bound.fault = once(operation, "before", raises(OutcomeUnknown))
        assert bound.departed_by() is None


class TestRequeue:
    def test_an_unbound_pod_is_touched(self, stage: Stage) -> None:
        stage.ledger.requeue(pod())
        assert stage.pod().annotation(RETRY)

    def test_a_changed_pod_is_touched_in_its_new_version(self, stage: Stage) -> None:
        stage.replace_pod()
        stage.ledger.requeue(pod())
        assert stage.pod().annotation(RETRY)

    def test_two_replicas_requeue_a_pod_once(self, stage: Stage) -> None:
        theirs = stage.ledger.requeue(pod())
        before = stage.pod()
        assert stage.ledger.requeue(pod()) == theirs  # as before the other replica requeued it
        assert stage.pod() == before
        assert stage.ledger.requeue(before) != theirs

    @pytest.mark.parametrize(
        "deed",
        [
            pytest.param(lambda s: s.rival_binds(), id="bound"),
            pytest.param(lambda s: s.replace_pod(uid="heir"), id="replaced"),
        ],
    )
    def test_a_pod_that_is_not_pending_is_not_touched(
        self, stage: Stage, deed: Callable[[Stage], object]
    ) -> None:
        deed(stage)
        before = stage.pod()
        assert stage.ledger.requeue(pod()) is None
        assert stage.pod() == before

    def test_a_deleted_pod_is_no_error(self, stage: Stage) -> None:
        stage.store.delete_pod("a", "p")
        assert stage.ledger.requeue(pod()) is None


class TestDeadline:
    """kube-scheduler has forgotten its assumed bind and can choose another node."""

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


class TestInitialise:
    @pytest.fixture(autouse=True)
    def fresh(self, stage: Stage) -> None:
        stage.store.delete_gpunode("n")

    def test_an_object_is_created_with_finalizer_and_owner_and_waits_for_a_report(
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

    def test_a_report_without_devices_does_not_initialise(self, stage: Stage) -> None:
        stage.new_node("n", devices=False)
        assert stage.initialise("n") == []
        assert not stage.node().spec.initialised

    def test_an_uninitialised_node_takes_no_pods(self, stage: Stage) -> None:
        stage.new_node("n")
        assert stage.bind() == Declined(Reason.NOT_INITIALISED)

    def test_unbound_pods_of_ours_are_touched_and_bound_ones_charged(self, stage: Stage) -> None:
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

        def bound_by_somebody_else() -> None:
            version = stage.pod().metadata.resource_version
            stage.store.bind(Binding("a", "p", "uid-p", version, "n"))

        stage.fault = once("touch_pod", when, bound_by_somebody_else)
        assert stage.initialise("n") == ["n"]
        assert stage.reserved == {"uid-p"}

    @pytest.mark.parametrize("operation", ["touch_pod", "list_pods"])
    def test_a_pod_deleted_meanwhile_is_no_error(self, stage: Stage, operation: str) -> None:
        stage.new_node("n")
        stage.fault = once(operation, "before", lambda: stage.store.delete_pod("a", "p"))
        assert stage.initialise("n") == ["n"]
        assert not stage.reserved

    def test_a_conflict_on_one_node_does_not_affect_others(self, stage: Stage) -> None:
        stage.new_node("n")
        stage.new_node("m")
        stage.fault = once("write_spec", "before", lambda: stage.store.delete_gpunode("n"))
        assert stage.initialise("n", "m") == ["m"]

    def test_an_agent_that_writes_its_status_meanwhile_delays_nothing(self, stage: Stage) -> None:
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
        """A Binding can still arrive whose reservation was on the old object."""
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
            pytest.param(FEW_NODES - 1, FEW_NODES + 1, id="few: the unbound, and each node's"),
            pytest.param(FEW_NODES, 2, id="more: the unbound, and all"),
        ],
    )
    def test_pods_are_listed_by_node_or_all_together(
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


class TestReservedMemory:
    def test_it_adds_up_every_replica_at_its_largest_candidate(self, stage: Stage) -> None:
        def two_of(pod: Pod, gpunode: GPUNode) -> Placement:
            half_gib = (1 << 29) * int(pod.annotation(VRAM) or 0)
            candidates = {"GPU-0": 5, "GPU-1": half_gib}
            return Placement((Charge(resource=RESOURCE, count=2, candidates=candidates),), {})

        ledger = Ledger(
            stage.store, two_of, adopt, stage.written.append, lambda: WALL_S, lambda: "id"
        )
        stage.store.admit(pod("q", asked=15))
        assert ledger.bind(stage.ask(pod())) == Bound()
        assert stage.node().spec.reserved == "6.0 GiB"
        assert ledger.bind(stage.ask(pod("q", asked=15))) == Bound()
        assert stage.node().spec.reserved == "21.0 GiB"
        stage.store.delete_pod("a", "p")
        assert stage.remove(left=True)
        assert stage.node().spec.reserved == "15.0 GiB"


@pytest.mark.parametrize("stale", [None, "node", "pod"])
def test_a_cached_decision_is_used_only_for_the_same_object(stale: str | None) -> None:
    stage = Stage()
    ask = stage.ask(stage.pod())
    if stale == "node":
        stage.store.report([("n", DEVICES)])
    elif stale == "pod":  # it has changed, and is read, because it has a reservation
        stage.store.touch_pod(stage.pod(), "again")
        charged = adopt(stage.pod(), stage.node())
        assert charged is not None
        spec = GPUNodeSpec(initialised=True, reservations={"uid-p": charged})
        stage.store.write_spec(stage.node(), spec)
        ask = replace(ask, gpunode=stage.node())
    charge = Charge(resource=RESOURCE, count=1, candidates={"GPU-0": 9})
    found = Placement((charge,), {PLACEMENT: "found"})
    assert stage.bind(replace(ask, placement=found)) == Bound()
    (written,) = stage.node().spec.reservations["uid-p"].charges
    assert written.candidates == {"GPU-0": 6 if stale else 9}
    assert (stage.pod().annotation(PLACEMENT) == "found") == (stale is None)


def test_many_concurrent_binds_of_one_node_all_succeed() -> None:
    """kube-scheduler does not limit concurrent binds, and packing sends all to one node."""
    binders = 16
    store = EmbeddedStore(lambda events: None, lambda: 0.0)
    store.create_gpunode(GPUNode(metadata=ObjectMeta(name="n"), spec=GPUNodeSpec(initialised=True)))
    pods = [store.admit(pod(f"p{i}", asked=1)) for i in range(binders)]
    held = store.read_gpunode("n")

    async def all_bound() -> list[Outcome]:
        ids, far = itertools.count(), cast(Store, Faraway(store))
        ledger = ledger_module.Ledger(
            far, judge, adopt, lambda gpunode: None, lambda: WALL_S, lambda: str(next(ids))
        )
        asks = [BindRequest("a", f"p{i}", f"uid-p{i}", "n", pods[i], held) for i in range(binders)]
        return await asyncio.gather(*map(ledger.binder.bind, asks))

    outcomes = asyncio.run(asyncio.wait_for(all_bound(), PATIENCE_S))
    assert outcomes.count(Bound()) == 10
    assert outcomes.count(Declined(Reason.MEMORY_ON_ANY)) == binders - 10


@pytest.mark.parametrize(
    ("asked", "reads"),
    [
        pytest.param(4, 0, id="it has it from the one before"),
        pytest.param(5, 1, id="and asks the store before it declines"),
    ],
)
def test_a_queued_bind_uses_the_latest_state_of_the_node(asked: int, reads: int) -> None:
    calls: list[str] = []

    async def both_bound() -> list[Outcome]:
        others: list[asyncio.Task[Outcome]] = []

        async def second_comes(operation: str, when: str) -> None:
            if when == "before":
                calls.append(operation)
            if (operation, when) == ("write_spec", "before") and not others:
                others.append(asyncio.create_task(bind("q", q)))
                await until_then(lambda: pending_binds(ledger) == 2, "the second waits")

        store = EmbeddedStore(lambda events: None, lambda: 0.0)
        far = cast(Store, Faraway(store, second_comes))
        ledger = ledger_module.Ledger(
            far, judge, adopt, lambda gpunode: None, lambda: WALL_S, lambda: "id"
        )
        held = store.create_gpunode(
            GPUNode(metadata=ObjectMeta(name="n"), spec=GPUNodeSpec(initialised=True))
        )
        p, q = store.admit(pod()), store.admit(pod("q", asked=asked))

        async def bind(name: str, shown: Pod) -> Outcome:
            return await ledger.binder.bind(BindRequest("a", name, f"uid-{name}", "n", shown, held))

        return [await bind("p", p), await others[0]]

    outcomes = asyncio.run(asyncio.wait_for(both_bound(), PATIENCE_S))
    assert outcomes == [Bound(), Bound() if asked == 4 else Declined(Reason.MEMORY_ON_ANY)]
    assert calls.count("read_gpunode") == reads


def test_no_state_is_kept_for_a_node_without_binds(stage: Stage) -> None:
    kept: list[set[str]] = []
    stage.fault = lambda operation, when: kept.append(
        set(stage.ledger.awaited.binder._batcher._queues)
    )
    assert stage.bind() == Bound()
    assert {"n"} in kept
    stage.store.admit(pod("q"))
    assert stage.bind(stage.ask(pod("q"), node="gone", held=False)) == Declined(Reason.NO_REPORT)
    assert not stage.ledger.awaited.binder._batcher._queues
