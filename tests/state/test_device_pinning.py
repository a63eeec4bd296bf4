"""Nodes that are pinned: who can be, what is written down, and what becomes of it."""

import json
from typing import Any

import msgspec
import pytest

from contract.annotations import DEVICE_CHOICE, PLACEMENT, DeviceChoice
from contract.gpunode import Charge, GPUNode, GPUNodeStatus, Plugin, PodUse, Replicas, Reservation
from contract.kube import Pod
from contract.reasons import Reason
from extender.placement.explain import certainty, explain
from extender.placement.fit import fit
from extender.placement.placement_record import Placement
from extender.placement.policy import Weights
from extender.placement.prediction_outcome import Basis, Result, Since, Surprise, compare
from extender.state.changes import BindBegun, GPUNodeSeen, NodeSeen, PodSeen
from tests.builders import (
    GIB,
    GPU,
    NOW_S,
    container,
    following,
    gpunode,
    kube_node,
    mig,
    pod,
    reservation,
    shared,
    status,
    terms,
    use,
)
from tests.recording import RecordingState
from tests.state.states import state_of

OBEYS = Plugin(pinning="honoured", device_list_strategy="envvar", topology_manager_policy="none")


def reported(plugin: Plugin = OBEYS, **reservations: Reservation) -> GPUNode:
    return gpunode(shared("a"), shared("b"), plugin=plugin, reservations=reservations)


def pinned(plugin: Plugin = OBEYS, **reservations: Reservation) -> RecordingState:
    node = NodeSeen(kube_node(annotations={DEVICE_CHOICE: "pinned"}))
    return state_of(node, GPUNodeSeen(reported(plugin, **reservations), NOW_S))


def follower(vram: str = "8Gi", uid: str = "uid-p", **other: Any) -> Pod:
    return pod(vram, following(container()), uid=uid, name=uid, **other)


def filtered(state: RecordingState, asked: Pod) -> tuple[Reason | None, str]:
    request: Any = state.understand(asked)
    snap = state.snapshot()
    (nearest,) = explain(fit(request, snap, snap.rows(["n"]), NOW_S), Weights()).nearest
    return nearest.reason, nearest.detail


def judged(state: RecordingState, asked: Pod, held: GPUNode | None = None) -> Placement | Reason:
    on = held or state.gpunode("n")
    assert on is not None
    return state.judge(asked, on, NOW_S)


def reserved(placement: Placement | Reason) -> Reservation:
    assert isinstance(placement, Placement), placement
    return Reservation(namespace="default", name="p", charges=list(placement.charges))


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        pytest.param(
            Plugin(pinning="ignored", device_list_strategy="cdi-annotations,cdi-cri"),
            "device list strategy cdi-annotations,cdi-cri, which overrides",
            id="the GPU Operator's default",
        ),
        pytest.param(
            Plugin(pinning="ignored", device_list_strategy="envvar"),
            "accept-nvidia-visible-devices-envvar-when-unprivileged = true",
            id="the administrator forbids it",
        ),
        pytest.param(
            Plugin(), "strategy of the device plugin is unknown", id="a plugin that is not seen"
        ),
        pytest.param(
            Plugin(device_list_strategy="cdi-annotations,envvar"),
            "cdi-annotations,envvar, which may override",
            id="two ways",
        ),
        pytest.param(
            Plugin(device_list_strategy="envvar"), "PASS_DEVICE_SPECS=false", id="who knows"
        ),
    ],
)
def test_a_node_that_cannot_be_pinned_takes_no_pods_and_shows_the_reason(
    plugin: Plugin, message: str
) -> None:
    state = pinned(plugin)
    for asked in (follower(), pod("8Gi")):
        reason, detail = filtered(state, asked)
        assert reason is Reason.CANNOT_PIN
        assert message in detail
        assert judged(state, asked) is Reason.CANNOT_PIN


def test_labels_alone_never_show_that_a_node_can_be_pinned() -> None:
    labels = {
        "nvidia.com/gpu.count": "1",
        "nvidia.com/gpu.replicas": "1",
        "nvidia.com/gpu.memory": "24576",
        "nvidia.com/gpu.sharing-strategy": "none",
    }
    node = kube_node(annotations={DEVICE_CHOICE: "pinned"})
    metadata = msgspec.structs.replace(node.metadata, labels=labels)
    silent = gpunode()
    state = state_of(
        NodeSeen(msgspec.structs.replace(node, metadata=metadata)), GPUNodeSeen(silent, NOW_S)
    )
    assert filtered(state, pod("8Gi"))[0] is Reason.CANNOT_PIN


def test_the_placement_names_the_device_and_only_that_is_charged() -> None:
    state = pinned()
    assert certainty(state.snapshot().nodes[0]) == "pinned"
    placement = judged(state, follower())
    assert isinstance(placement, Placement)
    (charge,) = placement.charges
    (device,) = charge.candidates
    assert charge.by_environment
    assert placement.annotations["headroom.gpu/devices.0"] == device
    written = json.loads(placement.annotations[PLACEMENT])
    assert written["containers"]["main"]["devices"] == [device]


def test_all_pods_that_fit_are_bound_whatever_device_the_plugin_chooses() -> None:
    """Three of 12 GiB on two devices: the third has none, though six replicas are free."""
    state, reservations = pinned(), dict[str, Reservation]()
    for number in range(4):
        reservations[f"u{number}"] = reserved(judged(state, follower("12Gi", f"u{number}")))
        state.apply([GPUNodeSeen(reported(**reservations), NOW_S)])
    charged = [device for p in reservations.values() for device in p.charges[0].candidates]
    assert sorted(charged) == ["a", "a", "b", "b"]
    assert judged(state, follower("1Gi")) is Reason.MEMORY_ON_ANY


SLICED = {"sharing": "time-slicing", "replicas": Replicas(free=4), "memory_bytes": 20 * GIB}


def test_mig_devices_are_pinned_like_gpus_and_what_they_share_is_counted_once() -> None:
    parts = mig("MIG-a", 1, **SLICED), mig("MIG-b", 1, **SLICED), mig("MIG-c", 2, **SLICED)
    held = gpunode(
        *parts,
        plugin=OBEYS,
        pods=[use("q", "MIG-a", replica="MIG-a::0")],
        reservations={"q": reservation({"MIG-a": 14 * GIB})},
    )
    node = NodeSeen(kube_node(annotations={DEVICE_CHOICE: "pinned"}))
    state = state_of(node, GPUNodeSeen(held, NOW_S))
    placement = judged(state, follower("8Gi"))
    assert isinstance(placement, Placement), placement
    (charge,) = placement.charges
    assert (charge.candidates, charge.by_environment) == ({"MIG-c": 8 * GIB}, True)
    assert placement.annotations["headroom.gpu/devices.0"] == "MIG-c"
    assert certainty(state.snapshot().nodes[0]) == "pinned"


def test_on_unshared_devices_the_variable_is_rejected_and_other_pods_are_placed() -> None:
    node = NodeSeen(kube_node(annotations={DEVICE_CHOICE: "pinned"}))
    held = gpunode(mig("MIG-a", 1), mig("MIG-b", 2), plugin=OBEYS)
    state = state_of(node, GPUNodeSeen(held, NOW_S))
    reason, detail = filtered(state, follower("8Gi"))
    assert reason is Reason.NOT_PINNED
    assert detail.startswith(f"its {GPU} devices are not shared: the plugin gives each to one pod")
    assert isinstance(judged(state, pod("8Gi")), Placement)
    assert certainty(state.snapshot().nodes[0]) == "slot-safe"


def test_it_stays_pinned_to_the_device_of_an_attempt_that_may_still_arrive() -> None:
    """The first attempt's Binding names a, which the annotation would show in any case."""
    first = reserved(judged(pinned(), follower("4Gi", "u")))
    (device,) = first.charges[0].candidates
    other = {"a": "b", "b": "a"}[device]
    # Best is the other one now, because it is fuller.
    fuller = reserved(judged(pinned(), follower("4Gi", "v")))
    charge = msgspec.structs.replace(fuller.charges[0], candidates={other: 12 * GIB})
    fuller = msgspec.structs.replace(fuller, charges=[charge])
    state = pinned(u=first, v=fuller)
    placement = judged(state, follower("4Gi", "u"))
    assert isinstance(placement, Placement)
    assert list(placement.charges[0].candidates) == [device]
    without = judged(state, follower("4Gi", "u"), reported(v=fuller))
    assert isinstance(without, Placement)
    assert list(without.charges[0].candidates) == [other]


def test_it_is_rejected_rather_than_moved_while_that_device_is_full() -> None:
    first = reserved(judged(pinned(), follower("4Gi", "u")))
    (device,) = first.charges[0].candidates
    full = msgspec.structs.replace(first.charges[0], candidates={device: 24 * GIB})
    state = pinned(u=first, v=msgspec.structs.replace(first, charges=[full]))
    assert judged(state, follower("4Gi", "u")) is Reason.MEMORY_ON_ANY
    assert isinstance(judged(state, follower("4Gi", "w")), Placement)


class TestAdoption:
    """Pods on the node without a reservation, as after its GPUNode was deleted."""

    def charged(self, asked: Pod, plugin: Plugin = OBEYS) -> list[int]:
        state = pinned(plugin)
        state.apply([PodSeen(asked)])
        return [each.reservation_bytes // GIB for each in state.snapshot().nodes[0].devices]

    def test_a_pod_that_follows_its_placement_is_on_that_device(self) -> None:
        there = follower(node="n", annotations={"headroom.gpu/devices.0": "b"})
        assert self.charged(there) == [0, 8]

    @pytest.mark.parametrize(
        "annotations",
        [
            pytest.param({}, id="nothing is written"),
            pytest.param({"headroom.gpu/devices.0": "GPU-of-another-node"}, id="no device of ours"),
        ],
    )
    def test_it_may_be_on_any_device_if_none_is_named(self, annotations: dict[str, str]) -> None:
        assert self.charged(follower(node="n", annotations=annotations)) == [8, 8]

    def test_the_plugin_decides_if_the_variable_is_ignored(self) -> None:
        there = follower(node="n", annotations={"headroom.gpu/devices.0": "b"})
        assert self.charged(there, Plugin(pinning="ignored")) == [0, 0]

    def test_an_assumed_bind_counts_on_its_future_candidates(self) -> None:
        state = pinned()
        state.apply([BindBegun(follower("20Gi", "u"), "n")])
        assert filtered(state, follower("8Gi", "v"))[0] is None
        state.apply([BindBegun(follower("20Gi", "w"), "n")])
        assert filtered(state, follower("8Gi", "v"))[0] is Reason.MEMORY_ON_ANY


def test_a_miss_is_also_charged_on_the_device_that_it_uses() -> None:
    its = reserved(judged(pinned(), follower("8Gi", "u")))
    (device,) = its.charges[0].candidates
    other = {"a": "b", "b": "a"}[device]
    held = reported(u=its)
    assert isinstance(held.status, GPUNodeStatus)
    rows = [use("u", other, 9 * GIB, replica=f"{other}::0")]
    status = msgspec.structs.replace(held.status, pods=rows)
    state = pinned()
    state.apply([GPUNodeSeen(msgspec.structs.replace(held, status=status), NOW_S)])
    found = {each.device.uuid: each for each in state.snapshot().nodes[0].devices}
    assert found[device].reservation_bytes == 8 * GIB
    assert found[other].reservation_bytes == 9 * GIB


class TestObservation:
    """A prediction like any other: hit, miss, or still open."""

    def outcomes(self, *rows: PodUse) -> list[tuple[Result, Surprise | None, tuple[str, ...]]]:
        """The outcome of the pod pinned to a, once the report has these rows of it."""
        reservation = Reservation(
            namespace="default",
            name="u",
            charges=[Charge(resource=GPU, count=1, candidates={"a": 8 * GIB}, by_environment=True)],
            attempt="1",
        )
        state = pinned()
        state.apply([PodSeen(follower(uid="u", node="n"))])
        state.apply([GPUNodeSeen(reported(u=reservation), NOW_S)])
        held = reported(u=reservation)
        assert held.status is not None
        status = msgspec.structs.replace(held.status, pods=list(rows), observed_at="later")
        state.apply([GPUNodeSeen(msgspec.structs.replace(held, status=status), NOW_S + 1)])
        return [(each.result, each.surprise, each.observed) for each in state.take_outcomes()]

    def test_a_replica_reports_nothing(self) -> None:
        assert self.outcomes(use("u", "b", 0, replica="b::0")) == []

    def test_it_is_a_hit_if_its_processes_are_on_the_chosen_device(self) -> None:
        rows = use("u", "b", 0, replica="b::0"), use("u", "a", GIB)
        assert self.outcomes(*rows) == [(Result.HIT, None, ("a",))]

    def test_and_a_miss_if_they_are_on_the_device_that_the_plugin_chose(self) -> None:
        miss = (Result.MISS, Surprise.DISOBEYED, ("b",))
        assert self.outcomes(use("u", "b", GIB, replica="b::0")) == [miss]


def test_its_use_is_not_mistaken_for_another_pod_s_replica() -> None:
    """Only one of two allocated replicas of a is explained: another pod may use it."""
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
def test_its_replica_counts_for_the_prediction_of_another_pod_and_its_use_does_not(
    replica_on: str, result: Result
) -> None:
    """The processes of u are on a. The plugin gives the replicas of a and b in turn."""
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
    basis = Basis(before, reservations, leaving=set(), device_choice=DeviceChoice.PINNED)
    since = Since(after, {}, {}, later=set(), changes=set())
    found = compare("q", reservations["q"], [(basis, since)])
    assert (found.result, found.observed) == (result, ("a",))
