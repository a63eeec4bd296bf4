"""Checks that a pod that another scheduler bound gets exactly one reservation, even if other
clients write concurrently.
"""

from collections.abc import Callable

import msgspec
import pytest

from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.kube import PodStatus
from headroom.errors import OutcomeUnknown, StoreConflict
from tests.ledger.stage import DEVICES, Stage, once, pod, raises


@pytest.fixture
def stage() -> Stage:
    """A stage on which another scheduler has bound pod ``b`` to the node."""
    stage = Stage()
    stage.store.admit(pod("b", asked=8, node="n"))
    return stage


def charge(stage: Stage, node: str = "n") -> bool:
    unreserved_pod = stage.pod("b")
    return stage._watched(lambda: stage.ledger.charge(node, unreserved_pod))


def test_an_unreserved_pod_is_charged_even_if_that_overcommits(stage: Stage) -> None:
    assert stage.bind()
    assert charge(stage)
    reservations = stage.node().spec.reservations
    assert {uid: each.charges[0].candidates["GPU-0"] for uid, each in reservations.items()} == {
        "uid-p": 6,
        "uid-b": 8,
    }
    assert (reservations["uid-b"].attempt, reservations["uid-b"].since) == (
        "L-2",
        "1970-01-12T13:46:40.000+00:00",
    )
    assert stage.written[-1] == stage.node()


def test_an_existing_reservation_is_not_changed(stage: Stage) -> None:
    assert charge(stage)
    before = stage.node()
    assert charge(stage)
    assert stage.calls == ["read_gpunode"]
    assert stage.node() == before


def delete(stage: Stage) -> None:
    stage.store.delete_pod("a", "b")


def succeed(stage: Stage) -> None:
    held = stage.pod("b")
    stage.store.delete_pod("a", "b")
    stage.store.admit(msgspec.structs.replace(held, status=PodStatus(phase="Succeeded")))


def replace(stage: Stage) -> None:
    stage.store.delete_pod("a", "b")
    stage.store.admit(pod("b", uid="heir", node="n"))


@pytest.mark.parametrize("deed", [delete, succeed, replace])
def test_a_pod_that_left_the_node_is_not_charged(
    stage: Stage, deed: Callable[[Stage], None]
) -> None:
    stage.fault = once("read_gpunode", "after", lambda: deed(stage))
    assert charge(stage)
    assert stage.reserved == set()


def test_a_pod_on_another_node_is_not_charged(stage: Stage) -> None:
    stage.new_node("m", initialised=True)
    assert charge(stage, "m")
    assert stage.node("m").spec.reservations == {}


def test_an_uninitialised_node_is_skipped(stage: Stage) -> None:
    stage.new_node("m")
    stage.store.admit(pod("c", node="m"))
    assert stage.ledger.charge("m", stage.pod("c"))
    assert stage.node("m").spec.reservations == {}


def test_a_conflict_is_retried(stage: Stage) -> None:
    stage.fault = once("write_spec", "before", lambda: stage.store.report([("n", DEVICES)]))
    assert charge(stage)
    assert stage.reserved == {"uid-b"}
    assert stage.calls.count("write_spec") == 2


@pytest.mark.parametrize("operation", ["read_gpunode", "read_pod", "write_spec"])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_failed_request_is_left_for_the_next_round(
    stage: Stage, operation: str, when: str
) -> None:
    stage.fault = once(operation, when, raises(OutcomeUnknown))
    assert not charge(stage)
    assert charge(stage)
    assert stage.reserved == {"uid-b"}


def test_charging_gives_up_on_a_node_that_changes_every_time(stage: Stage) -> None:
    def conflict(operation: str, when: str) -> None:
        if (operation, when) == ("write_spec", "before"):
            raise StoreConflict("always")

    stage.fault = conflict
    assert not charge(stage)


def test_a_node_with_unknown_devices_is_skipped(stage: Stage) -> None:
    """A reservation without candidates would never charge a device."""
    stage.store.report([("n", GPUNodeStatus())])
    assert not charge(stage)
    assert stage.reserved == set()
    stage.store.report([("n", DEVICES)])
    assert charge(stage)
    assert stage.reserved == {"uid-b"}
