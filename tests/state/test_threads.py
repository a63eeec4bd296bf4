"""Checks bind decisions on separate threads while the owner of the state applies events, such as
the deletion of the node, at every step of a decision.
"""

import sys
from types import FrameType
from typing import Any

import pytest

from headroom.contract.watched import GPUNodeGone, HeartbeatGone, HeartbeatSeen
from headroom.core.cluster import adoption, cluster, node_weigher, object_cache
from headroom.core.cluster.changes import Event
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.trackers import heartbeats
from tests.builders import GIB, NOW_S, STAMP, gpunode, kube_node, pod, reservation, shared, use
from tests.state.states import lease, seen, state_of

#: Modules whose code reads the state.
TRACED = {each.__file__ for each in (adoption, cluster, heartbeats, node_weigher, object_cache)}

NODE = gpunode(
    shared("a"), pods=[use("uid-q", "a", GIB)], reservations={"uid-q": reservation({"a": GIB})}
)
PODS = [pod("1Gi", uid=uid, name=uid, node="n") for uid in ("uid-q", "uid-bystander")]


def played(event: Event, at_step: int) -> int:
    """Judge a pod, and apply the event before this step. Return the number of steps."""
    state = state_of(*seen(kube_node(), NODE, *PODS), HeartbeatSeen(lease(STAMP), NOW_S))
    steps = 0

    def trace(frame: FrameType, kind: str, _: Any) -> Any:
        nonlocal steps
        if frame.f_code.co_filename not in TRACED:
            return None
        # Trace each opcode in lines that read several values, and otherwise each line.
        fine = frame.f_code.co_name in ("confirmation", "fresh_until_s")
        frame.f_trace_opcodes, frame.f_trace_lines = fine, not fine
        if kind in ("line", "opcode"):
            steps += 1
            if steps == at_step:
                state.apply([event])  # This call is not traced.
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        judged(state)
    finally:
        sys.settrace(before)
    return steps


def judged(state: ClusterWriter) -> object:
    return state.cluster.judge(pod("1Gi"), NODE, NOW_S)


@pytest.mark.parametrize(
    "event",
    [
        pytest.param(GPUNodeGone("n"), id="the GPUNode"),
        pytest.param(HeartbeatGone("n"), id="the heartbeat"),
    ],
)
def test_a_bind_decision_tolerates_concurrent_deletions(event: Event) -> None:
    steps = played(event, at_step=0)
    assert steps > 100
    for step in range(1, steps + 1):
        played(event, at_step=step)
