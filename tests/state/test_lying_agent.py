"""An agent that lies about its own node changes nothing on another node.

Its reports about pods count only for pods that are bound to its node.
"""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from contract.gpunode import Device, PodUse, Replicas
from extender.placement.policy import Rules
from extender.state.changes import GPUNodeSeen, NodeSeen, PodSeen
from extender.state.node_whatif import rejection_beside
from extender.state.reconcile_queue import orphans, unreserved_pods
from tests.builders import (
    DISTRIBUTED,
    GIB,
    NOW_S,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    use,
)
from tests.recording import RecordingState

#: Pods of the honest node: bound to it with a reservation, without one, and pending.
BOUND, STRAY, WAITING = "uid-bound", "uid-stray", "uid-waiting"
UIDS = st.sampled_from([BOUND, STRAY, WAITING, "uid-of-the-liar", "uid-of-nobody"])
GPUS = st.sampled_from(["GPU-a", "GPU-b"])


def honest() -> RecordingState:
    """Node a with two pods and one reservation; node b with a pod of its own."""
    state = RecordingState(Rules(), 90.0, 0.0)
    state.apply(
        [
            NodeSeen(kube_node("a")),
            NodeSeen(kube_node("b")),
            PodSeen(pod(uid=BOUND, name="bound", node="a", phase="Running")),
            PodSeen(pod(uid=STRAY, name="stray", node="a", phase="Running")),
            PodSeen(pod(uid=WAITING, name="waiting")),
            PodSeen(pod(uid="uid-of-the-liar", name="own", node="b", phase="Running")),
            GPUNodeSeen(
                gpunode(
                    shared("GPU-a", free=2, allocated=2, used_bytes=9 * GIB),
                    name="a",
                    reservations={BOUND: reservation({"GPU-a": 8 * GIB}, name="bound")},
                    pods=[use(BOUND, "GPU-a", 8 * GIB), use(STRAY, "GPU-a", GIB)],
                    plugin=DISTRIBUTED,
                ),
                NOW_S,
            ),
        ]
    )
    return state


def seen_of_a(state: RecordingState) -> Any:
    """All that is decided from of the honest node."""
    snap = state.snapshot()
    return (
        snap.nodes[snap.row_of["a"]],
        state.take_outcomes(),
        [each.pod.metadata.uid for each in unreserved_pods(state, ["a"])],
        list(orphans(state, 1e9, 60.0, ["a"])),
        rejection_beside(state, state.understand(pod(uid=WAITING, name="waiting")), "a", (), NOW_S),
    )


LIES = st.builds(
    lambda devices, pods: (devices, pods),
    st.lists(
        st.builds(
            lambda uuid, used, free, healthy: shared(
                uuid,
                used_bytes=used * GIB,
                replicas=Replicas(free=free, allocated=4 - free),
                healthy=healthy,
            ),
            GPUS,
            st.integers(0, 24),
            st.integers(0, 4),
            st.booleans(),
        ),
        min_size=1,
        max_size=2,
        unique_by=lambda each: each.uuid,
    ),
    st.lists(st.builds(use, UIDS, GPUS, st.none() | st.integers(0, 64 * GIB)), max_size=6),
)


@given(LIES)
def test_hurts_only_its_own_node(lie: tuple[list[Device], list[PodUse]]) -> None:
    devices, pods = lie
    state = honest()
    before = seen_of_a(honest())
    state.take_unsettled()
    shown = gpunode(*devices, name="b", uid="gn-b", pods=pods, plugin=DISTRIBUTED)
    state.apply([GPUNodeSeen(shown, NOW_S)])
    assert "a" not in state.take_unsettled()
    assert seen_of_a(state) == before


def test_its_own_node_it_does_hurt() -> None:
    """Otherwise the test above would prove nothing: the figures of b follow b's own report."""
    seen = []
    for pods in ([], [use(BOUND, "GPU-b", 20 * GIB)]):
        state = honest()
        shown = gpunode(shared("GPU-b"), name="b", uid="gn-b", pods=pods, plugin=DISTRIBUTED)
        state.apply([GPUNodeSeen(shown, NOW_S)])
        snap = state.snapshot()
        (device,) = snap.nodes[snap.row_of["b"]].devices
        seen.append(device.free_bytes)
    assert seen == [24 * GIB - 8 * GIB, 24 * GIB - 8 * GIB - 20 * GIB]
