"""Checks that simulated steering finds pods that wait only because the device plugin chooses the
device.
"""

from typing import Any

import msgspec
import pytest

from headroom.contract.annotations import CORDON, DEVICE_CHOICE
from headroom.contract.device_choice import STEERING_NOT_PERMITTED
from headroom.contract.gpunode import GPUNode, Plugin
from headroom.contract.kube import Pod, SchedulingGate
from headroom.contract.reasons import Reason
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.fit import fit
from headroom.core.placement.request import VramRequest
from headroom.core.whatif.pending_pods import Explaining
from headroom.core.whatif.steering_whatif import Gain, Most, steerable, steering_gain
from tests.builders import GIB, GPU, NOW_S, container, gate, gpunode, kube_node, pod, shared
from tests.state.states import seen, state_of
from tests.state.test_pending_pods import decision

PERMITTED = Plugin(
    allocation_policy="distributed", topology_manager_policy="none", steering_permitted=True
)
COMMAND = "kubectl annotate --overwrite node a headroom.gpu/device-choice=steered"


def uneven(name: str = "a", plugin: Plugin = PERMITTED, **numa: int) -> GPUNode:
    """Return a node with three GPUs of 24 GiB. The plugin's next choice has 4 GiB free, and the
    other GPUs have 22 and 10 GiB.
    """

    def used(gib: int) -> dict[str, Any]:
        return {"used_bytes": gib * GIB, "unattributed_bytes": gib * GIB}

    return gpunode(
        shared(f"{name}-1", free=4, allocated=0, **used(20), numa_node=numa.get("first")),
        shared(f"{name}-2", free=3, allocated=1, **used(2), numa_node=numa.get("others")),
        shared(f"{name}-3", free=3, allocated=1, **used(14), numa_node=numa.get("others")),
        name=name,
        uid=f"gn-{name}",
        plugin=plugin,
    )


def cluster(
    *pods: Pod, plugin: Plugin = PERMITTED, choice: str = "", names: tuple[str, ...] = ("a",)
) -> ClusterWriter:
    annotations = {DEVICE_CHOICE: choice} if choice else None
    nodes = (kube_node(name, annotations) for name in names)
    return state_of(*seen(*nodes, *(uneven(name, plugin) for name in names), *pods))


def verdict(state: ClusterWriter, size: str) -> Reason | None:
    snap, request = state.cluster.snapshot(), state.cluster.understand(pod(size))
    assert isinstance(request, VramRequest)
    return fit(request, snap, snap.rows(["a"]), NOW_S).reason(0)


def waiting(*sizes: str) -> list[Pod]:
    """Return pending pods with gates in the order of their creation."""
    init = [gate()]
    pods = [pod(size, init=init, uid=f"u{i}", name=f"p{i}") for i, size in enumerate(sizes)]
    return [
        msgspec.structs.replace(
            each,
            metadata=msgspec.structs.replace(
                each.metadata, creation_timestamp=f"2026-11-21T00:00:0{i}Z"
            ),
        )
        for i, each in enumerate(pods)
    ]


def gain_of(state: ClusterWriter, **most: int) -> Gain | None:
    return steering_gain(state.cluster, state.cluster.snapshot(), NOW_S, Most(**most))


@pytest.mark.parametrize("choice", ["", "predicted"])
def test_pods_that_steering_would_place_are_counted_with_their_bytes(choice: str) -> None:
    # 16 GiB go to the second GPU, 9 GiB to the third, and 16 GiB more fit nowhere.
    state = cluster(*waiting("16Gi", "9Gi", "16Gi"), choice=choice)
    assert verdict(state, "9Gi") is Reason.MEMORY_ON_SOME
    gain = gain_of(state)
    assert gain is not None
    assert (gain.waiting_pods, gain.waiting_bytes) == (3, 41 * GIB)
    assert (gain.placed_pods, gain.placed_bytes) == (2, 25 * GIB)
    assert [each.to_do for each in gain.nodes] == [COMMAND]
    assert gain.sentence == (
        "3 pending pods with 41.0 GiB wait although a GPU has enough free memory for each of them, "
        "because the device plugin chooses the device; steering 1 node would place 2 of them "
        "(25.0 GiB)"
    )


def wide(each: Pod, gpus: int = 2) -> Pod:
    """Return the pod with a container that requests several GPUs."""
    spec = msgspec.structs.replace(each.spec, containers=[container(gpus=gpus)])
    return msgspec.structs.replace(each, spec=spec)


@pytest.mark.parametrize("choice", ["", "gated"])
def test_a_pod_with_several_gpus_is_counted_with_the_memory_of_all(choice: str) -> None:
    """A steered node gives the pod different GPUs, so the pod fits on the second and the
    third GPU.
    """
    pods = waiting("9Gi", "16Gi")
    gain = gain_of(cluster(wide(pods[0]), choice=choice))
    assert gain is not None
    assert (gain.placed_pods, gain.placed_bytes) == (1, 18 * GIB)
    assert gain.sentence == (
        "1 pending pod with 18.0 GiB waits although 2 GPUs have enough free memory for it, because "
        "the device plugin chooses the devices; steering 1 node would place it"
    )
    # 16 GiB fit on the second GPU only if no other pod is there.
    gain = gain_of(cluster(wide(pods[0]), pods[1], choice=choice))
    assert gain is not None
    assert gain.sentence == (
        "2 pending pods with 34.0 GiB wait although enough GPUs have enough free memory for each "
        "of them, because the device plugin chooses the devices; steering 1 node would place 1 of "
        "them (18.0 GiB)"
    )
    assert gain_of(cluster(wide(waiting("11Gi")[0]), choice=choice)) is None


@pytest.mark.parametrize("choice", ["", "gated"])
def test_several_shares_that_fit_on_no_single_gpu_are_helped_too(choice: str) -> None:
    """Each GPU has 10 GiB free. The plugin could allocate two shares of 6 GiB on one of them."""
    used = {"used_bytes": 14 * GIB, "unattributed_bytes": 14 * GIB}
    held = gpunode(shared("a-1", **used), shared("a-2", **used), name="a", plugin=PERMITTED)
    annotations = {DEVICE_CHOICE: choice} if choice else None
    shares = wide(pod(None, init=[gate()], uid="u0", name="p0"))
    state = state_of(*seen(kube_node("a", annotations), held, shares))
    request, snap = state.cluster.understand(shares), state.cluster.snapshot()
    assert isinstance(request, VramRequest)
    rejected = fit(request, snap, snap.rows(["a"]), NOW_S).reason(0)
    assert rejected is Reason.MEMORY_ON_ANY
    gain = gain_of(state)
    assert gain is not None
    assert (gain.placed_pods, gain.placed_bytes) == (1, 12 * GIB)


def test_a_gated_node_is_steered_by_replacing_its_annotation() -> None:
    gain = gain_of(cluster(*waiting("16Gi"), choice="gated"))
    assert gain is not None
    assert [each.to_do for each in gain.nodes] == [COMMAND]


def test_the_event_names_the_gpus_and_their_memory_for_a_pod_with_several() -> None:
    asks = wide(pod("9Gi", uid="uw", name="waits"))
    state = cluster()
    rejecting = decision(asks, {Reason.MEMORY_ON_SOME: 1})
    notice = Explaining(state.cluster, state.cluster.snapshot(), NOW_S).notice(asks, rejecting)
    assert notice is not None
    assert (
        "If Headroom chose 2 different GPUs with 9.0 GiB each, it would fit on node a: kubectl"
        in notice.message
    )


def test_one_pod_is_described_in_the_singular() -> None:
    gain = gain_of(cluster(*waiting("16Gi")))
    assert gain is not None
    assert gain.sentence == (
        "1 pending pod with 16.0 GiB waits although a GPU has enough free memory for it, because "
        "the device plugin chooses the device; steering 1 node would place it"
    )


def test_the_prediction_comes_true_on_a_steered_node() -> None:
    steered = msgspec.structs.replace(PERMITTED, steered=[GPU])
    state = cluster(plugin=steered, choice="steered")
    assert verdict(state, "16Gi") is None
    assert verdict(state, "22Gi") is None
    assert verdict(state, "23Gi") is Reason.MEMORY_ON_ANY


@pytest.mark.parametrize(
    ("size", "plugin", "choice"),
    [
        pytest.param("3Gi", {}, "", id="the pod fits"),
        pytest.param("23Gi", {}, "", id="no GPU has enough memory"),
        pytest.param("23Gi", {"steered": [GPU]}, "steered", id="steered already"),
    ],
)
def test_no_gain_is_reported_if_steering_changes_nothing(
    size: str, plugin: dict[str, Any], choice: str
) -> None:
    state = cluster(
        *waiting(size), plugin=msgspec.structs.replace(PERMITTED, **plugin), choice=choice
    )
    assert gain_of(state) is None


def test_pods_with_scheduling_gates_and_invalid_requests_do_not_count() -> None:
    gated = pod("16Gi", uid="g", name="g")
    spec = msgspec.structs.replace(gated.spec, scheduling_gates=(SchedulingGate("later"),))
    state = cluster(msgspec.structs.replace(gated, spec=spec), pod("much", uid="m", name="m"))
    assert gain_of(state) is None


def test_a_node_whose_topology_manager_overrules_the_choice_is_not_suggested() -> None:
    plugin = msgspec.structs.replace(PERMITTED, topology_manager_policy="single-numa-node")
    for numa, helps in (({"first": 0, "others": 1}, False), ({"first": 0, "others": 0}, True)):
        node = uneven(plugin=plugin, **numa)
        state = state_of(*seen(kube_node("a"), node, *waiting("16Gi")))
        assert verdict(state, "16Gi") is Reason.MEMORY_ON_SOME
        assert (gain_of(state) is not None) is helps


def test_ineligible_nodes_are_not_suggested() -> None:
    (asks,) = waiting("16Gi")
    spec = msgspec.structs.replace(asks.spec, node_selector={"pool": "mine"})
    assert gain_of(cluster(msgspec.structs.replace(asks, spec=spec))) is None


def test_the_numbers_of_simulated_pods_and_nodes_are_limited() -> None:
    names = ("a", "b", "c")
    pods = waiting("16Gi", "16Gi", "16Gi", "16Gi")
    gain = gain_of(cluster(*pods, names=names))
    assert gain is not None
    assert [each.node for each in gain.nodes] == ["a", "b", "c"]
    gain = gain_of(cluster(*pods, names=names), nodes=2)
    assert gain is not None
    assert [each.node for each in gain.nodes] == ["a", "b"]
    gain = gain_of(cluster(*pods, names=names), pods=1)
    assert gain is not None
    assert (gain.waiting_pods, gain.placed_pods) == (1, 1)
    mixed = waiting("16Gi", "17Gi", "16Gi", "17Gi")
    gain = gain_of(cluster(*mixed, names=names), kinds=1)
    assert gain is not None
    assert (gain.waiting_pods, gain.waiting_bytes) == (2, 32 * GIB)


def test_a_kubelet_that_cannot_be_steered_is_reported_with_the_reason() -> None:
    names = ("a", "b")
    pods = waiting("16Gi")
    new = msgspec.structs.replace(PERMITTED, kubelet_version="v1.37.2")
    assert gain_of(cluster(*pods, names=names, plugin=new)) is None
    old = msgspec.structs.replace(PERMITTED, kubelet_version="v1.36.3")
    assert gain_of(cluster(*pods, names=names, plugin=old)) is not None
    found = steerable(cluster(plugin=new).cluster, "a")
    assert found is not None
    assert found.obstacle.startswith("steering needs a kubelet older than 1.37")


@pytest.mark.parametrize(
    ("plugin", "choice", "to_do"),
    [
        pytest.param({}, "", COMMAND, id="permitted"),
        pytest.param({"steering_permitted": None}, "", COMMAND, id="unknown"),
        pytest.param(
            {"steering_permitted": False},
            "",
            f"steering node a is {STEERING_NOT_PERMITTED}; permit it, then {COMMAND}",
            id="read-only",
        ),
        pytest.param(
            {"steering_permitted": False, "choice_obstacle": STEERING_NOT_PERMITTED},
            "steered",
            f"remove the obstacle to steering node a: {STEERING_NOT_PERMITTED}",
            id="requested, read-only",
        ),
        pytest.param(
            {},
            "steered",
            "remove the obstacle to steering node a: its agent has not reported that it steers",
            id="requested, not reported",
        ),
    ],
)
def test_the_suggestion_depends_on_the_permissions_of_the_agent(
    plugin: dict[str, Any], choice: str, to_do: str
) -> None:
    state = cluster(plugin=msgspec.structs.replace(PERMITTED, **plugin), choice=choice)
    found = steerable(state.cluster, "a")
    assert found is not None
    assert found.to_do == to_do
    assert found.known == (plugin.get("steering_permitted", True) is not None)


def event(state: ClusterWriter, size: str = "16Gi") -> str:
    asks = pod(size, uid="uw", name="waits")
    rejecting = decision(asks, {Reason.MEMORY_ON_SOME: 1})
    notice = Explaining(state.cluster, state.cluster.snapshot(), NOW_S).notice(asks, rejecting)
    assert notice is not None
    return notice.message


def test_the_event_contains_the_node_to_steer_and_the_command() -> None:
    assert event(cluster()) == (
        "Nearest: short by 12.0 GiB of 16.0 GiB on GPU a-1 of a. If Headroom chose the "
        f"device, it would fit on node a: {COMMAND}. More: kubectl headroom why -n default waits"
    )
    assert (
        "If Headroom chose the device, it would fit on one of 3 nodes, such as a: kubectl"
        in event(cluster(names=("c", "a", "b")))
    )


def test_the_event_stays_equal_while_the_cause_lasts() -> None:
    before = cluster(names=("a", "b"))
    # Another pod arrives on the suggested GPU, and there is still enough memory.
    devices = list(uneven().status.devices)  # type: ignore[union-attr]
    devices[1] = msgspec.structs.replace(devices[1], used_bytes=3 * GIB, unattributed_bytes=3 * GIB)
    after = gpunode(*devices, uid="gn-a", name="a", version="2", plugin=PERMITTED)
    shown = event(before)
    before.apply(seen(after))
    assert event(before) == shown


def test_the_event_contains_the_obstacle() -> None:
    plugin = msgspec.structs.replace(PERMITTED, steering_permitted=False)
    shown = event(cluster(plugin=plugin))
    assert f"steering node a is {STEERING_NOT_PERMITTED}; permit it, then {COMMAND}." in shown
    assert len(shown) < 1024


def test_the_event_does_not_mention_steering_if_it_does_not_help() -> None:
    assert "Headroom chose" not in event(cluster(), "23Gi")


def test_a_pod_on_a_node_without_a_report_is_not_simulated() -> None:
    state = state_of(*seen(kube_node("bare"), *waiting("16Gi")))
    assert steerable(state.cluster, "bare") is None
    assert gain_of(state) is None


def test_a_pod_that_fits_on_another_node_does_not_count() -> None:
    free = gpunode(shared("free"), name="b", uid="gn-b", plugin=PERMITTED)
    state = state_of(*seen(kube_node("a"), uneven(), kube_node("b"), free, *waiting("16Gi")))
    assert verdict(state, "16Gi") is Reason.MEMORY_ON_SOME
    assert gain_of(state) is None


def test_nodes_for_pods_with_different_selectors_are_limited_together() -> None:
    nodes = [
        msgspec.structs.replace(
            each, metadata=msgspec.structs.replace(each.metadata, labels={"pool": each_name})
        )
        for each_name in ("a", "b")
        for each in (kube_node(each_name),)
    ]
    pods = [
        msgspec.structs.replace(
            each, spec=msgspec.structs.replace(each.spec, node_selector={"pool": pool})
        )
        for each, pool in zip(waiting("16Gi", "16Gi"), ("a", "b"), strict=True)
    ]
    state = state_of(*seen(*nodes, uneven("a"), uneven("b"), *pods))
    for limit, placed in ((2, ["a", "b"]), (1, ["a"])):
        gain = gain_of(state, nodes=limit)
        assert gain is not None
        assert [each.node for each in gain.nodes] == placed
        assert (gain.waiting_pods, gain.placed_pods) == (limit, limit)


def test_steering_avoids_unhealthy_and_cordoned_devices() -> None:
    free = shared("a-1", free=4), shared("a-2", free=3, allocated=1)
    unhealthy = msgspec.structs.replace(free[0], healthy=False, health_reason="XID 79")
    cordon = {CORDON: "a-1"}
    cases = (
        ((unhealthy, free[1]), None, Reason.UNHEALTHY_DEVICE),
        (free, cordon, Reason.CORDONED_DEVICE),
    )
    for devices, annotations, rejected in cases:
        held = gpunode(*devices, name="a", uid="gn-a", plugin=PERMITTED)
        state = state_of(*seen(kube_node("a", annotations), held, *waiting("16Gi")))
        assert verdict(state, "16Gi") is rejected
        gain = gain_of(state)
        assert gain is not None
        assert [each.node for each in gain.nodes] == ["a"]
