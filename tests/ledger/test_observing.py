"""Checks that in observe mode every pod is bound as requested, and that its actual use is
reserved.
"""

import pytest

from extender.ledger.bind_call import Bound, Declined, Failed
from headroom.contract.annotations import PLACEMENT
from headroom.contract.gpunode import ADOPTED, GPUNode, Reservation
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.errors import OutcomeUnknown, StoreConflict, StoreError, StoreRejected, StoreTimeout
from tests.blocking import Ledger
from tests.ledger.stage import WALL_S, Stage, adopt, judge, once, pod, raises

TROUBLES = (StoreConflict, StoreRejected, OutcomeUnknown, StoreTimeout)


class Observing(Stage):
    """A stage whose ledger is in observe mode while ``observes`` is set."""

    observes = True

    def new_ledger(self, name: str) -> Ledger:
        numbers = iter(range(1, 1000))

        def flagged(pod: Pod, gpunode: GPUNode) -> Reservation | None:
            reservation = adopt(pod, gpunode)
            if reservation is not None:
                reservation.flags.append(ADOPTED)
            return reservation

        return Ledger(
            self.store,
            judge,
            flagged,
            self.written.append,
            lambda: WALL_S,
            lambda: f"{name}-{next(numbers)}",
            observes=lambda: self.observes,
        )

    def charged(self, uid: str) -> tuple[int, list[str]]:
        reservation = self.node().spec.reservations[uid]
        return reservation.charges[0].candidates["GPU-0"], reservation.flags


@pytest.fixture
def stage() -> Observing:
    return Observing()


def test_a_pod_that_fits_is_bound_as_usual(stage: Observing) -> None:
    assert stage.bind(stage.ask(pod())) == Bound()
    assert stage.pod().annotation(PLACEMENT) == "6 on n"
    assert stage.charged("uid-p") == (6, [])


def test_a_pod_that_does_not_fit_is_bound_and_charged_like_an_unreserved_pod(
    stage: Observing,
) -> None:
    stage.bind(stage.ask(pod()))
    stage.store.admit(pod("q"))
    assert stage.bind(stage.ask(pod("q"))) == Bound(despite=Reason.MEMORY_ON_ANY)
    assert stage.pod("q").node == "n"
    assert stage.pod("q").annotation(PLACEMENT) is None
    assert stage.charged("uid-q") == (6, [ADOPTED])  # The actual use is 12 of 10 bytes.
    stage.observes = False
    stage.store.admit(pod("r", asked=1))
    assert stage.bind(stage.ask(pod("r", asked=1))) == Declined(Reason.MEMORY_ON_ANY)


def test_an_uninitialised_node_is_not_charged_before_its_pods(
    stage: Observing,
) -> None:
    stage.new_node("new")
    assert stage.bind(stage.ask(pod(), "new")) == Bound(despite=Reason.NOT_INITIALISED)
    assert stage.pod().node == "new"
    assert stage.node("new").spec.reservations == {}
    assert stage.initialise("new") == ["new"]
    assert set(stage.node("new").spec.reservations) == {"uid-p"}


def test_a_missing_gpunode_does_not_prevent_a_bind(stage: Observing) -> None:
    assert stage.bind(stage.ask(pod(), "unknown")) == Bound(despite=Reason.NO_REPORT)
    assert stage.pod().node == "unknown"


@pytest.mark.parametrize("kind", TROUBLES)
def test_a_failed_write_does_not_prevent_a_bind(stage: Observing, kind: type[StoreError]) -> None:
    def fault(operation: str, when: str) -> None:
        if (operation, when) == ("write_spec", "before"):
            raises(kind)()

    stage.fault = fault
    assert isinstance(stage.bind(stage.ask(pod())), Bound)
    assert stage.pod().node == "n"
    assert stage.reserved == set()  # The pod is unreserved until the watch delivers it.


@pytest.mark.parametrize("kind", TROUBLES)
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("operation", ["read_gpunode", "read_pod", "write_spec", "bind"])
@pytest.mark.parametrize("full", [False, True])
def test_after_any_fault_the_answer_matches_the_state(
    stage: Observing, kind: type[StoreError], when: str, operation: str, full: bool
) -> None:
    if full:
        stage.bind(stage.ask(pod()))
        stage.store.admit(pod("q"))
    name = "q" if full else "p"
    stage.fault = once(operation, when, raises(kind))
    outcome = stage.bind(stage.ask(pod(name), held=False))
    assert isinstance(outcome, Bound) == (stage.pod(name).node == "n")
    assert isinstance(outcome, Bound)
    if f"uid-{name}" in stage.reserved:
        assert stage.charged(f"uid-{name}")[0] == 6


def test_a_deleted_pod_or_a_pod_on_another_node_is_not_bound(stage: Observing) -> None:
    gone = stage.ask(pod("gone"))
    assert stage.bind(gone) == Failed("pod a/gone does not exist")
    stage.new_node("other", initialised=True)
    stage.rival_binds("other")
    assert stage.bind(stage.ask(pod(), held=False)) == Failed("pod a/p is bound to node other")
