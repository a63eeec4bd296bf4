"""The room that filter leaves for pods whose bind must come next: what is remembered of a kind of
pods equals a new computation."""

from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from contract.gpunode import GPUNode, Plugin
from contract.kube import Pod
from contract.reasons import Reason
from extender.placement.fit import fit
from extender.placement.policy import Rules
from extender.placement.request import VramRequest
from extender.placement.snapshot import REASONS
from extender.state import held_memory, node_whatif
from extender.state.changes import BindBegun, BindEnded, GPUNodeSeen, NodeSeen
from extender.state.cluster_writer import ClusterWriter
from extender.state.held_memory import HeldMemory
from tests.builders import (
    GIB,
    NOW_S,
    choosing,
    container,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
)
from tests.examples import examples

BIND_FOLLOWS_WITHIN_S = 0.25

FULL = Reason.HELD
#: The wall time at which the monotonic clock of these tests was 0.
EPOCH_S = 1_795_219_200.0 - NOW_S
SIZES = st.sampled_from(["4Gi", "8Gi", "12Gi", "50%", "a=8Gi"])


def cluster(node: GPUNode | None = None) -> ClusterWriter:
    state = ClusterWriter(Rules(), 90.0, EPOCH_S)
    node = node or gpunode(shared("A"), shared("B", memory_bytes=16 * GIB))
    state.apply([NodeSeen(kube_node()), GPUNodeSeen(node, NOW_S)])
    return state


def wanted(state: ClusterWriter, of: Pod) -> VramRequest:
    request = state.understand(of)
    assert isinstance(request, VramRequest)
    return request


def asked(
    state: ClusterWriter,
    who: Pod,
    now_s: float = NOW_S,
    held: HeldMemory | None = None,
) -> Reason | None:
    """Why the pod is kept from the one node, which it would fit on by itself."""
    held = held or HeldMemory(state)
    codes, snap = np.zeros(1, np.int8), state.snapshot()
    left = held.reject_nodes(who, wanted(state, who), np.zeros(1, np.int64), codes, snap, now_s)
    reason = REASONS[int(codes[0])]
    assert left == (reason is not None)
    return reason


def named(size: str, uid: str, **of: Any) -> Pod:
    return pod(size, container("a"), uid=uid, name=uid, **of)


def looks() -> Any:
    """How often nothing was remembered."""
    return patch.object(held_memory, "rejection_beside", wraps=node_whatif.rejection_beside)


@settings(max_examples=examples(500))
@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=12))
def test_cached_results_equal_recomputed_ones(steps: list[tuple[str, bool]]) -> None:
    state = cluster()
    held = HeldMemory(state)
    for number, (size, begins) in enumerate(steps):
        who = named(size, f"p{number}")
        assert asked(state, who, held=held) == asked(state, who)
        state.holds.assume(who, wanted(state, who), "n", NOW_S)
        if begins:
            state.apply([BindBegun(who, "n")])
            state.holds.forget(who.metadata.uid)


def test_a_kind_is_checked_once_beside_equal_kinds_on_an_unchanged_node() -> None:
    state = cluster()
    held = HeldMemory(state)
    with looks() as looked:
        for number in range(2):
            who = named("8Gi", f"p{number}")
            asked(state, who, held=held)
            state.holds.assume(who, wanted(state, who), "n", NOW_S)
        for number in range(3):
            asked(state, named("8Gi", f"q{number}"), held=held)
        assert looked.call_count == 2  # beside one, then beside two
        asked(state, named("9Gi", "another"), held=held)
        assert looked.call_count == 3
        state.apply([BindBegun(named("8Gi", "bound"), "n")])
        asked(state, named("8Gi", "p7"), held=held)
        assert looked.call_count == 4
        held.rules_changed()
        asked(state, named("8Gi", "p8"), held=held)
        assert looked.call_count == 5


def test_beside_a_pod_that_sets_its_variable_answers_are_cached_for_that_pod_alone() -> None:
    state = cluster(gpunode(shared("A"), plugin=Plugin(pinning="honoured")))
    held = HeldMemory(state)
    first = pod("8Gi", choosing(container("a")), uid="first", name="first")
    state.holds.assume(first, wanted(state, first), "n", NOW_S)
    with looks() as looked:
        for uid in ("second", "third"):
            asked(state, named("8Gi", uid), held=held)
        assert looked.call_count == 1
        state.holds.forget("first")
        another = pod("8Gi", choosing(container("a")), uid="another", name="another")
        state.holds.assume(another, wanted(state, another), "n", NOW_S)
        asked(state, named("8Gi", "fourth"), held=held)
        assert looked.call_count == 2


def test_a_pod_s_own_reservation_does_not_count_against_it() -> None:
    first, second = named("16Gi", "first"), named("8Gi", "second")
    node = gpunode(shared("A"))
    held = replace(
        node, spec=replace(node.spec, reservations={"second": reservation({"A": 8 * GIB})})
    )
    state = cluster(held)
    state.holds.assume(first, wanted(state, first), "n", NOW_S)
    assert asked(state, named("8Gi", "third")) is FULL
    assert asked(state, second) is None
    assert asked(state, named("8Gi", "third")) is FULL


def test_one_that_is_being_bound_there_does_not_count_against_itself() -> None:
    first, second = named("16Gi", "first"), named("8Gi", "second")
    state = cluster(gpunode(shared("A")))
    state.apply([BindBegun(second, "n")])
    state.holds.assume(first, wanted(state, first), "n", NOW_S)
    assert asked(state, named("8Gi", "third")) is FULL
    assert asked(state, second) is None
    state.apply([BindEnded("second", "n")])
    assert asked(state, second) is None


def test_a_bind_that_does_not_follow_in_time_is_not_waited_for() -> None:
    first, second = named("16Gi", "first"), named("16Gi", "second")
    state = cluster(gpunode(shared("A")))
    state.holds.assume(first, wanted(state, first), "n", NOW_S)
    assert asked(state, second) is FULL
    assert asked(state, second, NOW_S + BIND_FOLLOWS_WITHIN_S + 0.01) is None


def member(size: str, uid: str, group: str = "g") -> Pod:
    single = named(size, uid)
    labels = {"scheduling.x-k8s.io/pod-group": group}
    return replace(single, metadata=replace(single.metadata, labels=labels))


def test_the_pods_of_a_group_are_waited_for_together() -> None:
    """Three pods fill the device. Single pods are bound sooner."""
    another = named("8Gi", "another")
    for make, reason in ((named, None), (member, FULL)):
        state = cluster(gpunode(shared("A")))
        for uid in ("first", "second", "third"):
            who = make("8Gi", uid)
            state.holds.assume(who, wanted(state, who), "n", NOW_S)
        assert asked(state, another) is FULL
        assert asked(state, another, NOW_S + 4.9) is reason
        state.holds.forget("third")
        assert asked(state, another) is None
        state.holds.assume(who, wanted(state, who), "n", NOW_S)
        assert asked(state, another, NOW_S + 5.1) is None


def test_a_group_of_which_a_pod_was_rejected_is_not_waited_for() -> None:
    """Its next pod counts like a single one. Groups that never fit cannot keep others waiting."""
    state = cluster(gpunode(shared("A")))
    another = named("20Gi", "another")

    def expect(who: Pod, now_s: float) -> None:
        state.holds.assume(who, wanted(state, who), "n", now_s)

    expect(member("20Gi", "first"), NOW_S)
    state.holds.reject_group(member("20Gi", "x", "other"), NOW_S)
    assert asked(state, another, NOW_S + 0.1) is FULL
    state.holds.reject_group(member("20Gi", "second"), NOW_S)
    assert asked(state, another, NOW_S + 0.1) is None
    expect(member("20Gi", "third"), NOW_S + 0.1)
    assert asked(state, another, NOW_S + 0.2) is FULL
    assert asked(state, another, NOW_S + 0.4) is None
    expect(member("20Gi", "third"), NOW_S + 5.1)
    assert asked(state, another, NOW_S + 9.9) is FULL


def test_a_pod_that_starts_alone_is_not_offered_the_device_of_an_assumed_bind() -> None:
    """There is memory for both. A pod that does not start alone is offered it."""
    state = cluster(gpunode(shared("A")))
    annotations = {"headroom.gpu/startup": "alone"}
    first = pod("4Gi", uid="first", annotations=annotations)
    state.holds.assume(first, wanted(state, first), "n", NOW_S)
    second = pod("4Gi", uid="second", annotations=annotations)
    assert asked(state, second) is Reason.OTHER_STARTING
    assert asked(state, pod("4Gi", uid="third")) is None
    state.apply([BindBegun(first, "n", None)])
    assert state.holds.binding_to("n")["first"].phase == "starting"
    state.holds.forget("first")
    assert asked(state, second) is None  # the snapshot has it
    row = np.zeros(1, np.int64)
    verdict = fit(wanted(state, second), state.snapshot(), row, NOW_S)
    assert verdict.reason(0) is Reason.OTHER_STARTING
    # Written, and already ended: the node is weighed again.
    written = replace(state.holds.binding_to("n")["first"], phase="running")
    held = state.gpunode("n")
    assert held is not None
    metadata = replace(held.metadata, resource_version="2")
    spec = replace(held.spec, reservations={"first": written})
    state.apply([GPUNodeSeen(replace(held, metadata=metadata, spec=spec), NOW_S)])
    assert fit(wanted(state, second), state.snapshot(), row, NOW_S).reason(0) is None
