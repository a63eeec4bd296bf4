"""Tests that the cluster state applies events and returns snapshots."""

from datetime import UTC, datetime

import pytest
from msgspec.structs import replace

from headroom.contract.annotations import RESERVE
from headroom.contract.gpunode import GPUNode
from headroom.contract.kube import Node, Pod
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeGone, NodeGone, PodGone, PodSeen, Relisted
from headroom.core.placement.placement_record import Placement
from headroom.core.placement.policy import Rules
from headroom.core.whatif.node_whatif import rejection_beside
from tests.builders import (
    DISTRIBUTED,
    GIB,
    NOW_S,
    STAMP,
    device,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    use,
)
from tests.recording import RecordingState
from tests.state.states import EPOCH_S, STALE_AFTER_S, headroom, reason, seen, state_of

#: The plugin could choose either of these devices next.
TWO = shared("GPU-0"), shared("GPU-1")


class TestWholeNode:
    def test_a_reported_initialised_node_takes_pods(self) -> None:
        assert reason(state_of(*seen(kube_node(), gpunode(device())))) is None

    @pytest.mark.parametrize(
        ("events", "expected"),
        [
            pytest.param([gpunode(device())], Reason.UNKNOWN_NODE, id="unknown node"),
            pytest.param([kube_node()], Reason.NO_REPORT, id="no GPUNode"),
            pytest.param([kube_node(), gpunode()], Reason.NO_REPORT, id="no status yet"),
            pytest.param(
                [kube_node(), gpunode(device(), initialised=False)],
                Reason.NOT_INITIALISED,
                id="unreserved pods not charged yet",
            ),
            pytest.param(
                [kube_node(annotations={RESERVE: "much"}), gpunode(device())],
                Reason.BAD_NODE_ANNOTATION,
                id="unreadable reserve",
            ),
        ],
    )
    def test_a_node_that_takes_no_pods_has_the_reason(
        self, events: list[Node | GPUNode], expected: Reason
    ) -> None:
        assert reason(state_of(*seen(*events))) is expected

    def test_the_reserve_stays_free(self) -> None:
        node = kube_node(annotations={RESERVE: "4Gi"})
        assert headroom(state_of(*seen(node, gpunode(device())))) == [20]

    def test_deleted_objects_are_dropped(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([NodeGone("n")])
        assert reason(state) is Reason.UNKNOWN_NODE
        state.apply([GPUNodeGone("n")])
        assert state.cluster.snapshot().nodes == ()
        assert state.cluster.gpunode("n") is None


class TestGains:
    @pytest.mark.parametrize(
        ("before", "after", "grew"),
        [
            pytest.param(None, gpunode(device()), True, id="a new node"),
            pytest.param(gpunode(device(), initialised=False), gpunode(device()), True, id="ready"),
            pytest.param(
                gpunode(device()), gpunode(device(), initialised=False), False, id="not ready"
            ),
            pytest.param(
                gpunode(device(), reservations={"u": reservation({"GPU-0": GIB})}),
                gpunode(device()),
                True,
                id="a reservation was removed",
            ),
            pytest.param(
                gpunode(device(unattributed_bytes=GIB)),
                gpunode(device()),
                True,
                id="memory freed",
            ),
            pytest.param(
                gpunode(device()), gpunode(device(unattributed_bytes=GIB)), False, id="memory used"
            ),
            pytest.param(
                gpunode(shared(free=0, allocated=4)),
                gpunode(shared(free=1, allocated=3)),
                True,
                id="a replica freed",
            ),
            pytest.param(
                gpunode(device(healthy=False)), gpunode(device()), True, id="a device recovered"
            ),
            pytest.param(
                gpunode(*TWO, plugin=DISTRIBUTED),
                gpunode(*TWO, plugin=replace(DISTRIBUTED, steered=["nvidia.com/gpu"])),
                True,
                id="Headroom chooses between the devices now",
            ),
            pytest.param(
                gpunode(*TWO, plugin=DISTRIBUTED),
                gpunode(TWO[0], plugin=DISTRIBUTED),
                True,
                id="the plugin no longer has a device to choose",
            ),
            pytest.param(gpunode(device()), gpunode(device()), False, id="no change"),
        ],
    )
    def test_the_last_gain_of_a_node_is_recorded(
        self, before: GPUNode | None, after: GPUNode, grew: bool
    ) -> None:
        state = state_of(*seen(kube_node(), *([before] if before else [])))
        before_it = state.cluster.snapshot().generation
        state.apply(seen(after))
        assert (state.cluster.headroom_gains.of("n") > before_it) is grew
        assert (state.cluster.latest_gain > before_it) is grew
        assert state.cluster.headroom_gains.of("n") <= state.cluster.snapshot().generation

    def test_a_stale_node_counts_as_a_gain_when_it_reports_again(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        before_it = state.cluster.snapshot().generation
        again = gpunode(device(), version="2", observed_at="2026-11-21T01:00:00+00:00")
        state.apply(seen(again, at_s=NOW_S + STALE_AFTER_S))
        assert state.cluster.headroom_gains.of("n") <= before_it
        later = gpunode(device(), version="3", observed_at="2026-11-21T02:00:00+00:00")
        state.apply(seen(later, at_s=NOW_S + 3 * STALE_AFTER_S))
        assert state.cluster.headroom_gains.of("n") > before_it

    @pytest.mark.parametrize(
        ("pods", "unsettled"),
        [
            pytest.param([pod(node="n")], False, id="its pod runs there"),
            pytest.param([pod()], False, id="its pod may be bound later"),
            pytest.param([], True, id="its pod is gone"),
            pytest.param([pod(node="n", phase="Failed")], True, id="its pod has ended"),
            pytest.param([pod(node="m")], True, id="its pod is on another node"),
        ],
    )
    def test_nodes_with_possible_orphans_are_reported_once(
        self, pods: list[Pod], unsettled: bool
    ) -> None:
        state = state_of(*seen(kube_node(), pod(node="n"), gpunode(device())))
        state.apply([*seen(*pods), *([] if pods else [PodGone("uid-p")])])
        assert state.take_unsettled() == ["n"]  # It has no reservation.
        reserved = gpunode(
            device(), reservations={"uid-p": reservation({"GPU-0": GIB})}, version="2"
        )
        state.apply(seen(reserved))
        assert state.has_unsettled is unsettled
        assert state.take_unsettled() == (["n"] if unsettled else [])
        assert not state.has_unsettled


class TestJudge:
    """Bind makes its decision with the same version of the GPUNode that it then writes."""

    def test_bind_is_judged_on_the_given_version_of_the_gpunode(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a"))))
        fuller = gpunode(shared("a"), version="2", reservations={"u": reservation({"a": 20 * GIB})})
        assert state.cluster.judge(pod("8Gi"), fuller, NOW_S) is Reason.MEMORY_ON_ANY
        placement = state.cluster.judge(pod("8Gi"), gpunode(shared("a")), NOW_S)
        assert isinstance(placement, Placement)
        assert placement.charges[0].candidates == {"a": 8 * GIB}

    def test_the_pods_own_reservation_does_not_count_against_it(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a"))))
        own = gpunode(shared("a"), reservations={"uid-p": reservation({"a": 20 * GIB})})
        assert isinstance(state.cluster.judge(pod("20Gi"), own, NOW_S), Placement)

    def test_unreserved_pods_count(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a"))))
        state.apply(seen(pod("20Gi", node="n", uid="b", name="b")))
        assert state.cluster.judge(pod("8Gi"), gpunode(shared("a")), NOW_S) is Reason.MEMORY_ON_ANY

    def test_bind_rejects_a_pod_that_filter_rejects(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a"))))
        assert state.cluster.judge(pod("lots"), gpunode(shared("a")), NOW_S) is Reason.BAD_VRAM
        late = NOW_S + STALE_AFTER_S + 1
        assert state.cluster.judge(pod(), gpunode(shared("a")), late) is Reason.STALE_REPORT
        assert state.cluster.judge(pod(), gpunode(), NOW_S) is Reason.NO_REPORT


class TestEviction:
    def world(self) -> RecordingState:
        held = {"v": reservation({"a": 10 * GIB}), "w": reservation({"a": 10 * GIB})}
        device_ = shared("a", free=0, allocated=2, used_bytes=10 * GIB)
        rows = [use("v", "a", 5 * GIB, replica="0"), use("w", "a", 5 * GIB, replica="1")]
        return state_of(*seen(kube_node(), gpunode(device_, reservations=held, pods=rows)))

    @pytest.mark.parametrize(
        ("vram", "victims", "fits"),
        [
            pytest.param("8Gi", {"v"}, True, id="one is enough"),
            pytest.param("15Gi", {"v"}, False, id="one is not enough"),
            pytest.param("24Gi", {"v", "w"}, True, id="both are evicted"),
            pytest.param("1Gi", set(), False, id="none is evicted"),
            pytest.param("1Gi", {"other"}, False, id="another pod leaves"),
            pytest.param("lots", {"v", "w"}, False, id="a pod that cannot be read"),
        ],
    )
    def test_evicted_victims_free_their_memory(
        self, vram: str, victims: set[str], fits: bool
    ) -> None:
        world = self.world()
        reason = rejection_beside(
            world.cluster, world.cluster.understand(pod(vram)), "n", (), NOW_S, victims
        )
        assert (reason is None) is fits

    def test_an_unknown_node_takes_no_pods(self) -> None:
        world = self.world()
        request = world.cluster.understand(pod())
        reason = rejection_beside(world.cluster, request, "elsewhere", (), NOW_S, {"v", "w"})
        assert reason is Reason.UNKNOWN_NODE


def test_a_returned_snapshot_does_not_change() -> None:
    state = state_of(*seen(kube_node(), gpunode(shared("a"))))
    snap = state.cluster.snapshot()
    assert state.cluster.snapshot() is snap
    state.apply(seen(pod("8Gi", node="n")))
    assert snap.columns.headroom_bytes[0, 0] == 24 * GIB
    assert state.cluster.snapshot().columns.headroom_bytes[0, 0] == 16 * GIB


def test_an_implausible_report_affects_only_its_device() -> None:
    """Events are still applied after a report with impossible figures."""
    absurd = shared("b", memory_bytes=1 << 90, used_bytes=1 << 90)
    state = state_of(*seen(kube_node(), gpunode(shared("a"), absurd), pod(None, node="n")))
    assert reason(state) is Reason.CONTRADICTORY_REPORT
    assert headroom(state)[0] == 18
    assert datetime.fromtimestamp(EPOCH_S + NOW_S, UTC).isoformat() == STAMP


def test_nodes_are_weighed_when_every_required_kind_is_listed() -> None:
    """Nodes are not weighed after each list, because the terms of a node are unknown without its
    pods.
    """
    state = RecordingState(Rules(), STALE_AFTER_S, EPOCH_S, unlisted=(Node, GPUNode, Pod))
    state.apply([Relisted(Node, (kube_node(),), NOW_S)])
    state.apply([Relisted(GPUNode, (gpunode(shared("a")),), NOW_S)])
    assert state.cluster.snapshot().nodes == ()
    state.apply([PodSeen(pod())])
    assert state.cluster.snapshot().nodes == ()
    state.apply([Relisted(Pod, (), NOW_S)])
    assert [node.name for node in state.cluster.snapshot().nodes] == ["n"]
    state.apply([Relisted(Node, (), NOW_S), Relisted(GPUNode, (), NOW_S)])
    assert state.cluster.snapshot().nodes == ()


def test_a_cluster_without_nodes_is_processed_when_it_is_listed() -> None:
    state = RecordingState(Rules(), STALE_AFTER_S, EPOCH_S, unlisted=(Node, Pod))
    for kind, begun in ((Node, False), (Pod, True)):
        for _ in state.steps([Relisted(kind, (), NOW_S)]):
            pass
        assert state.cluster.begun is begun
    other = RecordingState(Rules(), STALE_AFTER_S, EPOCH_S, unlisted=(Node,))
    for _ in other.steps([Relisted(Node, (kube_node(),), NOW_S)]):
        assert not other.cluster.begun
    assert not other.cluster.begun  # It waits to be weighed first.
    assert other.weigh_next()
    assert other.cluster.begun
