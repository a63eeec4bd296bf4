"""Checks that the state handles late, repeated and listed objects, and that calls see changes of
this process at once.
"""

from headroom.contract.annotations import DEFAULT_VRAM
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Lease, Namespace, Node, Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, HeartbeatSeen, NamespaceSeen, Relisted
from headroom.core.cluster.changes import BindBegun
from tests.builders import (
    GIB,
    NOW_S,
    gpunode,
    kube_node,
    namespace,
    pod,
    reservation,
    shared,
)
from tests.state.states import headroom, headroom_of, lease, reason, seen, state_of


class TestVisibleChanges:
    def test_watch_events_wait_for_the_next_snapshot(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("A"))))
        shown = state.cluster.snapshot()
        grown = shared("A", used_bytes=8 * GIB, unattributed_bytes=8 * GIB)
        for _ in state.steps([GPUNodeSeen(gpunode(grown, version="2"), NOW_S)]):
            pass
        assert state.weigh_next()
        assert state.cluster.settled() is shown
        latest = state.cluster.snapshot()
        assert latest is not shown
        assert state.cluster.settled() is latest

    def test_writes_of_this_process_are_visible_at_once(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("A"))))
        shown = state.cluster.snapshot()
        state.apply([BindBegun(pod("8Gi", uid="u"), "n")])
        assert state.cluster.settled() is not shown
        (node,) = state.cluster.settled().nodes
        assert node.devices[0].unconfirmed_bytes == 8 * GIB


class TestVersions:
    def test_an_older_version_that_arrives_late_is_ignored(self) -> None:
        held = {"u": reservation({"D": 8 * GIB})}
        new = gpunode(shared("D"), version="10", reservations=held)
        state = state_of(*seen(kube_node(), new, gpunode(shared("D"), version="9")))
        assert state.cluster.gpunode("n") is new
        assert headroom(state) == [16]

    def test_a_recreated_object_is_stored_with_any_version(self) -> None:
        other = gpunode(shared("D"), uid="other", version="1")
        state = state_of(*seen(kube_node(), gpunode(shared("D"), version="10"), other))
        assert state.cluster.gpunode("n") is other

    def test_versions_that_are_not_numbers_are_stored_in_order_of_arrival(self) -> None:
        later = gpunode(shared("D"), version="a")
        state = state_of(*seen(kube_node(), gpunode(shared("D"), version="b"), later))
        assert state.cluster.gpunode("n") is later


class TestRelist:
    def test_objects_missing_from_a_list_are_dropped(self) -> None:
        state = state_of(
            *seen(kube_node(), kube_node("m"), gpunode(shared("a")), pod("8Gi", node="n")),
            HeartbeatSeen(lease("2026-11-21T00:00:30Z"), NOW_S),
            NamespaceSeen(namespace(annotations={DEFAULT_VRAM: "1Gi"})),
        )
        other = pod("4Gi", node="n", uid="other", name="other")
        state.apply([Relisted(Pod, (other,), NOW_S)])
        assert [p.metadata.uid for p in state.cluster.pods()] == ["other"]
        assert headroom_of(state, "n") == [20]
        state.apply([Relisted(Node, (kube_node(),), NOW_S)])
        assert [node.metadata.name for node in state.cluster.nodes()] == ["n"]
        state.apply([Relisted(Namespace, (), NOW_S)])
        assert state.cluster.understand(pod(None)) == state_of().cluster.understand(pod(None))
        state.apply([Relisted(Lease, (), NOW_S)])
        assert reason(state, "1M", at_s=NOW_S + 89) is None
        state.apply([Relisted(GPUNode, (), NOW_S)])
        assert state.cluster.gpunodes() == []
        assert reason(state) is Reason.NO_REPORT

    def test_objects_in_a_list_count_as_seen(self) -> None:
        state = state_of(
            Relisted(Namespace, (namespace(annotations={DEFAULT_VRAM: "9Gi"}),), NOW_S),
            Relisted(Node, (kube_node(),), NOW_S),
            Relisted(GPUNode, (gpunode(shared("a")),), NOW_S),
            Relisted(Pod, (pod(None, node="n"),), NOW_S),
            Relisted(Lease, (lease("2026-11-21T00:00:00Z"),), NOW_S),
        )
        assert headroom(state) == [15]
        assert reason(state, at_s=NOW_S) is None

    def test_an_equal_list_changes_nothing(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a")), pod("8Gi", node="n")))
        state.apply([Relisted(Pod, (pod("8Gi", node="n"),), NOW_S + 50)])
        state.apply([Relisted(GPUNode, (gpunode(shared("a")),), NOW_S + 50)])
        assert headroom(state) == [16]
        assert reason(state, at_s=NOW_S + 91) is Reason.STALE_REPORT
