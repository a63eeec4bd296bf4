"""Tests the doctor's finding about pods that use memory that other pods have reserved."""

import pytest

from headroom.contract.gpunode import GPUNode
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.placement.policy import Rules
from headroom.doctor.findings import line
from headroom.doctor.pod_rules import examine_overuse
from tests.builders import NOW_S, kube_node
from tests.recording import RecordingState
from tests.state.test_overuse_decisions import EVICT, WALL_S, leaking, node_of, pod, rejected
from tests.state.test_overuse_decisions import reserved as held

FOUND = (
    "warning: n: pods use more GPU memory than they reserved, so other pods lack memory that they "
    "reserved. To do: kubectl headroom top pod shows these pods, and why they are not evicted: "
    "delete one, or request more for them"
)


@pytest.mark.parametrize(
    ("node", "rules", "expected"),
    [
        pytest.param(
            leaking(),
            Rules(),
            [f"{FOUND}; or set on_overuse: evict (docs/how-to/overuse.md)."],
            id="only reported",
        ),
        pytest.param(leaking(), EVICT, [], id="it is evicted"),
        pytest.param(
            node_of({"p": rejected(9), "q": held(12)}, {"p": 14, "q": 2}),
            EVICT,
            [f"{FOUND}."],
            id="held by a budget",
        ),
        pytest.param(leaking(12), Rules(), [], id="the other pods lack nothing"),
        pytest.param(leaking(8), Rules(), [], id="no overuse"),
    ],
)
def test_nodes_where_overuse_takes_memory_and_no_pod_is_evicted_are_reported(
    node: GPUNode, rules: Rules, expected: list[str]
) -> None:
    state = RecordingState(rules, 90.0, WALL_S - NOW_S)
    pods = [PodSeen(pod(name)) for name in "pq"]
    state.apply([NodeSeen(kube_node()), *pods, GPUNodeSeen(node, NOW_S)])
    assert [line(each) for each in examine_overuse(state.cluster, NOW_S)] == expected
