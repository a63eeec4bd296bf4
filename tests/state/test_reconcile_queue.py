"""Checks that the state finds everything that must be reconciled."""

from typing import Any

import msgspec
import pytest

from extender.reconcile.queue import (
    Orphan,
    Unmarked,
    UnreservedPod,
    being_deleted,
    changed_settings,
    orphans,
    uninitialised,
    unreserved_pods,
)
from headroom.contract.annotations import CORDON, DEVICE_CHOICE, FINALIZER, OBSERVED_AT
from headroom.contract.gpunode import Device, GPUNode, Reservation, Source
from headroom.contract.heartbeat import Confirmation, encode_confirmation
from headroom.contract.kube import (
    ContainerState,
    ContainerStatus,
    Lease,
    Node,
    NodeSpec,
    NodeStatus,
    ObjectMeta,
    Pod,
    PodStatus,
    Present,
    Taint,
)
from headroom.contract.watched import (
    GPUNodeGone,
    GPUNodeSeen,
    HeartbeatSeen,
    NodeSeen,
    PodGone,
    PodSeen,
    Relisted,
    SliceSeen,
)
from headroom.core.cluster.changes import DepartureMarked, Event
from headroom.core.cluster.node_settings import AgentSettings
from headroom.core.cluster.trackers.deleted_pods import DeletedPods
from headroom.core.placement.policy import Rules
from headroom.core.tracker import LastSeen
from tests.builders import (
    GPU,
    NOW_S,
    STAMP,
    container,
    gpunode,
    kube_node,
    pod,
    reservation,
    shared,
    use,
)
from tests.recording import RecordingState
from tests.state.test_claimed_devices import piece

KUBELET_ENDS_S = 120.0
REMEMBERED = 10000

WALL_S = 1_795_219_200.0  # 2026-11-21T00:00:00Z
YOUNG, OLD = "2026-11-20T23:59:30Z", "2026-11-20T23:58:30Z"
#: Times of a replica whose clock is slightly ahead, and far ahead.
NEXT, AHEAD = "2026-11-21T00:00:30Z", "2026-11-21T00:40:00Z"


def state_with(node: GPUNode, *pods: Pod) -> RecordingState:
    state = RecordingState(Rules(), 90.0, WALL_S - NOW_S)
    state.apply([GPUNodeSeen(node, NOW_S), *(PodSeen(p) for p in pods)])
    return state


@pytest.mark.parametrize(
    ("pods", "since", "observed", "left"),
    [
        pytest.param([pod(node="n")], OLD, False, False, id="its pod runs here"),
        pytest.param([pod(node="n", phase="Failed")], YOUNG, False, True, id="its pod has ended"),
        pytest.param([pod(node="m")], YOUNG, False, True, id="its pod is on another node"),
        pytest.param([pod()], YOUNG, False, False, id="its pod may be bound later"),
        pytest.param([pod()], OLD, False, True, id="its pod never appeared"),
        pytest.param([pod()], NEXT, False, False, id="timestamp slightly in the future"),
        pytest.param([pod()], AHEAD, False, True, id="timestamp far in the future"),
        pytest.param([], YOUNG, False, False, id="unknown pod, recent reservation"),
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
def test_reservations_without_a_pod_are_found(
    pods: list[Pod], since: str, observed: bool, left: bool
) -> None:
    rows = [use("uid-p", "a")] if observed else []
    held = {"uid-p": Reservation(namespace="default", name="p", since=since)}
    state = state_with(gpunode(shared("a"), reservations=held, pods=rows), *pods)
    assert orphans(state.cluster, WALL_S, 60.0) == ([Orphan("n", "uid-p")] if left else [])


@pytest.mark.parametrize(
    "since",
    [
        pytest.param(OLD, id="old"),
        pytest.param("then", id="of unknown age"),
        pytest.param(AHEAD, id="timestamp far in the future"),
    ],
)
def test_a_reservation_of_an_unknown_pod_is_checked(since: str) -> None:
    reservation = Reservation(namespace="default", name="p", since=since)
    state = state_with(gpunode(reservations={"uid-p": reservation}))  # The node has never reported.
    assert orphans(state.cluster, WALL_S, 60.0) == [Unmarked("n", "uid-p", reservation)]


PROMISE = Reservation(namespace="default", name="p", since=YOUNG)
AWAITS = [Unmarked("n", "uid-p", PROMISE)]
LEFT = [Orphan("n", "uid-p", left=True)]
RUNS = PodStatus(
    phase="Failed",
    container_statuses=[ContainerStatus(state=ContainerState(running=Present()))],
)


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        pytest.param([PodSeen(pod()), PodGone("uid-p")], LEFT, id="never bound"),
        pytest.param([PodSeen(pod(node="m")), PodGone("uid-p")], LEFT, id="bound elsewhere"),
        pytest.param(
            [PodSeen(pod(node="n", phase="Succeeded")), PodGone("uid-p")],
            LEFT,
            id="its pod has ended",
        ),
        pytest.param(
            [PodSeen(pod(node="n")), PodGone("uid-p", ended=True)], LEFT, id="known to have ended"
        ),
        pytest.param([PodSeen(pod(node="n")), PodGone("uid-p")], AWAITS, id="its end was not seen"),
        pytest.param(
            [PodSeen(msgspec.structs.replace(pod(node="n"), status=RUNS)), PodGone("uid-p")],
            AWAITS,
            id="marked as failed while it ran",
        ),
        pytest.param(
            [PodSeen(pod(node="m")), Relisted(Pod, (), NOW_S)], LEFT, id="missed, bound elsewhere"
        ),
        pytest.param([PodSeen(pod(node="n")), Relisted(Pod, (), NOW_S)], AWAITS, id="missed"),
        pytest.param(
            [PodSeen(pod()), Relisted(Pod, (), NOW_S)], [], id="missed, and unbound when last seen"
        ),
        pytest.param([PodGone("uid-p")], [], id="never seen"),
    ],
)
def test_the_reservation_of_a_deleted_pod_is_checked(
    events: list[Event], expected: list[Orphan | Unmarked]
) -> None:
    state = state_with(gpunode(shared("a"), reservations={"uid-p": PROMISE}))
    state.apply(events)
    assert orphans(state.cluster, WALL_S, 60.0) == expected


def heartbeat(after: str, gpunode: str = "gn", observed_at: str = STAMP) -> HeartbeatSeen:
    vouch = Confirmation(sampled_at="x", gpunode=gpunode, observed_at=observed_at, after=after)
    annotations = {OBSERVED_AT: encode_confirmation(vouch)}
    return HeartbeatSeen(Lease(metadata=ObjectMeta(name="n", annotations=annotations)), NOW_S)


SOUND = [Source(name="checkpoint"), Source(name="proc")]


@pytest.mark.parametrize(
    ("sources", "device", "beat", "left"),
    [
        pytest.param(SOUND, shared("a"), heartbeat("101"), True, id="a later sample"),
        pytest.param(SOUND, shared("a"), heartbeat("100"), False, id="possibly an earlier sample"),
        pytest.param(SOUND, shared("a"), heartbeat(""), False, id="of unknown order"),
        pytest.param(SOUND, shared("a"), heartbeat("1e9"), False, id="no version"),
        pytest.param(SOUND, shared("a"), heartbeat("9" * 5000), False, id="an impossible version"),
        pytest.param(SOUND, shared("a"), heartbeat("101", gpunode="x"), False, id="another object"),
        pytest.param(
            SOUND,
            shared("a"),
            heartbeat("101", observed_at="2026-11-21T00:00:01Z"),
            False,
            id="of another report",
        ),
        pytest.param([], shared("a"), heartbeat("101"), False, id="pods are not reported"),
        pytest.param(
            [Source(name="checkpoint", state="degraded"), Source(name="proc")],
            shared("a"),
            heartbeat("101"),
            False,
            id="holdings are not known",
        ),
        pytest.param(
            [Source(name="checkpoint"), Source(name="proc", state="degraded")],
            shared("a"),
            heartbeat("101"),
            False,
            id="processes are not known",
        ),
        pytest.param(
            [Source(name="checkpoint", state="absent"), *SOUND[1:], Source(name="podresources")],
            shared("a"),
            heartbeat("101"),
            True,
            id="holdings are known from elsewhere",
        ),
        pytest.param(
            SOUND,
            shared("a", unattributed_bytes=None),
            heartbeat("101"),
            False,
            id="processes are not attributed",
        ),
        pytest.param(
            SOUND,
            shared("a", used_bytes=-1, unattributed_bytes=None, healthy=False),
            heartbeat("101"),
            True,
            id="a device that is lost",
        ),
    ],
)
def test_a_deleted_pod_is_released_by_a_sample_taken_afterwards(
    sources: list[Source], device: Device, beat: HeartbeatSeen, left: bool
) -> None:
    node = gpunode(device, reservations={"uid-p": PROMISE})
    assert node.status is not None
    reported = msgspec.structs.replace(node.status, sources=sources)
    state = state_with(msgspec.structs.replace(node, status=reported), pod(node="n"))
    state.apply([PodGone("uid-p"), beat])
    assert orphans(state.cluster, WALL_S, 60.0) == AWAITS
    state.apply([DepartureMarked("n", "uid-p", "100"), DepartureMarked("n", "uid-p", "200")])
    assert orphans(state.cluster, WALL_S, 60.0) == (LEFT if left else [])


def unreachable(by: bool) -> NodeSeen:
    taints = [Taint(key="node.kubernetes.io/unreachable", effect="NoExecute")] if by else []
    return NodeSeen(msgspec.structs.replace(kube_node(), spec=NodeSpec(taints=taints)))


def test_without_an_agent_a_reachable_kubelet_has_ended_deleted_pods() -> None:
    node = gpunode(reservations={"uid-p": PROMISE})
    state = state_with(node, pod(node="n"))
    state.apply([unreachable(False), PodGone("uid-p"), DepartureMarked("n", "uid-p", "", NOW_S)])
    assert orphans(state.cluster, WALL_S + KUBELET_ENDS_S, 60.0) == AWAITS
    later_s = WALL_S + KUBELET_ENDS_S + 1.0
    assert orphans(state.cluster, later_s, 60.0) == LEFT
    # An unreachable kubelet has ended no pod, and the wait starts again when it is back.
    state.apply([unreachable(True)])
    assert orphans(state.cluster, later_s, 60.0) == AWAITS
    state.apply([DepartureMarked("n", "uid-p", "", NOW_S)])
    assert orphans(state.cluster, later_s, 60.0) == AWAITS
    state.apply([unreachable(False), DepartureMarked("n", "uid-p", "", NOW_S + 100.0)])
    assert orphans(state.cluster, later_s, 60.0) == AWAITS
    assert orphans(state.cluster, later_s + 100.0, 60.0) == LEFT


def test_the_sample_of_an_agent_that_has_reported_is_awaited() -> None:
    state = state_with(gpunode(shared("a"), reservations={"uid-p": PROMISE}), pod(node="n"))
    state.apply([unreachable(False), PodGone("uid-p"), DepartureMarked("n", "uid-p", "", NOW_S)])
    assert orphans(state.cluster, WALL_S + 10 * KUBELET_ENDS_S, 60.0) == AWAITS


def test_marks_are_dropped_together_with_the_reservation() -> None:
    node = gpunode(shared("a"), reservations={"uid-p": PROMISE})
    state = state_with(node)
    for gone in (GPUNodeGone("n"), GPUNodeSeen(gpunode(shared("a"), version="2"), NOW_S)):
        state.apply([GPUNodeSeen(node, NOW_S), DepartureMarked("n", "uid-p", "100")])
        assert state.cluster.departures.marked("n", "uid-p")
        state.apply([gone])
        assert not state.cluster.departures.marked("n", "uid-p")


def test_the_number_of_recorded_deleted_pods_is_limited() -> None:
    departures = DeletedPods()
    for i in range(REMEMBERED + 1):
        departures.pod_gone(f"uid-{i}", LastSeen("", False))
    assert departures.seen("uid-0") is None
    assert departures.seen("uid-1") is not None


def test_only_the_given_nodes_are_checked() -> None:
    held = {"uid-p": Reservation(namespace="default", name="p", since=OLD)}
    state = state_with(gpunode(reservations=held))
    assert orphans(state.cluster, WALL_S, 60.0, ["n", "nowhere"]) == [
        Unmarked("n", "uid-p", held["uid-p"])
    ]
    assert orphans(state.cluster, WALL_S, 60.0, []) == []


@pytest.mark.parametrize(
    ("node", "sitting", "charged"),
    [
        pytest.param(gpunode(shared("a")), pod(node="n"), False, id="bound by another scheduler"),
        pytest.param(
            gpunode(shared("a"), reservations={"uid-p": reservation({"a": 1})}),
            pod(node="n"),
            True,
            id="bound by Headroom",
        ),
        pytest.param(
            gpunode(shared("a"), initialised=False), pod(node="n"), True, id="no ledger yet"
        ),
        pytest.param(gpunode(shared("a")), pod(), True, id="not bound"),
        pytest.param(gpunode(shared("a")), pod(node="n", phase="Succeeded"), True, id="ended"),
        pytest.param(
            gpunode(shared("a")), pod(None, container(gpus=0), node="n"), True, id="no GPU"
        ),
    ],
)
def test_an_unreserved_pod_must_be_charged(node: GPUNode, sitting: Pod, charged: bool) -> None:
    state = state_with(node, sitting)
    found = [] if charged else [UnreservedPod("n", sitting)]
    assert (
        unreserved_pods(state.cluster) == unreserved_pods(state.cluster, ["n", "nowhere"]) == found
    )
    assert unreserved_pods(state.cluster, []) == []
    assert ("n" in state.take_unsettled()) == bool(found)


def offering(name: str, *resources: str) -> Node:
    status = NodeStatus(allocatable=dict.fromkeys(resources, "1"))
    return Node(metadata=ObjectMeta(name=name), status=status)


def test_nodes_that_offer_gpus_need_a_gpunode() -> None:
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
    assert [node.metadata.name for node in uninitialised(state.cluster)] == ["new", "begun"]


def test_a_node_whose_gpus_a_dra_driver_manages_gets_a_gpunode() -> None:
    """Without a GPUNode its agent could not report."""
    state = RecordingState(Rules(), 90.0, WALL_S - NOW_S)
    state.apply([NodeSeen(Node(metadata=ObjectMeta(name=name))) for name in ("n", "without-gpus")])
    assert uninitialised(state.cluster) == []
    state.apply([SliceSeen(piece("n"))])
    assert [node.metadata.name for node in uninitialised(state.cluster)] == ["n"]


def test_the_finalizer_of_deleted_gpunodes_is_removed_once() -> None:
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
    state = RecordingState(Rules(), 90.0, WALL_S - NOW_S)
    state.apply(GPUNodeSeen(node, NOW_S) for node in held)
    assert being_deleted(state.cluster.gpunodes()) == ["held"]


@pytest.mark.parametrize(
    ("annotations", "copied", "found"),
    [
        pytest.param({DEVICE_CHOICE: "steered"}, {}, ("steered", ()), id="new"),
        pytest.param({DEVICE_CHOICE: " steered "}, {"device_choice": "steered"}, None, id="known"),
        pytest.param(
            {DEVICE_CHOICE: "predicted"},
            {"device_choice": "steered"},
            ("predicted", ()),
            id="changed",
        ),
        pytest.param({}, {"device_choice": "steered"}, ("", ()), id="removed"),
        pytest.param(
            {DEVICE_CHOICE: "best"}, {"device_choice": "steered"}, None, id="unknown setting"
        ),
        pytest.param({CORDON: "GPU-b,GPU-a"}, {}, ("", ("GPU-a", "GPU-b")), id="cordoned"),
        pytest.param({CORDON: "GPU-a"}, {"cordoned": ["GPU-a"]}, None, id="cordoned before"),
        pytest.param({}, {"cordoned": ["GPU-a"]}, ("", ()), id="uncordoned"),
        pytest.param({CORDON: "GPU a"}, {"cordoned": ["GPU-a"]}, None, id="not a UUID"),
        pytest.param(
            {DEVICE_CHOICE: "best", CORDON: "GPU-a"},
            {"device_choice": "steered"},
            ("steered", ("GPU-a",)),
            id="one of two is valid",
        ),
    ],
)
def test_settings_that_the_gpunode_lacks_are_found(
    annotations: dict[str, str], copied: dict[str, Any], found: tuple[str, tuple[str, ...]] | None
) -> None:
    held = gpunode()
    held = msgspec.structs.replace(held, spec=msgspec.structs.replace(held.spec, **copied))
    state = RecordingState(Rules(), 90.0, WALL_S - NOW_S)
    state.apply([NodeSeen(kube_node(annotations=annotations)), GPUNodeSeen(held, NOW_S)])
    expected = [] if found is None else [("n", AgentSettings(*found))]
    assert changed_settings(state.cluster, state.cluster.gpunodes()) == expected
    without_its_node = RecordingState(Rules(), 90.0, WALL_S - NOW_S)
    assert changed_settings(without_its_node.cluster, [held]) == []


def test_a_mark_that_arrives_after_its_gpunode_was_deleted_is_dropped() -> None:
    state = state_with(gpunode(shared(), reservations={"uid-p": PROMISE}), pod(node="n"))
    state.apply([PodGone("uid-p"), GPUNodeGone("n"), DepartureMarked("n", "uid-p", "100")])
    assert not state.cluster.departures.marked("n", "uid-p")
