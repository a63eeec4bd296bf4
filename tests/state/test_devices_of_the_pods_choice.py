"""Tests charges and predictions of pods that choose their devices by NVIDIA_VISIBLE_DEVICES."""

from typing import Any

import msgspec
import pytest

from headroom.contract.gpunode import Charge, GPUNode, Plugin, PodUse, Reservation
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import BindBegun
from headroom.core.placement.policy import Rules, VisibleDevices
from headroom.core.placement.prediction_outcome import Basis, Result, Since, Surprise, compare
from tests.builders import (
    GIB,
    GPU,
    NOW_S,
    choosing,
    container,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    status,
    terms,
    use,
)
from tests.recording import RecordingState
from tests.state.states import state_of

CHARGE = Rules(visible_devices=VisibleDevices.CHARGE)
#: A reservation on one of two devices, because the other device was added later.
ON_A = Reservation(
    namespace="default",
    name="u",
    charges=[Charge(resource=GPU, count=1, candidates={"a": 8 * GIB}, by_environment=True)],
    attempt="1",
)


def reported(*rows: PodUse, plugin: Plugin | None = None, **how: Any) -> GPUNode:
    return gpunode(shared("a"), shared("b"), plugin=plugin, pods=rows, **how)


def state(held: GPUNode) -> RecordingState:
    return state_of(NodeSeen(kube_node()), GPUNodeSeen(held, NOW_S), rules=CHARGE)


def choosing_pod(vram: str = "8Gi", uid: str = "u", **other: Any) -> Pod:
    return pod(vram, choosing(container()), uid=uid, name=uid, **other)


@pytest.mark.parametrize(
    ("plugin", "charged"),
    [
        pytest.param(Plugin(), [8, 8], id="it may be on any device"),
        pytest.param(Plugin(ignores_visible_devices=True), [0, 0], id="the plugin decides"),
    ],
)
def test_an_unreserved_pod_is_charged_on_every_device(plugin: Plugin, charged: list[int]) -> None:
    held = state(reported(plugin=plugin))
    held.apply([PodSeen(choosing_pod(node="n"))])
    devices = held.cluster.snapshot().nodes[0].devices
    assert [each.reservation_bytes // GIB for each in devices] == charged


def test_an_assumed_bind_counts_on_every_device() -> None:
    held = state(reported())
    held.apply([BindBegun(choosing_pod("20Gi"), "n")])
    assert [each.reservation_bytes // GIB for each in held.cluster.snapshot().nodes[0].devices] == [
        20,
        20,
    ]


def test_a_miss_is_also_charged_on_the_device_that_it_uses() -> None:
    rows = [use("u", "b", 9 * GIB, replica="b::0")]
    a, b = state(reported(*rows, reservations={"u": ON_A})).cluster.snapshot().nodes[0].devices
    assert (a.reservation_bytes, b.reservation_bytes) == (8 * GIB, 9 * GIB)


class TestObservation:
    """The prediction for such a pod is also a hit, a miss or pending."""

    def outcomes(self, *rows: PodUse) -> list[tuple[Result, Surprise | None, tuple[str, ...]]]:
        """Return the outcomes after the report has these rows of the pod."""
        held = state(reported(reservations={"u": ON_A}))
        held.apply([PodSeen(choosing_pod(node="n"))])
        later = reported(*rows, observed_at="later", reservations={"u": ON_A})
        held.apply([GPUNodeSeen(later, NOW_S + 1)])
        return [(each.result, each.surprise, each.observed) for each in held.take_outcomes()]

    def test_a_replica_alone_does_not_confirm_the_prediction(self) -> None:
        assert self.outcomes(use("u", "b", 0, replica="b::0")) == []

    def test_the_prediction_is_a_hit_if_the_pod_uses_the_chosen_device(self) -> None:
        rows = use("u", "b", 0, replica="b::0"), use("u", "a", GIB)
        assert self.outcomes(*rows) == [(Result.HIT, None, ("a",))]

    def test_the_prediction_is_a_miss_if_the_pod_uses_the_device_of_its_replica(self) -> None:
        miss = (Result.MISS, Surprise.DISOBEYED, ("b",))
        assert self.outcomes(use("u", "b", GIB, replica="b::0")) == [miss]


def test_use_of_a_device_does_not_explain_an_allocated_replica() -> None:
    """Only one of two allocated replicas of device a is explained, so another pod may hold the
    second replica.
    """
    two = shared("a", free=2, allocated=2), shared("b", free=4)
    reservations = {
        "u": Reservation(
            namespace="default",
            name="u",
            charges=[Charge(resource=GPU, count=1, candidates={"a": 2 * GIB}, by_environment=True)],
        ),
        "q": reservation({"b": 5 * GIB}, name="q"),
    }
    rows = [use("u", "a", GIB), use("o", "a", 0, replica="a::0")]
    plugin = Plugin(allocation_policy="distributed", topology_manager_policy="none")
    a, _ = terms(*two, pods=rows, reservations=reservations, plugin=plugin)
    assert a.unconfirmed_bytes == 5 * GIB


@pytest.mark.parametrize(("replica_on", "result"), [("b", Result.HIT), ("a", Result.MISS)])
def test_predictions_for_other_pods_count_the_replica_and_not_the_use(
    replica_on: str, result: Result
) -> None:
    """The processes of u are on a. The plugin allocates replicas of a and b alternately."""
    charge = Charge(resource=GPU, count=1, candidates={"a": 2 * GIB}, by_environment=True)
    reservations = {
        "u": Reservation(namespace="default", name="u", charges=[charge]),
        "q": reservation({"a": 5 * GIB, "b": 5 * GIB}),
    }
    plugin = Plugin(allocation_policy="distributed", topology_manager_policy="none")
    before = status(shared("a"), shared("b"), plugin=plugin)
    rows = [use("u", replica_on, replica=f"{replica_on}::0"), use("u", "a", GIB)]
    rows.append(use("q", "a", replica="a::1"))
    after = msgspec.structs.replace(before, pods=rows)
    basis = Basis(before, reservations, leaving=set())
    since = Since(after, {}, {}, later=set(), changes=set())
    found = compare("q", reservations["q"], [(basis, since)])
    assert (found.result, found.observed) == (result, ("a",))
