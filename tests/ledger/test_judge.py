"""Checks that the judge decides with the same version of the object as the conditional write."""

import pytest

from headroom.contract.gpunode import GPUNodeSpec
from headroom.contract.kube import Node, ObjectMeta, Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen, PodSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.placement.placement_record import Placement
from headroom.core.placement.policy import Rules
from tests.model.cluster import gpunode, pod
from tests.model.world import changed


@pytest.fixture
def state() -> ClusterWriter:
    """A state in which another scheduler has bound q to node n1. The node already has a reservation
    for q.
    """
    state = ClusterWriter(Rules(), stale_after_s=90.0, epoch_s=0.0)
    q = pod("q", 6)
    reservation = state.cluster.adopt(q, gpunode("n1"))
    assert reservation is not None
    held = changed(
        gpunode("n1"), spec=GPUNodeSpec(initialised=True, reservations={"q": reservation})
    )
    bound: Pod = changed(q, spec=changed(q.spec, node_name="n1"))
    state.apply(
        [NodeSeen(Node(metadata=ObjectMeta(name="n1"))), GPUNodeSeen(held, 0.0), PodSeen(bound)]
    )
    return state


def test_a_bound_pod_counts_although_its_reservation_was_removed(
    state: ClusterWriter,
) -> None:
    """The GPUNode from the store is newer than the GPUNode from the watch."""
    assert state.cluster.judge(pod("p", 6), gpunode("n1"), 0.0) is Reason.MEMORY_ON_ANY


def test_an_adopted_pod_is_charged_once(state: ClusterWriter) -> None:
    held = state.cluster.gpunode("n1")
    assert held is not None
    assert isinstance(state.cluster.judge(pod("p", 4), held, 0.0), Placement)
    assert state.cluster.judge(pod("p", 5), held, 0.0) is Reason.MEMORY_ON_ANY
