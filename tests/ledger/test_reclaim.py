"""Checks which reservations are removed or kept, that pods are requeued, and that ended pods are
found.
"""

from collections.abc import Callable

import msgspec
import pytest

from extender.ledger.bind_call import Bound, Failed
from extender.ledger.embedded_store import no_fault
from extender.ledger.store import Binding
from headroom.contract.annotations import RETRY, VRAM
from headroom.contract.gpunode import Charge, GPUNode, PodUse
from headroom.contract.kube import Pod
from headroom.core.placement.placement_record import Placement
from headroom.errors import OutcomeUnknown, StoreConflict, StoreError, StoreRejected
from tests.blocking import Ledger
from tests.ledger.stage import DEVICES, RESOURCE, WALL_S, Stage, adopt, once, pod, raises


class TestRemove:
    @pytest.fixture
    def reserved(self, stage: Stage) -> Stage:
        """Reserve memory for the pod without binding it, as after a crash."""
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

    def test_an_unbound_pod_is_touched_before_its_reservation_is_removed(
        self, reserved: Stage
    ) -> None:
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
    def test_a_pod_that_can_never_use_its_reservation_is_not_touched(
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
    def test_the_reservation_of_a_deleted_pod_that_may_still_run_is_kept(
        self, stage: Stage, deed: Callable[[Stage], object]
    ) -> None:
        assert stage.bind() == Bound()
        deed(stage)
        assert not stage.remove()
        late = stage.bind(stage.ask(pod(), held=False))  # Another attempt has the same result.
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
    def test_the_reservation_is_kept_if_the_store_does_not_answer(
        self, reserved: Stage, operation: str, kind: type[StoreError]
    ) -> None:
        reserved.fault = once(operation, "before", raises(kind))
        assert not reserved.remove()
        assert reserved.reserved == {"uid-p"}

    def test_other_reservations_are_kept(self, reserved: Stage) -> None:
        reserved.store.admit(pod("q", asked=4))
        assert reserved.bind(reserved.ask(pod("q", asked=4))) == Bound()
        assert reserved.remove()
        assert reserved.reserved == {"uid-q"}


class TestDeviceChoice:
    def test_the_choice_is_written_with_the_reservations(self, stage: Stage) -> None:
        stage.bind()
        for choice in ("steered", ""):
            assert stage.copy_choice(choice)
            assert stage.node().spec.device_choice == choice
            assert stage.reserved == {"uid-p"}

    def test_the_choice_is_written_once(self, stage: Stage) -> None:
        assert stage.copy_choice("steered")
        version = stage.node().metadata.resource_version
        assert stage.copy_choice("steered")
        assert stage.node().metadata.resource_version == version

    def test_a_concurrent_reservation_is_kept(self, stage: Stage) -> None:
        stage.fault = once("write_spec", "before", stage.rival_binds)
        assert stage.copy_choice("steered")
        assert stage.reserved == {"uid-p"}
        assert stage.node().spec.device_choice == "steered"

    def test_the_cordoned_devices_are_written(self, stage: Stage) -> None:
        for cordoned in (("GPU-a", "GPU-b"), ()):
            assert stage.copy_choice("", cordoned=cordoned)
            assert stage.node().spec.cordoned == list(cordoned)

    def test_without_a_gpunode_no_choice_is_written(self, stage: Stage) -> None:
        assert not stage.copy_choice("steered", "gone")


class TestDeparture:
    @pytest.fixture
    def bound(self, stage: Stage) -> Stage:
        stage.bind()
        return stage

    def test_the_heartbeat_is_read_after_the_pod_was_deleted(self, bound: Stage) -> None:
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
    def test_without_an_answer_no_pod_counts_as_gone(self, bound: Stage, operation: str) -> None:
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
        assert (
            stage.ledger.requeue(pod()) == theirs
        )  # This replica has the pod from before the other replica requeued it.
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

    def test_a_deleted_pod_is_not_an_error(self, stage: Stage) -> None:
        stage.store.delete_pod("a", "p")
        assert stage.ledger.requeue(pod()) is None


class TestReservedMemory:
    def test_the_need_of_a_pod_is_the_sum_of_its_replicas_at_their_largest_candidate(
        self, stage: Stage
    ) -> None:
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
