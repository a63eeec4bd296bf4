"""What is suggested to be tidied."""

import msgspec
import pytest

from contract.annotations import FINALIZER
from contract.gpunode import GPUNode, Reservation
from contract.kube import Node, NodeStatus, ObjectMeta, Pod
from extender.cluster.chores import dying, leftovers, uninitialised
from extender.cluster.events import GPUNodeSeen, NodeSeen, PodSeen
from extender.cluster.state import ClusterState
from extender.placement.rules import Rules
from tests.builders import GPU, NOW_S, gpunode, kube_node, pod, shared, use

WALL_S = 1_795_219_200.0  # 2026-11-21T00:00:00Z
YOUNG, OLD = "2026-11-20T23:59:30Z", "2026-11-20T23:58:30Z"


def state_with(node: GPUNode, *pods: Pod) -> ClusterState:
    state = ClusterState(Rules(), 90.0, WALL_S - NOW_S)
    state.apply([GPUNodeSeen(node, NOW_S), *(PodSeen(p) for p in pods)])
    return state


@pytest.mark.parametrize(
    ("pods", "since", "observed", "left"),
    [
        pytest.param([pod(node="n")], OLD, False, False, id="it runs here"),
        pytest.param([pod(node="n", phase="Failed")], YOUNG, False, True, id="it ended"),
        pytest.param([pod(node="m")], YOUNG, False, True, id="it went elsewhere"),
        pytest.param([pod()], YOUNG, False, False, id="it may be on its way"),
        pytest.param([pod()], OLD, False, True, id="it never came"),
        pytest.param([], YOUNG, False, False, id="unknown, but young"),
        pytest.param([], OLD, False, True, id="unknown and old"),
        pytest.param([], "then", False, True, id="of no known age"),
        pytest.param(
            [pod(node="n", phase="Failed")],
            OLD,
            True,
            False,
            id="ended, but its memory is not free",
        ),
        pytest.param([], OLD, True, False, id="deleted by force, but seen"),
    ],
)
def test_promises_that_nobody_needs(
    pods: list[Pod], since: str, observed: bool, left: bool
) -> None:
    rows = [use("uid-p", "a")] if observed else []
    held = {"uid-p": Reservation(namespace="default", name="p", since=since)}
    state = state_with(gpunode(shared("a"), promises=held, pods=rows), *pods)
    assert leftovers(state, WALL_S, 60.0) == ([("n", "uid-p")] if left else [])


def test_a_node_that_never_reported_has_leftovers_too() -> None:
    held = {"uid-p": Reservation(namespace="default", name="p", since=OLD)}
    assert leftovers(state_with(gpunode(promises=held)), WALL_S, 60.0) == [("n", "uid-p")]


def offering(name: str, *resources: str) -> Node:
    status = NodeStatus(allocatable=dict.fromkeys(resources, "1"))
    return Node(metadata=ObjectMeta(name=name), status=status)


def test_nodes_that_offer_gpus_wait_for_their_ledger() -> None:
    state = state_with(gpunode(shared("a"), name="ready"))
    nodes = [
        offering("ready", GPU),
        offering("new", "cpu", "nvidia.com/mig-1g.5gb"),
        offering("plain", "cpu"),
        Node(metadata=ObjectMeta(name="silent")),
        kube_node("begun"),
    ]
    state.apply(NodeSeen(node) for node in nodes)
    begun = gpunode(shared("b"), name="begun", initialised=False)
    silent = msgspec.structs.replace(gpunode(name="unreported", initialised=False), status=None)
    state.apply([NodeSeen(kube_node("unreported")), GPUNodeSeen(silent, NOW_S)])
    state.apply([GPUNodeSeen(begun, NOW_S)])
    assert [node.metadata.name for node in uninitialised(state)] == ["new", "begun"]


def test_gpunodes_that_somebody_deletes_are_let_go_once() -> None:
    def deleted(name: str, *finalizers: str, at: str | None = "2026-11-21T00:00:00Z") -> GPUNode:
        node = gpunode(name=name)
        metadata = msgspec.structs.replace(
            node.metadata, deletion_timestamp=at, finalizers=list(finalizers)
        )
        return msgspec.structs.replace(node, metadata=metadata)

    held = [
        deleted("held", FINALIZER),
        deleted("let-go", "somebody.else/finalizer"),
        deleted("alive", FINALIZER, at=None),
    ]
    state = ClusterState(Rules(), 90.0, WALL_S - NOW_S)
    state.apply(GPUNodeSeen(node, NOW_S) for node in held)
    assert dying(state) == ["held"]
