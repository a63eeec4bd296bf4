"""Tests nodes whose devices Headroom chooses."""

from headroom.contract.gpunode import Device, GPUNode, Plugin, Reservation
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen
from headroom.core.cluster.changes import BindBegun
from headroom.core.placement.placement_record import Placement
from tests.builders import GIB, GPU, NOW_S, gpunode, kube_node, pod, shared, use
from tests.state.states import reason, seen, state_of

STEERED = Plugin(topology_manager_policy="none", steered=[GPU])


def empty() -> GPUNode:
    """Return a node with two devices of 24 GiB, of which the second has 10 GiB in use."""
    return gpunode(shared("A"), busy(free=3), plugin=STEERED)


def busy(free: int) -> Device:
    outsider = {"used_bytes": 10 * GIB, "unattributed_bytes": 10 * GIB}
    return shared("B", free=free, allocated=4 - free, **outsider)


def test_equal_pods_filtered_during_a_bind_get_the_same_node() -> None:
    first = pod("8Gi", uid="u1", name="p1")
    state = state_of(*seen(kube_node(), first, empty()))
    state.apply([BindBegun(first, "n")])
    assert reason(state, "4Gi") is None  # It fits next to the pod on B.
    assert reason(state, "20Gi") is Reason.OTHERS_ARRIVING  # Although A is empty.


def test_confirmed_pods_requeue_pending_pods() -> None:
    first = pod("8Gi", uid="u1", name="p1", node="n")
    state = state_of(*seen(kube_node(), first, empty()))
    placement = state.cluster.judge(pod("8Gi", uid="u1", name="p1"), empty(), NOW_S)
    assert isinstance(placement, Placement)
    reservation = {"u1": Reservation("default", "p1", list(placement.charges))}
    devices = [shared("A"), busy(free=3)]
    incoming = gpunode(*devices, reservations=reservation, version="2", plugin=STEERED)
    state.apply([GPUNodeSeen(incoming, NOW_S)])
    assert reason(state, "20Gi") is Reason.OTHERS_ARRIVING
    before_it = state.cluster.snapshot().generation
    devices[1] = busy(free=2)
    rows = [use("u1", "B", replica="B::1")]
    arrived = gpunode(*devices, reservations=reservation, pods=rows, version="3", plugin=STEERED)
    state.apply([GPUNodeSeen(arrived, NOW_S)])
    assert reason(state, "20Gi") is None
    assert state.cluster.headroom_gains.of("n") > before_it
