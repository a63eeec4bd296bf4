"""Tests which pods must be evicted from a node, according to the state of the cluster."""

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from headroom.contract.gate import GATE
from headroom.contract.gpunode import ADOPTED, EVICTED, GPUNode, Reservation
from headroom.contract.kube import (
    Container,
    ContainerState,
    ContainerStatus,
    OwnerReference,
    Pod,
    PodStatus,
    Terminated,
)
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.changes import Event, TimePassed
from headroom.core.eviction.misplaced_pods import Misplaced
from headroom.core.placement.policy import Rules
from tests.builders import GIB, NOW_S, gpunode, kube_node, reservation, shared, use
from tests.builders import pod as plain_pod
from tests.recording import RecordingState

NEW_FOR_S = 120.0

WALL_S = 1_795_219_200.0  # 2026-11-21T00:00:00Z
EVICT = Rules(evict_misses=True)
YES = ContainerState(terminated=Terminated())
SINCE = "2026-11-20T23:59:30Z"


def pod(
    uid: str = "p", gate: ContainerState | bool | None = None, controlled: bool = True, **of: Any
) -> Pod:
    """Return a pod whose gate is in the state ``gate``, or without a gate if it is False."""
    init = [] if gate is False else [Container(name=GATE)]
    made = plain_pod(uid=uid, name=uid, node="n", init=init, **of)
    owners = [OwnerReference(kind="ReplicaSet", name="r", controller=controlled)]
    metadata = msgspec.structs.replace(made.metadata, owner_references=owners)
    state = gate if isinstance(gate, ContainerState) else None
    statuses = [ContainerStatus(name=GATE, state=state)]
    status = PodStatus(phase=of.get("phase", "Pending"), init_container_statuses=statuses)
    return msgspec.structs.replace(made, metadata=metadata, status=status)


def made(asked_gib: int, *flags: str, since: str = SINCE) -> Reservation:
    reserved = reservation({"a": asked_gib * GIB})
    return msgspec.structs.replace(reserved, flags=list(flags), since=since)


def crowded(
    *flags: str, used: int | None = 0, neighbour: int = 20, version: str = "1", **of: Any
) -> GPUNode:
    """Return a node with 8 of 24 GiB reserved for pod p, and more than the rest for another pod."""
    return gpunode(
        shared("a", free=2, allocated=2),
        reservations={"p": made(8, *flags, **of), "q": made(neighbour)},
        pods=[use("p", "a", used), use("q", "a", GIB)],
        version=version,
    )


def state_of(node: GPUNode, *pods: Pod, rules: Rules | None = None) -> RecordingState:
    state = RecordingState(rules or Rules(), 90.0, WALL_S - NOW_S)
    neighbour = pod("q", gate=False, phase="Running")
    apply(state, NodeSeen(kube_node()), PodSeen(neighbour), *map(PodSeen, pods))
    apply(state, GPUNodeSeen(node, NOW_S))
    return state


def apply(state: RecordingState, *events: Event) -> None:
    state.apply(events)


def found(node: GPUNode, *pods: Pod, rules: Rules | None = None) -> Misplaced:
    return state_of(node, *pods, rules=rules).cluster.misplaced(node, NOW_S)


LEAVES = Misplaced(frozenset("p"))
NOBODY = Misplaced()


def test_a_misplaced_pod_that_waits_at_its_gate_is_evicted() -> None:
    assert found(crowded(), pod()) == LEAVES
    assert found(crowded(neighbour=16), pod()) == NOBODY


def test_a_pod_without_a_controller_is_reported_as_stuck_instead() -> None:
    assert found(crowded(), pod(controlled=False)) == Misplaced(stuck=frozenset("p"))


def test_a_pod_whose_gate_has_opened_is_not_evicted() -> None:
    assert found(crowded(), pod(gate=YES)) == NOBODY
    assert found(crowded(), pod(gate=YES), rules=EVICT) == NOBODY


@pytest.mark.parametrize(
    ("node", "of", "rules", "leaves"),
    [
        pytest.param(crowded(), pod(gate=False), EVICT, True, id="a new pod"),
        pytest.param(crowded(), pod(gate=False), Rules(), False, id="misses are only reported"),
        pytest.param(crowded(used=1), pod(gate=False), EVICT, False, id="it uses memory"),
        pytest.param(crowded(used=None), pod(gate=False), EVICT, False, id="it may use memory"),
        pytest.param(
            crowded(ADOPTED), pod(gate=False), EVICT, False, id="another scheduler placed it"
        ),
        pytest.param(
            crowded(since="2026-11-20T23:57:30Z"),
            pod(gate=False),
            EVICT,
            False,
            id="it started long ago",
        ),
        pytest.param(
            crowded(since="2026-11-21T01:00:00Z"),
            pod(gate=False),
            EVICT,
            False,
            id="start in the future",
        ),
        pytest.param(
            crowded(),
            pod(gate=False, controlled=False),
            EVICT,
            False,
            id="no controller would replace it",
        ),
        pytest.param(crowded(neighbour=16), pod(gate=False), EVICT, False, id="it fits"),
    ],
)
def test_without_a_gate_only_new_pods_are_evicted_and_only_if_enabled(
    node: GPUNode, of: Pod, rules: Rules, leaves: bool
) -> None:
    assert found(node, of, rules=rules) == (LEAVES if leaves else NOBODY)
    assert NEW_FOR_S == 120


def test_a_terminating_pod_is_not_evicted_again() -> None:
    assert found(crowded(), pod(deleted="2026-11-21T00:00:00Z")) == NOBODY


def test_no_pod_is_evicted_from_a_stale_node() -> None:
    state = state_of(crowded(), pod())
    assert state.cluster.misplaced(crowded(), NOW_S + 91) == NOBODY


def test_a_node_with_a_pod_to_evict_is_checked_until_it_has_left() -> None:
    state = state_of(crowded(), pod())
    assert state.cluster.crowded == ["n"]
    assert "n" in state.take_unsettled()
    apply(state, GPUNodeSeen(crowded(EVICTED, neighbour=16, version="2"), NOW_S))
    assert state.cluster.crowded == ["n"]  # Its mark must still be removed.
    apply(state, GPUNodeSeen(crowded(neighbour=16, version="3"), NOW_S))
    assert state.cluster.crowded == []


def rejection(state: RecordingState) -> Reason | None:
    (node,) = state.cluster.snapshot().nodes
    return node.reason


def test_after_an_eviction_the_node_takes_no_pods_for_a_while() -> None:
    state = state_of(crowded(), pod())
    assert rejection(state) is None
    marked = crowded(EVICTED, version="2")
    apply(state, GPUNodeSeen(marked, NOW_S))
    assert rejection(state) is Reason.EVICTED_RECENTLY
    before = state.cluster.headroom_gains.of("n")
    apply(state, TimePassed(NOW_S + 9.9))
    assert rejection(state) is Reason.EVICTED_RECENTLY
    apply(state, TimePassed(NOW_S + 10.0))
    assert rejection(state) is None
    assert state.cluster.headroom_gains.of("n") > before  # Pending pods are requeued.


def others(count: int) -> Iterable[Pod]:
    return (pod(f"r{number}") for number in range(count))


def test_no_pod_is_evicted_during_a_back_off() -> None:
    node = gpunode(
        shared("a", free=1, allocated=3),
        reservations={"p": made(20, EVICTED), "r0": made(20), "r1": made(20)},
        pods=[use(uid, "a", 0) for uid in ("p", "r0", "r1")],
    )
    state = state_of(node, pod(), *others(2))
    assert state.cluster.misplaced(node, NOW_S) == LEAVES
    apply(state, TimePassed(NOW_S + 10.0))
    assert state.cluster.misplaced(node, NOW_S).leave == {"p", "r1"}


def test_an_eviction_mark_of_another_replica_counts_before_the_watch_delivers_it() -> None:
    """Before the watch delivers the mark, no other pod is evicted, and no pod is placed on the
    node.
    """

    def of(*flags: str) -> GPUNode:
        return gpunode(
            shared("a", free=1, allocated=3),
            shared("b", free=4),
            reservations={"p": made(20, *flags), "r0": made(20), "r1": made(20)},
            pods=[use(uid, "a", 0) for uid in ("p", "r0", "r1")],
            version="2" if flags else "1",
        )

    state = state_of(of(), pod(), *others(2))
    newcomer = plain_pod("4Gi", uid="new")
    assert state.cluster.judge(newcomer, of(), NOW_S) is not Reason.EVICTED_RECENTLY
    assert state.cluster.misplaced(of(), NOW_S).leave == {"r1"}
    assert state.cluster.misplaced(of(EVICTED), NOW_S) == LEAVES
    assert state.cluster.judge(newcomer, of(EVICTED), NOW_S) is Reason.EVICTED_RECENTLY
