"""A pod that is said to fit for certain fits beside the assumed binds, by the whole computation."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from contract.annotations import MAX_SM
from contract.gpunode import GPUNode, Plugin, Replicas
from contract.kube import Pod
from extender.placement.certain_fit import certainly_fits
from extender.placement.policy import Rules
from extender.placement.request import VramRequest
from extender.state.changes import GPUNodeSeen, NodeSeen
from extender.state.cluster_state import ClusterState
from extender.state.node_whatif import rejection_beside
from tests.builders import (
    DISTRIBUTED,
    GIB,
    NOW_S,
    choosing,
    container,
    device,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
)
from tests.placement.worlds import World, pods, worlds

POLICIES = (
    Plugin(),
    DISTRIBUTED,
    Plugin(allocation_policy="packed", topology_manager_policy="none"),
)
SMALL = st.sampled_from(["1M", "1Gi", "2Gi", "4Gi", "a=3Gi"])


def cluster(node: GPUNode) -> ClusterState:
    state = ClusterState(Rules(), 90.0, 1_795_219_200.0 - NOW_S)
    state.apply([NodeSeen(kube_node()), GPUNodeSeen(node, NOW_S)])
    return state


def requests(state: ClusterState, of: list[Pod]) -> list[VramRequest]:
    understood = [state.understand(each) for each in of]
    return [each for each in understood if isinstance(each, VramRequest) and each.asks]


def certain(state: ClusterState, who: Pod, assumed: list[Pod]) -> bool:
    """What filter relies on; false too if the pod does not even fit alone."""
    asked, beside = requests(state, [who]), requests(state, assumed)
    return (
        len(asked) == 1
        and len(beside) == len(assumed)
        and rejection_beside(state, who, "n", (), NOW_S) is None
        and certainly_fits(asked[0], state.snapshot().nodes[0], beside)
    )


def named(of: Pod, uid: str) -> Pod:
    return replace(of, metadata=replace(of.metadata, uid=uid, name=uid))


@settings(max_examples=1500)
@given(worlds(), st.sampled_from(POLICIES), pods(SMALL), st.lists(pods(SMALL), max_size=2))
def test_certain_on_any_node(world: World, plugin: Plugin, who: Pod, others: list[Pod]) -> None:
    node = gpunode(
        *world.status.devices,
        pods=world.status.pods,
        reservations=world.reservations,
        plugin=plugin,
    )
    state = cluster(node)
    assumed = [named(other, f"other{i}") for i, other in enumerate(others)]
    if certain(state, who, assumed):
        assert rejection_beside(state, who, "n", assumed, NOW_S) is None


@settings(max_examples=500)
@given(
    st.sampled_from(POLICIES),
    st.lists(st.tuples(st.integers(0, 3), st.integers(4, 12)), min_size=1, max_size=4),
    st.lists(st.integers(1, 4), max_size=2),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_certain_on_a_shared_node_with_few_replicas(
    plugin: Plugin, gpus: list[tuple[int, int]], waiting: list[int], sizes: list[int]
) -> None:
    devices = [
        shared(f"D{i}", memory_bytes=gib * GIB, replicas=Replicas(free=free, allocated=3 - free))
        for i, (free, gib) in enumerate(gpus)
    ]
    everywhere = [each.uuid for each in devices]
    held = {
        f"w{i}": reservation(dict.fromkeys(everywhere, size * GIB))
        for i, size in enumerate(waiting)
    }
    state = cluster(gpunode(*devices, plugin=plugin, reservations=held))
    who, *assumed = (named(pod(f"{size}Gi"), f"p{i}") for i, size in enumerate(sizes))
    if certain(state, who, assumed):
        assert rejection_beside(state, who, "n", assumed, NOW_S) is None


ROOMY = [shared(f"D{i}", 4, memory_bytes=80 * GIB) for i in range(2)]


@pytest.mark.parametrize(
    ("nodes_devices", "who", "others", "expected"),
    [
        pytest.param(ROOMY, pod("8Gi"), ["8Gi", "20Gi"], True, id="much memory is free"),
        pytest.param(ROOMY, pod("44Gi"), ["16Gi", "20Gi"], True, id="exactly enough is free"),
        pytest.param(ROOMY, pod("44Gi"), ["16Gi", "21Gi"], False, id="one GiB too few"),
        pytest.param(
            ROOMY,
            pod("a=30Gi,b=40Gi", container("a"), container("b")),
            ["30Gi"],
            False,
            id="two containers can share a GPU",
        ),
        pytest.param(ROOMY, pod("8Gi"), ["50%"], False, id="a share depends on the device"),
        pytest.param(
            ROOMY, pod("8Gi", annotations={MAX_SM: "50%"}), ["8Gi"], False, id="SM activity"
        ),
        pytest.param(
            [ROOMY[0], replace(ROOMY[1], healthy=False)], pod(), ["8Gi"], False, id="unhealthy"
        ),
        pytest.param([replace(ROOMY[0], sharing="mps")], pod(), ["8Gi"], False, id="MPS"),
        pytest.param(
            [replace(ROOMY[0], replicas=Replicas(free=1, allocated=3))],
            pod("1Gi"),
            ["1Gi"],
            False,
            id="the only replica will be taken",
        ),
        pytest.param([device()], pod("1Gi"), ["1Gi"], False, id="a whole GPU will be taken"),
        pytest.param(
            ROOMY, pod("8Gi", container("a", gpus=2)), ["8Gi"], False, id="several replicas"
        ),
    ],
)
def test_when_it_is_certain(
    nodes_devices: list[object], who: Pod, others: list[str], expected: bool
) -> None:
    state = cluster(gpunode(*nodes_devices, plugin=DISTRIBUTED))  # type: ignore[arg-type]
    assumed = [named(pod(size), f"other{i}") for i, size in enumerate(others)]
    beside = requests(state, assumed)
    found = certainly_fits(requests(state, [who])[0], state.snapshot().nodes[0], beside)
    assert found is expected


def test_a_pod_that_chooses_its_devices_is_never_certain() -> None:
    state = cluster(gpunode(*ROOMY, plugin=Plugin(pinning="honoured")))
    first, second = requests(state, [pod("1Gi"), pod("1Gi", choosing(container("a")))])
    node = state.snapshot().nodes[0]
    assert certainly_fits(first, node, [first])
    assert not certainly_fits(first, node, [second])


def test_a_steered_node_is_never_certain() -> None:
    steered = Plugin(
        allocation_policy="distributed",
        topology_manager_policy="none",
        steered=["nvidia.com/gpu"],
    )
    state = cluster(gpunode(*ROOMY, plugin=steered))
    (who,) = requests(state, [pod("1Gi")])
    assert not certainly_fits(who, state.snapshot().nodes[0], [who])
