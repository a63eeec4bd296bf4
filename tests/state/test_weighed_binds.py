"""Checks that each assumed bind counts once, and that its node is weighed again only if
necessary.
"""

from collections.abc import Callable

import msgspec
import pytest
from msgspec.structs import replace

from headroom.contract.annotations import DEVICE_CHOICE, VRAM
from headroom.contract.gpunode import GPUNode, Reservation
from headroom.contract.watched import GPUNodeSeen, PodGone, PodSeen
from headroom.core.cluster.changes import BindBegun, BindEnded, GPUNodeWritten
from headroom.core.placement.placement_record import Placement
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    NOW_S,
    STAMP,
    device,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
)
from tests.state.states import headroom, reason, reserving, seen, state_of


class TestAssumedBinds:
    def test_filter_counts_assumed_binds_before_they_are_written(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        assert headroom(state) == [4]
        assert reason(state) is not None

    def test_a_written_assumed_bind_counts_once(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        written = gpunode(
            device(), version="2", reservations={"other": reservation({device().uuid: 20 * GIB})}
        )
        state.apply([GPUNodeSeen(written, NOW_S)])
        assert headroom(state) == [4]
        state.apply([BindEnded("other", "n")])
        assert headroom(state) == [4]

    def test_the_own_write_of_a_reservation_ends_the_assumed_bind(self) -> None:
        held = gpunode(shared("A"))
        state = state_of(*seen(kube_node(), held))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        before = state.settle()
        state.apply([GPUNodeWritten(reserving(held, other=20), NOW_S)])
        assert state.cluster.holds.binding_to("n") == {}
        assert state.settle() is before
        assert headroom(state) == [4]

    def test_a_late_write_that_was_replaced_ends_the_assumed_bind(self) -> None:
        """The watch has already shown a newer version without the reservation."""
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        state.apply([GPUNodeSeen(gpunode(device(), version="3"), NOW_S)])
        assert headroom(state) == [4]
        reservations = {"other": reservation({device().uuid: 20 * GIB})}
        written = gpunode(device(), version="2", reservations=reservations)
        state.apply([GPUNodeWritten(written, NOW_S)])
        assert headroom(state) == [24]

    def test_a_written_assumed_bind_is_not_weighed_again(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        reservations = {"other": reservation({device().uuid: 20 * GIB})}
        state.apply([GPUNodeSeen(gpunode(device(), version="2", reservations=reservations), NOW_S)])
        snapshot = state.settle()
        state.apply([BindEnded("other", "n")])
        # The form in which the watch sends it.
        again = gpunode(device(), version="2", reservations=reservations)
        state.apply([GPUNodeSeen(again, NOW_S + 1)])
        assert state.settle() is snapshot

    @pytest.mark.parametrize("vram", ["8Gi", "20Gi", "100Gi"])
    @pytest.mark.parametrize("choice", [None, "predicted", "steered"])
    @pytest.mark.parametrize("steered", [[], [GPU]])
    def test_an_expected_reservation_is_not_weighed_again(
        self, vram: str, choice: str | None, steered: list[str]
    ) -> None:
        """The terms equal newly weighed terms."""
        plugin = replace(DISTRIBUTED, steered=steered)
        node = gpunode(shared("A"), shared("B", memory_bytes=40 * GIB), plugin=plugin)
        about = kube_node(annotations={DEVICE_CHOICE: choice} if choice else None)
        asked = pod(vram, uid="other")
        state = state_of(*seen(about, node))
        placed = state.cluster.judge(asked, node, NOW_S)
        charges = (
            list(placed.charges) if isinstance(placed, Placement) else reservation({"A": 1}).charges
        )
        made = Reservation("default", "p", charges, attempt="1", since=STAMP)
        written = replace(
            node,
            metadata=replace(node.metadata, resource_version="2"),
            spec=replace(node.spec, reservations={"other": made}, reserved="8Gi"),
        )
        anyway = state_of(*seen(about, node), BindBegun(asked, "n")).cluster.snapshot().nodes
        state.apply([BindBegun(asked, "n")])
        assert state.settle().nodes == anyway
        generation = state.settle().generation
        state.apply([GPUNodeSeen(written, NOW_S), BindEnded("other", "n")])
        assert state.cluster.gpunode("n") == written
        assert (state.settle().generation == generation) == isinstance(placed, Placement)
        from_start = state_of(*seen(about, written)).cluster.snapshot()
        assert state.settle().nodes == from_start.nodes

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda o: reserving(o, other=21), id="another amount"),
            pytest.param(lambda o: reserving(o, other=20, more=1), id="an additional pod"),
            pytest.param(lambda o: reserving(o, old=None), id="a removed pod"),
            pytest.param(
                lambda o: replace(o, spec=replace(o.spec, initialised=False)),
                id="initialised again",
            ),
            pytest.param(
                lambda o: replace(o, metadata=replace(o.metadata, deletion_timestamp=STAMP)),
                id="it is being deleted",
            ),
            pytest.param(
                lambda o: replace(o, status=gpunode(shared("A")).status), id="another report"
            ),
        ],
    )
    def test_other_written_changes_are_weighed(self, change: Callable[[GPUNode], GPUNode]) -> None:
        held = gpunode(shared("A"), reservations={"old": reservation({"A": GIB})})
        expected = reserving(held, other=20)
        for written, changes in ((expected, False), (change(expected), True)):
            state = state_of(*seen(kube_node(), held))
            state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
            before = state.settle()
            state.apply([GPUNodeSeen(written, NOW_S)])
            assert (state.settle() is not before) == changes

    def test_a_written_bind_that_overcommits_is_weighed(self) -> None:
        """Only reservations raise alarms, and assumed binds do not."""
        held = gpunode(shared("A"))
        state = state_of(*seen(kube_node(), held))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        state.apply([BindBegun(pod("20Gi", uid="another"), "n")])
        assert not state.cluster.overcommits.now()
        state.apply([GPUNodeSeen(reserving(held, other=20, another=20), NOW_S)])
        assert state.cluster.overcommits.now()

    def test_a_reservation_of_a_deleted_pod_is_checked(self) -> None:
        held = gpunode(shared("A"))
        state = state_of(*seen(kube_node(), held))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        state.take_unsettled()
        before = state.settle()
        state.apply([GPUNodeSeen(reserving(held, other=20), NOW_S)])
        assert state.settle() is before
        assert state.take_unsettled() == ["n"]

    def test_a_change_of_a_reserved_pod_is_weighed_if_anything_depends_on_it(self) -> None:
        reservations = {"other": reservation({device().uuid: 20 * GIB})}
        state = state_of(*seen(kube_node(), gpunode(device(), reservations=reservations)))
        before = state.settle()
        bound = pod("20Gi", uid="other", node="n")
        changed = msgspec.structs.replace(
            bound, metadata=msgspec.structs.replace(bound.metadata, annotations={VRAM: "1Gi"})
        )
        state.apply([PodSeen(pod("20Gi", uid="other")), PodSeen(bound), PodSeen(changed)])
        assert state.settle() is before
        assert state.cluster.unreserved_pods("n") == []
        leaving = msgspec.structs.replace(
            bound, metadata=msgspec.structs.replace(bound.metadata, deletion_timestamp="now")
        )
        for answer in (PodSeen(leaving), PodSeen(bound), PodGone("other")):
            state.apply([answer])
            assert state.settle() is not before
            before = state.settle()

    def test_a_failed_bind_no_longer_counts(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n"), BindEnded("other", "n")])
        assert headroom(state) == [24]

    def test_bind_decides_only_on_written_reservations(self) -> None:
        node = gpunode(device())
        state = state_of(*seen(kube_node(), node))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        assert isinstance(state.cluster.judge(pod("20Gi"), node, NOW_S), Placement)

    def test_a_bind_to_an_unknown_node_changes_nothing(self) -> None:
        state = state_of(BindBegun(pod("20Gi"), "gone"), BindEnded("u", "gone"))
        assert state.settle().nodes == ()
