"""Events in, snapshots out."""

from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import ClassVar

import msgspec
import pytest
from msgspec.structs import replace

from contract.annotations import DEFAULT_VRAM, DEVICE_CHOICE, OBSERVED_AT, RESERVE, VRAM
from contract.gpunode import GPUNode, Reservation
from contract.heartbeat import Confirmation, encode_confirmation
from contract.kube import Container, Lease, Namespace, Node, ObjectMeta, Pod
from contract.reasons import Reason
from extender.placement.fit import fit
from extender.placement.placement_record import Placement
from extender.placement.policy import Rules
from extender.placement.request import VramRequest
from extender.state.changes import (
    BindBegun,
    BindEnded,
    Event,
    GPUNodeGone,
    GPUNodeSeen,
    HeartbeatGone,
    HeartbeatSeen,
    NamespaceGone,
    NamespaceSeen,
    NodeGone,
    NodeSeen,
    PodGone,
    PodSeen,
    Relisted,
)
from extender.state.node_whatif import rejection_beside
from tests.builders import (
    DISTRIBUTED,
    GATE_IMAGE,
    GIB,
    GPU,
    NOW_S,
    STAMP,
    container,
    device,
    gate,
    gpunode,
    kube_node,
    namespace,
    pod,
    reservation,
    shared,
    use,
)
from tests.recording import RecordingState

STALE_AFTER_S = 90.0
EPOCH_S = datetime.fromisoformat(STAMP).timestamp() - NOW_S


def state_of(*events: Event, rules: Rules | None = None) -> RecordingState:
    state = RecordingState(rules or Rules(gate_image=GATE_IMAGE), STALE_AFTER_S, EPOCH_S)
    state.apply(events)
    return state


def seen(*what: Pod | Node | Namespace | GPUNode, at_s: float = NOW_S) -> Iterable[Event]:
    for o in what:
        match o:
            case Pod():
                yield PodSeen(o)
            case Node():
                yield NodeSeen(o)
            case Namespace():
                yield NamespaceSeen(o)
            case GPUNode():
                yield GPUNodeSeen(o, at_s)


def lease(sampled_at: str, gpunode: str = "gn", observed_at: str = STAMP) -> Lease:
    """A heartbeat of the node ``n``; by default it vouches for the report that builders make."""
    vouch = Confirmation(sampled_at=sampled_at, gpunode=gpunode, observed_at=observed_at)
    return Lease(
        metadata=ObjectMeta(name="n", annotations={OBSERVED_AT: encode_confirmation(vouch)})
    )


def reason(state: RecordingState, of: str = "8Gi", at_s: float = NOW_S) -> Reason | None:
    snap = state.snapshot()
    asked = state.understand(pod(of))
    assert isinstance(asked, VramRequest)
    rows = snap.rows(["n"])
    assert (rows >= 0).all()
    return fit(asked, snap, rows, at_s).reason(0)


def headroom(state: RecordingState) -> list[int]:
    (node,) = state.snapshot().nodes
    return [terms.headroom_bytes // GIB for terms in node.devices]


class TestTheNodeAsAWhole:
    def test_a_reported_initialised_node_takes_pods(self) -> None:
        assert reason(state_of(*seen(kube_node(), gpunode(device())))) is None

    @pytest.mark.parametrize(
        ("events", "expected"),
        [
            pytest.param([gpunode(device())], Reason.UNKNOWN_NODE, id="no node of that name"),
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
                id="a reserve that cannot be read",
            ),
        ],
    )
    def test_it_shows_why_it_takes_no_pods(
        self, events: list[Node | GPUNode], expected: Reason
    ) -> None:
        assert reason(state_of(*seen(*events))) is expected

    def test_the_reserve_is_kept_free(self) -> None:
        node = kube_node(annotations={RESERVE: "4Gi"})
        assert headroom(state_of(*seen(node, gpunode(device())))) == [20]

    def test_what_went_is_forgotten(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([NodeGone("n")])
        assert reason(state) is Reason.UNKNOWN_NODE
        state.apply([GPUNodeGone("n")])
        assert state.snapshot().nodes == ()
        assert state.gpunode("n") is None


def reserving(gpunode: GPUNode, **promised_gib: int | None) -> GPUNode:
    """The object as it is written with these reservations too; None removes one."""
    kept = {uid: p for uid, p in gpunode.spec.reservations.items() if uid not in promised_gib}
    new = {uid: reservation({"A": size * GIB}) for uid, size in promised_gib.items() if size}
    return replace(
        gpunode,
        metadata=replace(gpunode.metadata, resource_version="2"),
        spec=replace(gpunode.spec, reservations={**kept, **new}),
    )


class TestBindsOnTheirWay:
    def test_filter_counts_assumed_binds_before_they_are_written(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        assert headroom(state) == [4]
        assert reason(state) is not None

    def test_once_written_they_count_once(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        written = gpunode(
            device(), version="2", reservations={"other": reservation({device().uuid: 20 * GIB})}
        )
        state.apply([GPUNodeSeen(written, NOW_S)])
        assert headroom(state) == [4]
        state.apply([BindEnded("other", "n")])
        assert headroom(state) == [4]

    def test_once_written_nothing_of_it_is_weighed_again(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        reservations = {"other": reservation({device().uuid: 20 * GIB})}
        state.apply([GPUNodeSeen(gpunode(device(), version="2", reservations=reservations), NOW_S)])
        snapshot = state.snapshot()
        state.apply([BindEnded("other", "n")])
        again = gpunode(device(), version="2", reservations=reservations)  # as the watch sends it
        state.apply([GPUNodeSeen(again, NOW_S + 1)])
        assert state.snapshot() is snapshot

    @pytest.mark.parametrize("vram", ["8Gi", "20Gi", "100Gi"])
    @pytest.mark.parametrize("choice", [None, "predicted", "pinned", "any"])
    @pytest.mark.parametrize("steered", [[], [GPU]])
    def test_an_expected_reservation_is_not_weighed_again(
        self, vram: str, choice: str | None, steered: list[str]
    ) -> None:
        """And the terms equal those of a weighing."""
        plugin = replace(DISTRIBUTED, steered=steered, pinning="honoured")
        node = gpunode(shared("A"), shared("B", memory_bytes=40 * GIB), plugin=plugin)
        about = kube_node(annotations={DEVICE_CHOICE: choice} if choice else None)
        asked = pod(vram, uid="other")
        state = state_of(*seen(about, node))
        placed = state.judge(asked, node, NOW_S)
        charges = (
            list(placed.charges) if isinstance(placed, Placement) else reservation({"A": 1}).charges
        )
        made = Reservation("default", "p", charges, attempt="1", since=STAMP)
        written = replace(
            node,
            metadata=replace(node.metadata, resource_version="2"),
            spec=replace(node.spec, reservations={"other": made}, reserved="8Gi"),
        )
        foreseen = state.judge_as_weighed(asked, node, NOW_S)
        assert foreseen == (placed if isinstance(placed, Placement) else None)
        anyway = state_of(*seen(about, node), BindBegun(asked, "n")).snapshot().nodes
        state.apply([BindBegun(asked, "n", foreseen)])
        assert state.snapshot().nodes == anyway
        generation = state.snapshot().generation
        state.apply([GPUNodeSeen(written, NOW_S), BindEnded("other", "n")])
        assert state.gpunode("n") == written
        assert (state.snapshot().generation == generation) == isinstance(placed, Placement)
        anew = state_of(*seen(about, written)).snapshot()
        assert state.snapshot().nodes == anew.nodes

    @pytest.mark.parametrize(
        ("events", "asked"),
        [
            pytest.param([BindBegun(pod("1Gi", uid="b"), "n")], pod("2Gi"), id="another bind"),
            pytest.param([], pod("2Gi", uid="old"), id="it has a reservation"),
            pytest.param([PodSeen(pod("2Gi", node="n"))], pod("2Gi"), id="it sits there"),
            pytest.param([], pod("30Gi"), id="it does not fit"),
            pytest.param([], pod("much"), id="it cannot be read"),
            pytest.param([], pod(None, Container("c")), id="it asks for no GPU"),
            pytest.param([NodeGone("n")], pod("2Gi"), id="the node is gone"),
        ],
    )
    def test_the_last_weighing_is_not_used_for_another_version(
        self, events: list[Event], asked: Pod
    ) -> None:
        held = gpunode(shared("A"), reservations={"old": reservation({"A": GIB})})
        state = state_of(*seen(kube_node(), held))
        assert state.judge_as_weighed(pod("2Gi"), held, NOW_S) is not None
        assert state.judge_as_weighed(pod("2Gi"), held, NOW_S + 1e6) is None
        state.apply(events)
        assert state.judge_as_weighed(asked, held, NOW_S) is None

    def test_what_waits_to_be_weighed_is_not_judged_by_how_it_was(self) -> None:
        held = gpunode(shared("A"))
        state = state_of(*seen(kube_node(), held))
        for _ in state.steps([GPUNodeSeen(reserving(held, other=20), NOW_S)]):
            pass
        newer = state.gpunode("n")
        assert newer is not None
        for known in (held, newer):
            assert state.judge_as_weighed(pod("8Gi"), known, NOW_S) is None
        state.weigh_next()
        assert state.judge_as_weighed(pod("2Gi"), held, NOW_S) is None
        assert state.judge_as_weighed(pod("8Gi"), newer, NOW_S) is None
        assert state.judge_as_weighed(pod("2Gi"), newer, NOW_S) is not None

    @pytest.mark.parametrize(
        "change",
        [
            pytest.param(lambda o: reserving(o, other=21), id="another amount"),
            pytest.param(lambda o: reserving(o, other=20, more=1), id="one more pod"),
            pytest.param(lambda o: reserving(o, old=None), id="somebody less"),
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
    def test_all_else_that_is_written_is_weighed(
        self, change: Callable[[GPUNode], GPUNode]
    ) -> None:
        held = gpunode(shared("A"), reservations={"old": reservation({"A": GIB})})
        expected = reserving(held, other=20)
        for written, changes in ((expected, False), (change(expected), True)):
            state = state_of(*seen(kube_node(), held))
            state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
            before = state.snapshot()
            state.apply([GPUNodeSeen(written, NOW_S)])
            assert (state.snapshot() is not before) == changes

    def test_what_overcommits_is_weighed(self) -> None:
        """Alarms are raised for reservations, not for assumed binds."""
        held = gpunode(shared("A"))
        state = state_of(*seen(kube_node(), held))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        state.apply([BindBegun(pod("20Gi", uid="another"), "n")])
        assert not state.overcommits.now()
        state.apply([GPUNodeSeen(reserving(held, other=20, another=20), NOW_S)])
        assert state.overcommits.now()

    def test_a_reservation_of_a_deleted_pod_is_checked(self) -> None:
        held = gpunode(shared("A"))
        state = state_of(*seen(kube_node(), held))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        state.take_unsettled()
        before = state.snapshot()
        state.apply([GPUNodeSeen(reserving(held, other=20), NOW_S)])
        assert state.snapshot() is before
        assert state.take_unsettled() == ["n"]

    def test_a_change_of_a_reserved_pod_is_weighed_if_anything_depends_on_it(self) -> None:
        reservations = {"other": reservation({device().uuid: 20 * GIB})}
        state = state_of(*seen(kube_node(), gpunode(device(), reservations=reservations)))
        before = state.snapshot()
        bound = pod("20Gi", uid="other", node="n")
        changed = msgspec.structs.replace(
            bound, metadata=msgspec.structs.replace(bound.metadata, annotations={VRAM: "1Gi"})
        )
        state.apply([PodSeen(pod("20Gi", uid="other")), PodSeen(bound), PodSeen(changed)])
        assert state.snapshot() is before
        assert state.unreserved_pods("n") == []
        leaving = msgspec.structs.replace(
            bound, metadata=msgspec.structs.replace(bound.metadata, deletion_timestamp="now")
        )
        for answer in (PodSeen(leaving), PodSeen(bound), PodGone("other")):
            state.apply([answer])
            assert state.snapshot() is not before
            before = state.snapshot()

    def test_one_that_failed_leaves_nothing(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n"), BindEnded("other", "n")])
        assert headroom(state) == [24]

    def test_bind_itself_is_judged_by_what_is_written(self) -> None:
        node = gpunode(device())
        state = state_of(*seen(kube_node(), node))
        state.apply([BindBegun(pod("20Gi", uid="other"), "n")])
        assert isinstance(state.judge(pod("20Gi"), node, NOW_S), Placement)

    def test_a_bind_to_an_unknown_node_changes_nothing(self) -> None:
        state = state_of(BindBegun(pod("20Gi"), "gone"), BindEnded("u", "gone"))
        assert state.snapshot().nodes == ()


class TestRoom:
    @pytest.mark.parametrize(
        ("before", "after", "grew"),
        [
            pytest.param(None, gpunode(device()), True, id="a new node"),
            pytest.param(gpunode(device(), initialised=False), gpunode(device()), True, id="ready"),
            pytest.param(gpunode(device()), gpunode(device(), initialised=False), False, id="not"),
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
                id="memory came free",
            ),
            pytest.param(
                gpunode(device()), gpunode(device(unattributed_bytes=GIB)), False, id="memory went"
            ),
            pytest.param(
                gpunode(shared(free=0, allocated=4)),
                gpunode(shared(free=1, allocated=3)),
                True,
                id="a replica came free",
            ),
            pytest.param(
                gpunode(device(healthy=False)), gpunode(device()), True, id="a device recovered"
            ),
            pytest.param(gpunode(device()), gpunode(device()), False, id="nothing"),
        ],
    )
    def test_the_last_gain_of_a_node_is_recorded(
        self, before: GPUNode | None, after: GPUNode, grew: bool
    ) -> None:
        state = state_of(*seen(kube_node(), *([before] if before else [])))
        before_it = state.snapshot().generation
        state.apply(seen(after))
        assert (state.headroom_gains.of("n") > before_it) is grew
        assert (state.latest_gain > before_it) is grew
        assert state.headroom_gains.of("n") <= state.snapshot().generation

    def test_a_stale_node_counts_as_a_gain_when_it_reports_again(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        before_it = state.snapshot().generation
        again = gpunode(device(), version="2", observed_at="2026-11-21T01:00:00+00:00")
        state.apply(seen(again, at_s=NOW_S + STALE_AFTER_S))
        assert state.headroom_gains.of("n") <= before_it
        later = gpunode(device(), version="3", observed_at="2026-11-21T02:00:00+00:00")
        state.apply(seen(later, at_s=NOW_S + 3 * STALE_AFTER_S))
        assert state.headroom_gains.of("n") > before_it

    @pytest.mark.parametrize(
        ("pods", "unsettled"),
        [
            pytest.param([pod(node="n")], False, id="it sits there"),
            pytest.param([pod()], False, id="it may be bound later"),
            pytest.param([], True, id="it is gone"),
            pytest.param([pod(node="n", phase="Failed")], True, id="it ended"),
            pytest.param([pod(node="m")], True, id="it went elsewhere"),
        ],
    )
    def test_nodes_with_possible_orphans_are_reported_once(
        self, pods: list[Pod], unsettled: bool
    ) -> None:
        state = state_of(*seen(kube_node(), pod(node="n"), gpunode(device())))
        state.apply([*seen(*pods), *([] if pods else [PodGone("uid-p")])])
        assert state.take_unsettled() == ["n"]  # it has no reservation
        reserved = gpunode(
            device(), reservations={"uid-p": reservation({"GPU-0": GIB})}, version="2"
        )
        state.apply(seen(reserved))
        assert state.has_unsettled is unsettled
        assert state.take_unsettled() == (["n"] if unsettled else [])
        assert not state.has_unsettled


class TestDevicesThatThePluginCouldGive:
    """Two replicas of D0 are in use and three of D1; only the memory of D1 is full."""

    devices = (shared("D0", free=2, allocated=2), shared("D1", free=1, allocated=3))
    reservations: ClassVar = {
        "uid-ends": reservation({"D1": 20 * GIB}),
        **{f"u{n}": reservation({"D1": 2 * GIB}) for n in range(2)},
        **{f"v{n}": reservation({"D0": GIB}) for n in range(2)},
    }
    rows: ClassVar = [
        use(uid, next(iter(p.charges[0].candidates))) for uid, p in reservations.items()
    ]

    def sitting(self, deleted: str | None = None) -> list[Pod]:
        stay = [uid for uid in self.reservations if uid != "uid-ends"]
        rows = [pod("2Gi", uid=uid, name=uid, node="n", phase="Running") for uid in stay]
        return [*rows, pod("20Gi", uid="uid-ends", name="ends", node="n", deleted=deleted)]

    def reported(self, **how: object) -> GPUNode:
        given = {"reservations": self.reservations, "pods": self.rows, "plugin": DISTRIBUTED, **how}
        return gpunode(*self.devices, **given)  # type: ignore[arg-type]

    @pytest.mark.parametrize("how", ["stays", "is being deleted", "is gone", "has ended"])
    def test_a_pod_that_ends_lets_the_plugin_choose_its_device(self, how: str) -> None:
        """Without its pod, D1 has two replicas in use, as D0, and enough memory.

        One replica more makes no difference to a pod of D0.
        """
        pods = self.sitting("2026-11-21T00:00:00Z" if how == "is being deleted" else None)
        if how == "is gone":
            pods.pop()
        if how == "has ended":
            pods[-1] = pod("20Gi", uid="uid-ends", name="ends", node="n", phase="Succeeded")
        state = state_of(*seen(kube_node(), self.reported(), *pods))
        snap = state.snapshot()
        assert (snap.columns.reach[0] == 1).tolist() == [True, how != "stays"]
        room = snap.columns.free_bytes[0].tolist()
        assert room == [22 * GIB, 20 * GIB if how != "stays" else 0]

    def test_a_node_may_require_free_memory_on_every_device(self) -> None:
        for choice, fits in ((None, True), ("predicted", True), ("any", False)):
            wished = None if choice is None else {DEVICE_CHOICE: choice}
            node = kube_node(annotations=wished)
            state = state_of(*seen(node, self.reported(), *self.sitting()))
            assert (reason(state) is None) is fits, choice

    def test_a_gated_node_takes_gated_pods_as_others_do_and_no_others(self) -> None:
        node = kube_node(annotations={DEVICE_CHOICE: "gated"})
        state = state_of(*seen(node, self.reported(), *self.sitting()))
        plain = pod("8Gi", container())
        for made, expected in (
            (plain, Reason.NO_GATE),
            (pod("8Gi", init=[gate()]), None),
            (pod("23Gi", init=[gate()]), Reason.MEMORY_ON_ANY),
            # A gate that is not the first container holds no pod back.
            (pod("8Gi", init=[Container(name="first"), gate()]), Reason.NO_GATE),
        ):
            asked = state.understand(made)
            assert isinstance(asked, VramRequest)
            snap = state.snapshot()
            assert fit(asked, snap, snap.rows(["n"]), NOW_S).reason(0) is expected
            judged = state.judge(made, self.reported(), NOW_S)
            assert (judged if isinstance(judged, Reason) else None) is expected
        # A pod that requests no GPU does not matter here.
        other = state.understand(pod(None, Container(name="main")))
        assert isinstance(other, VramRequest)
        assert fit(other, snap, snap.rows(["n"]), NOW_S).reason(0) is None

    def test_an_invalid_node_annotation_closes_the_node(self) -> None:
        node = kube_node(annotations={DEVICE_CHOICE: "best"})
        state = state_of(*seen(node, self.reported(), *self.sitting()))
        assert reason(state) is Reason.BAD_NODE_ANNOTATION
        (terms,) = state.snapshot().nodes
        assert terms.detail == (
            f"annotation {DEVICE_CHOICE}: 'best' is not one of predicted, any, gated, steered, "
            f"pinned. Example: {DEVICE_CHOICE}: predicted"
        )

    def test_a_device_that_is_no_longer_a_candidate_frees_memory(self) -> None:
        """D1, where nothing is left, is behind D0 as soon as one more of it is taken."""
        even = [shared("D0", free=2, allocated=2), shared("D1", free=2, allocated=2)]
        one_more = [even[0], shared("D1", free=1, allocated=3)]
        full = {"u": reservation({"D1": 24 * GIB})}
        rows = [
            use("u", "D1"),
            use("s", "D1", 0),
            use("t", "D0", 0),
            use("t", "D0", 0, replica="1"),
        ]
        state = state_of(
            *seen(kube_node(), *(pod("1M", uid=uid, name=uid, node="n") for uid in "ust")),
            *seen(gpunode(*even, reservations=full, pods=rows, plugin=DISTRIBUTED)),
        )
        assert reason(state) is Reason.MEMORY_ON_SOME
        before_it = state.snapshot().generation
        rows.append(use("s", "D1", 0, replica="1"))
        after = gpunode(*one_more, version="2", reservations=full, pods=rows, plugin=DISTRIBUTED)
        state.apply(seen(after))
        assert state.headroom_gains.of("n") > before_it


class TestFreshness:
    def test_a_silent_node_grows_stale(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        assert reason(state, at_s=NOW_S + STALE_AFTER_S) is None
        assert reason(state, at_s=NOW_S + STALE_AFTER_S + 1) is Reason.STALE_REPORT

    def test_an_old_report_is_not_fresh_at_first_sight(self) -> None:
        old = gpunode(device(), observed_at="2026-11-20T00:00:00Z")
        assert reason(state_of(*seen(kube_node(), old))) is Reason.STALE_REPORT

    def test_a_heartbeat_keeps_a_steady_node_fresh(self) -> None:
        state = state_of(
            *seen(kube_node(), gpunode(device())),
            HeartbeatSeen(lease("2026-11-21T00:00:00Z"), NOW_S),
            HeartbeatSeen(lease("2026-11-21T00:01:00Z"), NOW_S + 60),
        )
        assert reason(state, at_s=NOW_S + 150) is None
        state.apply([HeartbeatGone("n")])
        assert reason(state, at_s=NOW_S + 150) is Reason.STALE_REPORT

    @pytest.mark.parametrize(
        "other",
        [
            pytest.param({"gpunode": "another"}, id="another object"),
            pytest.param({"observed_at": "2026-11-20T00:00:00Z"}, id="another status"),
        ],
    )
    def test_a_heartbeat_for_another_report_does_not_confirm_this_one(
        self, other: dict[str, str]
    ) -> None:
        state = state_of(
            *seen(kube_node(), gpunode(device())),
            HeartbeatSeen(lease("2026-11-21T00:00:00Z", **other), NOW_S),
            HeartbeatSeen(lease("2026-11-21T00:01:00Z", **other), NOW_S + 60),
        )
        assert reason(state, at_s=NOW_S + 91) is Reason.STALE_REPORT

    @pytest.mark.parametrize("text", [None, "", "{}", "[1", "2026-11-21T00:01:00Z"])
    def test_a_lease_that_vouches_for_nothing_is_no_heartbeat(self, text: str | None) -> None:
        annotations = None if text is None else {OBSERVED_AT: text}
        silent = Lease(metadata=ObjectMeta(name="n", annotations=annotations))
        state = state_of(
            *seen(kube_node(), gpunode(device())),
            HeartbeatSeen(lease("2026-11-21T00:00:00Z"), NOW_S),
            HeartbeatSeen(lease("2026-11-21T00:01:00Z"), NOW_S + 60),
            HeartbeatSeen(silent, NOW_S + 80),
        )
        assert reason(state, at_s=NOW_S + 91) is Reason.STALE_REPORT

    def test_a_heartbeat_that_comes_before_its_report_counts_when_that_has_come(self) -> None:
        later = "2026-11-21T00:00:30Z"
        state = state_of(
            *seen(kube_node(), gpunode(device())),
            HeartbeatSeen(lease("2026-11-21T00:00:31Z", observed_at=later), NOW_S + 31),
            HeartbeatSeen(lease("2026-11-21T00:01:01Z", observed_at=later), NOW_S + 61),
        )
        assert reason(state, at_s=NOW_S + 91) is Reason.STALE_REPORT
        state.apply(seen(gpunode(device(), version="2", observed_at=later), at_s=NOW_S + 62))
        assert reason(state, at_s=NOW_S + 152) is None

    def test_a_new_version_with_the_same_sample_is_no_sign_of_life(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply(seen(gpunode(device(), version="2"), at_s=NOW_S + 80))
        assert reason(state, at_s=NOW_S + 100) is Reason.STALE_REPORT

    def test_an_object_made_again_is_a_first_sight(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(device())))
        state.apply([GPUNodeGone("n")])
        again = gpunode(device(), uid="other", observed_at="2026-11-20T23:00:00Z")
        state.apply(seen(again))
        assert reason(state) is Reason.STALE_REPORT


class TestWhatCallsDecideOn:
    @pytest.mark.parametrize("counts", [False, True])
    def test_watch_events_wait_for_the_next_snapshot(self, counts: bool) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("A"))))
        shown = state.snapshot()
        unattributed_use_bytes = 8 * GIB if counts else 0
        grown = shared("A", used_bytes=8 * GIB, unattributed_bytes=unattributed_use_bytes)
        for _ in state.steps([GPUNodeSeen(gpunode(grown, version="2"), NOW_S)]):
            pass
        assert state.weigh_next() is counts
        assert state.settled() is shown
        latest = state.snapshot()
        assert latest is not shown
        assert state.settled() is latest

    def test_what_we_did_ourselves_is_seen_at_once(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("A"))))
        shown = state.snapshot()
        state.apply([BindBegun(pod("8Gi", uid="u"), "n")])
        assert state.settled() is not shown
        (node,) = state.settled().nodes
        assert node.devices[0].unconfirmed_bytes == 8 * GIB


class TestVersions:
    def test_an_older_version_that_comes_late_is_passed_over(self) -> None:
        held = {"u": reservation({"D": 8 * GIB})}
        new = gpunode(shared("D"), version="10", reservations=held)
        state = state_of(*seen(kube_node(), new, gpunode(shared("D"), version="9")))
        assert state.gpunode("n") is new
        assert headroom(state) == [16]

    def test_another_object_of_the_name_is_taken_whatever_its_version(self) -> None:
        other = gpunode(shared("D"), uid="other", version="1")
        state = state_of(*seen(kube_node(), gpunode(shared("D"), version="10"), other))
        assert state.gpunode("n") is other

    def test_versions_that_are_no_numbers_are_taken_as_they_come(self) -> None:
        later = gpunode(shared("D"), version="a")
        state = state_of(*seen(kube_node(), gpunode(shared("D"), version="b"), later))
        assert state.gpunode("n") is later


class TestBystanders:
    """Pods bound without a reservation."""

    def test_they_are_charged_when_seen_and_not_when_gone(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a"), shared("b"))))
        state.apply(seen(pod("8Gi", node="n")))
        assert headroom(state) == [16, 16]
        state.apply([PodGone("uid-p")])
        assert headroom(state) == [24, 24]

    def test_order_does_not_matter(self) -> None:
        what: list[Pod | Node | Namespace | GPUNode]
        what = [kube_node(), gpunode(shared("a")), pod(None, node="n")]
        what.append(namespace(annotations={DEFAULT_VRAM: "10Gi"}))
        for turn in range(4):
            assert headroom(state_of(*seen(*what[turn:], *what[:turn]))) == [14]
            state = RecordingState(Rules(), STALE_AFTER_S, EPOCH_S)
            for event in seen(*what[turn:], *what[:turn]):
                state.apply([event])
            assert headroom(state) == [14]

    def test_a_default_that_is_taken_away_counts_no_more(self) -> None:
        state = state_of(
            *seen(kube_node(), gpunode(shared("a")), pod(None, node="n")),
            NamespaceSeen(namespace(annotations={DEFAULT_VRAM: "10Gi"})),
        )
        state.apply([NamespaceSeen(namespace())])
        assert headroom(state) == [18]
        state.apply([NamespaceSeen(namespace(annotations={DEFAULT_VRAM: "10Gi"}))])
        state.apply([NamespaceGone("default")])
        assert headroom(state) == [18]

    def test_a_pod_with_a_reservation_is_charged_once(self) -> None:
        held = {"uid-p": reservation({"a": 8 * GIB})}
        state = state_of(
            *seen(kube_node(), gpunode(shared("a"), reservations=held), pod("8Gi", node="n"))
        )
        assert headroom(state) == [16]

    def test_one_that_ended_is_charged_what_is_still_measured(self) -> None:
        report = gpunode(shared("a", used_bytes=2 * GIB), pods=[use("uid-p", "a", 2 * GIB)])
        state = state_of(*seen(kube_node(), report, pod("8Gi", node="n", phase="Succeeded")))
        assert headroom(state) == [22]

    def test_unbound_and_gpuless_pods_are_not_charged(self) -> None:
        gpuless = pod(None, container(gpus=0), node="n", uid="other", name="other")
        state = state_of(*seen(kube_node(), gpunode(shared("a")), pod("8Gi"), gpuless))
        assert headroom(state) == [24]
        assert [p.metadata.uid for p in state.pods()] == ["uid-p"]

    def test_one_that_overcommits_is_charged_all_the_same(self) -> None:
        two = [pod("20Gi", node="n", uid=u, name=u) for u in "ab"]
        assert headroom(state_of(*seen(kube_node(), gpunode(shared("x")), *two))) == [-16]


class TestPods:
    def test_a_name_belongs_to_the_pod_that_has_it_now(self) -> None:
        state = state_of(*seen(pod(uid="old"), pod(uid="new")), PodGone("old"))
        found = state.pod_named("default", "p")
        assert found is not None
        assert found.metadata.uid == "new"
        assert state.pod("old") is None

    def test_a_bound_pod_is_charged_on_its_node(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a")), pod("8Gi")))
        state.apply(seen(pod("8Gi", node="n", version="2")))
        assert headroom(state) == [16]


class TestRelist:
    def test_what_the_list_does_not_name_is_forgotten(self) -> None:
        state = state_of(
            *seen(kube_node(), kube_node("m"), gpunode(shared("a")), pod("8Gi", node="n")),
            HeartbeatSeen(lease("2026-11-21T00:00:30Z"), NOW_S),
            NamespaceSeen(namespace(annotations={DEFAULT_VRAM: "1Gi"})),
        )
        other = pod("4Gi", node="n", uid="other", name="other")
        state.apply([Relisted(Pod, (other,), NOW_S)])
        assert [p.metadata.uid for p in state.pods()] == ["other"]
        assert headroom_of(state, "n") == [20]
        state.apply([Relisted(Node, (kube_node(),), NOW_S)])
        assert [node.metadata.name for node in state.nodes()] == ["n"]
        state.apply([Relisted(Namespace, (), NOW_S)])
        assert state.understand(pod(None)) == state_of().understand(pod(None))
        state.apply([Relisted(Lease, (), NOW_S)])
        assert reason(state, "1M", at_s=NOW_S + 89) is None
        state.apply([Relisted(GPUNode, (), NOW_S)])
        assert state.gpunodes() == []
        assert reason(state) is Reason.NO_REPORT

    def test_what_it_names_is_taken_as_seen(self) -> None:
        state = state_of(
            Relisted(Namespace, (namespace(annotations={DEFAULT_VRAM: "9Gi"}),), NOW_S),
            Relisted(Node, (kube_node(),), NOW_S),
            Relisted(GPUNode, (gpunode(shared("a")),), NOW_S),
            Relisted(Pod, (pod(None, node="n"),), NOW_S),
            Relisted(Lease, (lease("2026-11-21T00:00:00Z"),), NOW_S),
        )
        assert headroom(state) == [15]
        assert reason(state, at_s=NOW_S) is None

    def test_the_same_list_again_changes_nothing(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a")), pod("8Gi", node="n")))
        state.apply([Relisted(Pod, (pod("8Gi", node="n"),), NOW_S + 50)])
        state.apply([Relisted(GPUNode, (gpunode(shared("a")),), NOW_S + 50)])
        assert headroom(state) == [16]
        assert reason(state, at_s=NOW_S + 91) is Reason.STALE_REPORT


def headroom_of(state: RecordingState, name: str) -> list[int]:
    snap = state.snapshot()
    return [t.headroom_bytes // GIB for t in snap.nodes[snap.row_of[name]].devices]


class TestJudge:
    """Bind's judgement about the object that it is going to write."""

    def test_it_decides_on_the_object_given(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a"))))
        fuller = gpunode(shared("a"), version="2", reservations={"u": reservation({"a": 20 * GIB})})
        assert state.judge(pod("8Gi"), fuller, NOW_S) is Reason.MEMORY_ON_ANY
        placement = state.judge(pod("8Gi"), gpunode(shared("a")), NOW_S)
        assert isinstance(placement, Placement)
        assert placement.charges[0].candidates == {"a": 8 * GIB}

    def test_the_pods_own_reservation_does_not_count_against_it(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a"))))
        own = gpunode(shared("a"), reservations={"uid-p": reservation({"a": 20 * GIB})})
        assert isinstance(state.judge(pod("20Gi"), own, NOW_S), Placement)

    def test_unreserved_pods_count(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a"))))
        state.apply(seen(pod("20Gi", node="n", uid="b", name="b")))
        assert state.judge(pod("8Gi"), gpunode(shared("a")), NOW_S) is Reason.MEMORY_ON_ANY

    def test_it_rejects_what_filter_rejects(self) -> None:
        state = state_of(*seen(kube_node(), gpunode(shared("a"))))
        assert state.judge(pod("lots"), gpunode(shared("a")), NOW_S) is Reason.BAD_VRAM
        late = NOW_S + STALE_AFTER_S + 1
        assert state.judge(pod(), gpunode(shared("a")), late) is Reason.STALE_REPORT
        assert state.judge(pod(), gpunode(), NOW_S) is Reason.NO_REPORT


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
            pytest.param("24Gi", {"v", "w"}, True, id="both"),
            pytest.param("1Gi", set(), False, id="nobody goes"),
            pytest.param("1Gi", {"other"}, False, id="another pod leaves"),
            pytest.param("lots", {"v", "w"}, False, id="a pod that cannot be read"),
        ],
    )
    def test_victims_give_back_what_they_held(
        self, vram: str, victims: set[str], fits: bool
    ) -> None:
        world = self.world()
        reason = rejection_beside(world, world.understand(pod(vram)), "n", (), NOW_S, victims)
        assert (reason is None) is fits

    def test_an_unknown_node_takes_none(self) -> None:
        world = self.world()
        request = world.understand(pod())
        reason = rejection_beside(world, request, "elsewhere", (), NOW_S, {"v", "w"})
        assert reason is Reason.UNKNOWN_NODE


def test_what_was_handed_out_does_not_change() -> None:
    state = state_of(*seen(kube_node(), gpunode(shared("a"))))
    snap = state.snapshot()
    assert state.snapshot() is snap
    state.apply(seen(pod("8Gi", node="n")))
    assert snap.columns.headroom_bytes[0, 0] == 24 * GIB
    assert state.snapshot().columns.headroom_bytes[0, 0] == 16 * GIB


def test_an_absurd_report_affects_only_its_device() -> None:
    """Whatever the agent reports, events are still applied."""
    absurd = shared("b", memory_bytes=1 << 90, used_bytes=1 << 90)
    state = state_of(*seen(kube_node(), gpunode(shared("a"), absurd), pod(None, node="n")))
    assert reason(state) is Reason.CONTRADICTORY_REPORT
    assert headroom(state)[0] == 18
    assert datetime.fromtimestamp(EPOCH_S + NOW_S, UTC).isoformat() == STAMP


def test_nodes_are_weighed_when_every_required_kind_was_listed() -> None:
    """Not after each list: without the pods of a node its terms are unknown."""
    state = RecordingState(Rules(), STALE_AFTER_S, EPOCH_S, unlisted=(Node, GPUNode, Pod))
    state.apply([Relisted(Node, (kube_node(),), NOW_S)])
    state.apply([Relisted(GPUNode, (gpunode(shared("a")),), NOW_S)])
    assert state.snapshot().nodes == ()
    state.apply([PodSeen(pod())])
    assert state.snapshot().nodes == ()
    state.apply([Relisted(Pod, (), NOW_S)])
    assert [node.name for node in state.snapshot().nodes] == ["n"]
    state.apply([Relisted(Node, (), NOW_S), Relisted(GPUNode, (), NOW_S)])
    assert state.snapshot().nodes == ()


def test_a_cluster_without_nodes_is_processed_once_it_is_listed() -> None:
    state = RecordingState(Rules(), STALE_AFTER_S, EPOCH_S, unlisted=(Node, Pod))
    for kind, begun in ((Node, False), (Pod, True)):
        for _ in state.steps([Relisted(kind, (), NOW_S)]):
            pass
        assert state.begun is begun
    other = RecordingState(Rules(), STALE_AFTER_S, EPOCH_S, unlisted=(Node,))
    for _ in other.steps([Relisted(Node, (kube_node(),), NOW_S)]):
        assert not other.begun
    assert not other.begun  # it is to be weighed first
    assert other.weigh_next()
    assert other.begun
