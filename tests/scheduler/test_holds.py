"""Checks that filter holds memory for expected binds, and that cached results for similar pods
equal new computations.
"""

from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from headroom.contract.gpunode import GPUNode, Plugin
from headroom.contract.kube import Pod, SchedulingGroup, WorkloadReference
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.changes import BindBegun, BindEnded
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.groups.membership import Group, GroupKind, group_of
from headroom.core.placement.fit import fit
from headroom.core.placement.policy import Rules
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import REASONS
from headroom.core.whatif import held_memory, node_whatif
from headroom.core.whatif.held_memory import HeldMemory
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
#: Time on the wall clock when the monotonic clock of these tests was 0.
EPOCH_S = 1_795_219_200.0 - NOW_S
SIZES = st.sampled_from(["4Gi", "8Gi", "12Gi", "50%", "a=8Gi"])


def cluster(node: GPUNode | None = None) -> ClusterWriter:
    state = ClusterWriter(Rules(), 90.0, EPOCH_S)
    node = node or gpunode(shared("A"), shared("B", memory_bytes=16 * GIB))
    state.apply([NodeSeen(kube_node()), GPUNodeSeen(node, NOW_S)])
    return state


def wanted(state: ClusterWriter, of: Pod) -> VramRequest:
    request = state.cluster.understand(of)
    assert isinstance(request, VramRequest)
    return request


def asked(
    state: ClusterWriter,
    who: Pod,
    now_s: float = NOW_S,
    held: HeldMemory | None = None,
) -> Reason | None:
    """Return the reason why the pod is rejected on the only node. Without held memory, the pod
    would fit.
    """
    held = held or HeldMemory(state.cluster)
    codes, snap = np.zeros(1, np.int8), state.cluster.snapshot()
    held.reject_nodes(who, wanted(state, who), np.zeros(1, np.int64), codes, snap, now_s)
    return REASONS[int(codes[0])]


def named(size: str, uid: str, **of: Any) -> Pod:
    return pod(size, container("a"), uid=uid, name=uid, **of)


def looks() -> Any:
    """Count the checks whose result was not cached."""
    return patch.object(held_memory, "rejection_beside", wraps=node_whatif.rejection_beside)


@settings(max_examples=examples(500))
@given(st.lists(st.tuples(SIZES, st.booleans()), min_size=1, max_size=12))
def test_cached_results_equal_recomputed_ones(steps: list[tuple[str, bool]]) -> None:
    state = cluster()
    held = HeldMemory(state.cluster)
    for number, (size, begins) in enumerate(steps):
        who = named(size, f"p{number}")
        assert asked(state, who, held=held) == asked(state, who)
        state.parts.calls.assumed.assume(who, wanted(state, who), "n", NOW_S)
        if begins:
            state.apply([BindBegun(who, "n")])
            state.parts.calls.assumed.forget(who.metadata.uid)


def test_equal_pods_on_an_unchanged_node_are_checked_once() -> None:
    state = cluster()
    held = HeldMemory(state.cluster)
    with looks() as looked:
        for number in range(2):
            who = named("8Gi", f"p{number}")
            asked(state, who, held=held)
            state.parts.calls.assumed.assume(who, wanted(state, who), "n", NOW_S)
        for number in range(3):
            asked(state, named("8Gi", f"q{number}"), held=held)
        assert looked.call_count == 2  # first next to one pod, then next to two pods
        asked(state, named("9Gi", "another"), held=held)
        assert looked.call_count == 3
        state.apply([BindBegun(named("8Gi", "bound"), "n")])
        asked(state, named("8Gi", "p7"), held=held)
        assert looked.call_count == 4
        held.rules_changed()
        asked(state, named("8Gi", "p8"), held=held)
        assert looked.call_count == 5


def test_each_further_pod_of_a_large_group_checks_only_the_last_chosen_node() -> None:
    """For the other nodes, results are cached."""
    state = ClusterWriter(Rules(), 90.0, EPOCH_S)
    names = [f"n{i}" for i in range(40)]
    for name in names:
        report = gpunode(shared(name), name=name, uid=name)
        state.apply([NodeSeen(kube_node(name)), GPUNodeSeen(report, NOW_S)])
    held, snap, rows = HeldMemory(state.cluster), state.cluster.snapshot(), np.arange(40)
    with looks() as looked:
        for i, name in enumerate(names):
            who = core_member("20Gi", f"p{i}")
            codes = np.zeros(40, np.int8)
            held.reject_nodes(who, wanted(state, who), rows, codes, snap, NOW_S)
            assert [REASONS[code] for code in codes] == [FULL] * i + [None] * (40 - i)
            state.parts.calls.assumed.assume(who, wanted(state, who), name, NOW_S)
    assert looked.call_count == 39


def test_results_next_to_a_pod_with_its_own_variable_are_cached_only_for_that_pod() -> None:
    state = cluster(gpunode(shared("A"), plugin=Plugin()))
    held = HeldMemory(state.cluster)
    first = pod("8Gi", choosing(container("a")), uid="first", name="first")
    state.parts.calls.assumed.assume(first, wanted(state, first), "n", NOW_S)
    with looks() as looked:
        for uid in ("second", "third"):
            asked(state, named("8Gi", uid), held=held)
        assert looked.call_count == 1
        state.parts.calls.assumed.forget("first")
        another = pod("8Gi", choosing(container("a")), uid="another", name="another")
        state.parts.calls.assumed.assume(another, wanted(state, another), "n", NOW_S)
        asked(state, named("8Gi", "fourth"), held=held)
        assert looked.call_count == 2


def test_a_pods_own_reservation_does_not_count_against_it() -> None:
    first, second = named("16Gi", "first"), named("8Gi", "second")
    node = gpunode(shared("A"))
    held = replace(
        node, spec=replace(node.spec, reservations={"second": reservation({"A": 8 * GIB})})
    )
    state = cluster(held)
    state.parts.calls.assumed.assume(first, wanted(state, first), "n", NOW_S)
    assert asked(state, named("8Gi", "third")) is FULL
    assert asked(state, second) is None
    assert asked(state, named("8Gi", "third")) is FULL


def test_a_pod_that_is_being_bound_does_not_count_against_itself() -> None:
    first, second = named("16Gi", "first"), named("8Gi", "second")
    state = cluster(gpunode(shared("A")))
    state.apply([BindBegun(second, "n")])
    state.parts.calls.assumed.assume(first, wanted(state, first), "n", NOW_S)
    assert asked(state, named("8Gi", "third")) is FULL
    assert asked(state, second) is None
    state.apply([BindEnded("second", "n")])
    assert asked(state, second) is None


def test_memory_is_released_if_the_bind_does_not_follow_in_time() -> None:
    first, second = named("16Gi", "first"), named("16Gi", "second")
    state = cluster(gpunode(shared("A")))
    state.parts.calls.assumed.assume(first, wanted(state, first), "n", NOW_S)
    assert asked(state, second) is FULL
    assert asked(state, second, NOW_S + BIND_FOLLOWS_WITHIN_S + 0.01) is None


def member(size: str, uid: str, group: str = "g") -> Pod:
    single = named(size, uid)
    labels = {"scheduling.x-k8s.io/pod-group": group}
    return replace(single, metadata=replace(single.metadata, labels=labels))


def core_member(size: str, uid: str, group: str = "g") -> Pod:
    single = named(size, uid)
    spec = replace(single.spec, scheduling_group=SchedulingGroup(pod_group_name=group))
    return replace(single, spec=spec)


def replica(size: str, uid: str, group: str = "g") -> Pod:
    single = named(size, uid)
    ref = WorkloadReference(name="w", pod_group="workers", pod_group_replica_key=group)
    return replace(single, spec=replace(single.spec, workload_ref=ref))


MEMBERS = (member, core_member, replica)


class Calls:
    """Makes kube-scheduler's calls for 8 GiB pods, on a cluster with one 24 GiB device."""

    def __init__(self) -> None:
        self.state = cluster(gpunode(shared("A")))

    def filter(self, who: Pod, now_s: float) -> Reason | None:
        holds = self.state.parts.calls.assumed
        holds.ask(who, now_s)
        reason = asked(self.state, who, now_s)
        if reason is None:
            holds.assume(who, wanted(self.state, who), "n", now_s)
        else:
            holds.reject(who, now_s)
        return reason

    def free(self, now_s: float) -> bool:
        """Return whether a single pod gets the whole device."""
        return asked(self.state, named("24Gi", "single"), now_s) is None


@pytest.mark.parametrize("make", MEMBERS)
def test_the_memory_of_a_group_is_held_until_its_last_pod_has_a_node(
    make: Callable[..., Pod],
) -> None:
    """The memory is held however long this takes. Single pods are bound immediately."""
    single, grouped = Calls(), Calls()
    for at, uid in enumerate(("first", "second", "third")):
        now_s = NOW_S + 4 * at
        assert single.filter(named("8Gi", uid), now_s) is None
        assert grouped.filter(make("8Gi", uid), now_s) is None
        assert single.free(now_s + 0.3)
        assert not grouped.free(now_s + 4.9)
    assert grouped.filter(make("8Gi", "other", "other"), NOW_S + 8) is FULL
    assert grouped.free(NOW_S + 13.1)


@pytest.mark.parametrize("make", MEMBERS)
def test_a_rejection_ends_the_holds_of_a_group_until_it_is_tried_again(
    make: Callable[..., Pod],
) -> None:
    """A group that never fits holds memory only during its cycles."""
    calls = Calls()
    for begins_s in (NOW_S, NOW_S + 1, NOW_S + 2):
        for at, uid in enumerate(("first", "second", "third")):
            assert calls.filter(make("8Gi", uid), begins_s + at / 5) is None
        assert calls.filter(make("8Gi", "fourth"), begins_s + 0.6) is FULL
        assert not calls.free(begins_s + 0.8)
        assert calls.free(begins_s + 0.9)


@pytest.mark.parametrize("make", MEMBERS)
def test_a_rejection_because_of_its_own_group_does_not_requeue_a_pod(
    make: Callable[..., Pod],
) -> None:
    """Otherwise, the pod would be requeued repeatedly although no memory is freed."""
    calls = Calls()
    calls.filter(make("16Gi", "first"), NOW_S)
    for who, may_change in ((make("16Gi", "second"), False), (named("16Gi", "single"), True)):
        codes, rows = np.zeros(1, np.int8), np.zeros(1, np.int64)
        request, snap = wanted(calls.state, who), calls.state.cluster.snapshot()
        held = HeldMemory(calls.state.cluster)
        assert held.reject_nodes(who, request, rows, codes, snap, NOW_S) == may_change
        assert REASONS[int(codes[0])] is FULL


def test_holds_last_after_a_rejection_while_other_pods_of_the_group_are_tried() -> None:
    """Kubernetes binds a group if enough of its pods have a node."""
    calls = Calls()
    calls.filter(core_member("16Gi", "first"), NOW_S)
    assert calls.filter(core_member("16Gi", "second"), NOW_S + 0.1) is FULL
    assert calls.filter(core_member("8Gi", "third"), NOW_S + 0.3) is None
    assert not calls.free(NOW_S + 0.5)
    calls.state.parts.calls.assumed.call_bind("first", NOW_S + 0.5)
    assert asked(calls.state, named("20Gi", "single"), NOW_S + 5.4) is FULL
    assert calls.free(NOW_S + 5.6)


def test_a_new_attempt_of_a_group_releases_the_memory_held_for_all_its_pods() -> None:
    """For example, if another plugin has rejected the group, its pods can get other nodes."""
    calls = Calls()
    for uid in ("first", "second", "third"):
        assert calls.filter(core_member("8Gi", uid), NOW_S) is None
    assert calls.filter(core_member("24Gi", "first"), NOW_S + 1) is None
    assert calls.state.parts.calls.assumed.members(
        Group(GroupKind.KUBERNETES, "default", "g"), NOW_S + 1
    ) == {"first"}


@pytest.mark.parametrize("make", [member, replica])
def test_pods_with_a_node_keep_their_holds_while_another_pod_of_the_group_is_retried(
    make: Callable[..., Pod],
) -> None:
    """The Coscheduling plugin and kube-scheduler 1.35 bind all pods of the group once this pod has
    a node.
    """
    calls = Calls()
    for uid in ("first", "second"):
        assert calls.filter(make("8Gi", uid), NOW_S) is None
    for now_s in (NOW_S + 1, NOW_S + 2):
        assert calls.filter(make("24Gi", "third"), now_s) is FULL
    group = group_of(make("8Gi", "first"))
    assert group is not None
    assert calls.state.parts.calls.assumed.members(group, NOW_S + 2) == {"first", "second"}


def test_a_pod_that_starts_alone_is_not_offered_the_device_of_an_assumed_bind() -> None:
    """A pod that does not start alone gets the device, because there is enough memory for both
    pods.
    """
    state = cluster(gpunode(shared("A")))
    annotations = {"headroom.gpu/startup": "alone"}
    first = pod("4Gi", uid="first", annotations=annotations)
    state.parts.calls.assumed.assume(first, wanted(state, first), "n", NOW_S)
    second = pod("4Gi", uid="second", annotations=annotations)
    assert asked(state, second) is Reason.OTHER_STARTING
    assert asked(state, pod("4Gi", uid="third")) is None
    state.apply([BindBegun(first, "n")])
    assert state.cluster.holds.binding_to("n")["first"].phase == "starting"
    state.parts.calls.assumed.forget("first")
    assert asked(state, second) is None  # The snapshot contains the bind.
    row = np.zeros(1, np.int64)
    verdict = fit(wanted(state, second), state.cluster.snapshot(), row, NOW_S)
    assert verdict.reason(0) is Reason.OTHER_STARTING
    # The reservation is written and its start has ended, so the node is weighed again.
    written = replace(state.cluster.holds.binding_to("n")["first"], phase="running")
    held = state.cluster.gpunode("n")
    assert held is not None
    metadata = replace(held.metadata, resource_version="2")
    spec = replace(held.spec, reservations={"first": written})
    state.apply([GPUNodeSeen(replace(held, metadata=metadata, spec=spec), NOW_S)])
    assert fit(wanted(state, second), state.cluster.snapshot(), row, NOW_S).reason(0) is None
