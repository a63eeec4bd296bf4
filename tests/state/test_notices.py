"""Checks that nodes and overusing pods get Events. Each occurrence has an equal name on every
replica.
"""

import itertools
from collections.abc import Sequence

import msgspec
import pytest

from extender.event_recorder import event_name
from headroom.contract.annotations import PLACEMENT
from headroom.contract.gpunode import GPUNode, UnattributedProcess
from headroom.contract.watched import PodGone
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.notices import Notice, notices
from headroom.core.overuse.tracker import Overuses
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.policy import Rules
from headroom.core.tracker import WeighedNode
from tests.builders import (
    DISTRIBUTED,
    GIB,
    MIB,
    NOW_S,
    gpunode,
    kube_node,
    mig,
    pod,
    reservation,
    shared,
    terms,
    use,
)
from tests.state.states import seen, state_of

LASTING_S = Rules().overuse_after_s
OURS = {PLACEMENT: '{"node":"n"}'}


def reported(state: ClusterWriter, reason: str) -> list[Notice]:
    return [notice for notice in notices(state.cluster) if notice.reason == reason]


def strange(*pids: int, used_gib: int = 20) -> GPUNode:
    """Return a node with 8 GiB reserved whose unattributed processes use more than the rest."""
    used = used_gib * GIB
    node = gpunode(
        shared("a", used_bytes=used, unattributed_bytes=used),
        reservations={"uid-q": reservation({"a": 8 * GIB})},
    )
    assert node.status is not None
    processes = [
        UnattributedProcess("a", pid, "python", used_bytes=used >> i) for i, pid in enumerate(pids)
    ]
    status = msgspec.structs.replace(node.status, unattributed_processes=processes)
    return msgspec.structs.replace(node, status=status)


def test_the_event_of_a_node_names_the_causes_of_overcommitment() -> None:
    """The causes are unreserved pods and unattributed processes, but not the growth of a pod with a
    reservation.
    """
    half_full = gpunode(shared("a"), reservations={"uid-q": reservation({"a": 8 * GIB})})
    around = pod("20Gi", uid="uid-x", name="x", node="n")
    state = state_of(*seen(kube_node(), half_full, around))
    (notice,) = reported(state, "GPUOvercommitted")
    assert (notice.about.kind, notice.about.name, notice.about.namespace) == ("Node", "n", "")
    assert (
        "Device a is overcommitted by 4.0 GiB (allocatable: 24.0 GiB): 1 pod without a "
        "reservation (to list: kubectl headroom top pod -A --search n)." in notice.message
    )
    # Events on nodes are in namespace default, for users who may read no other namespace.
    assert "default/x" not in notice.message
    state.apply([PodGone("uid-x")])
    assert reported(state, "GPUOvercommitted") == []

    (notice,) = reported(state_of(*seen(kube_node(), strange(7, 8))), "GPUOvercommitted")
    assert "used by processes outside of known pods (python 7, python 8)" in notice.message

    grown = gpunode(
        shared("a", used_bytes=24 * GIB),
        pods=[use("uid-q", "a", 24 * GIB)],
        reservations={"uid-q": reservation({"a": 8 * GIB}), "uid-r": reservation({"a": GIB})},
    )
    ours = pod(uid="uid-q", name="q", node="n", annotations=OURS)
    state = state_of(*seen(kube_node(), grown, ours))
    assert state.cluster.overcommits.now()
    assert reported(state, "GPUOvercommitted") == []


def test_only_new_unattributed_processes_cause_a_new_event() -> None:
    def name(node: GPUNode) -> str:
        (notice,) = reported(state_of(*seen(kube_node(), node)), "GPUOvercommitted")
        return event_name(notice)

    assert name(strange(7)) == name(strange(7, used_gib=22)) == name(strange(7, 9))
    assert name(strange(7)) != name(strange(8))


def test_an_unhealthy_device_has_one_event_per_failure() -> None:
    def shown(since: str, why: str = "XID 79 (nvml)") -> Notice:
        broken = shared("a", healthy=False, health_reason=why, unhealthy_since=since)
        (notice,) = reported(state_of(*seen(kube_node(), gpunode(broken))), "GPUUnhealthy")
        return notice

    first = shown("2026-11-21T00:00:00Z")
    assert first.about.kind == "Node"
    assert first.message.startswith("No pod is placed on device a: a GPU that the pod could get is")
    assert "XID 79" in first.message
    more = shown("2026-11-21T00:00:00Z", "XID 79 (nvml); a row remap is pending")
    assert event_name(first) == event_name(more) != event_name(shown("2026-11-21T09:00:00Z"))
    assert reported(state_of(*seen(kube_node(), gpunode(shared("a")))), "GPUUnhealthy") == []


_versions = itertools.count(1)


def using(gib: int) -> GPUNode:
    """Return a node whose only pod requested 8 GiB and uses this amount."""
    return gpunode(
        shared("a", free=3, allocated=1, used_bytes=gib * GIB),
        pods=[use("uid-q", "a", gib * GIB, replica="a::0")],
        reservations={"uid-q": reservation({"a": 8 * GIB})},
        plugin=DISTRIBUTED,
        version=str(next(_versions)),
    )


def test_a_pod_gets_an_event_after_a_minute_of_overuse() -> None:
    placed = OURS | {"headroom.gpu/placement": '{"decision": "uid-q.7"}'}
    ours = pod(uid="uid-q", name="q", node="n", annotations=placed)
    state = state_of(*seen(kube_node(), using(10), ours))
    state.parts.overuses.update(NOW_S)
    state.parts.overuses.update(NOW_S + LASTING_S - 0.5)
    assert reported(state, "GPUMemoryOveruse") == []
    state.parts.overuses.update(NOW_S + LASTING_S)
    (notice,) = reported(state, "GPUMemoryOveruse")
    how_much = (
        "uses 10.0 GiB of device a of node n, 2.0 GiB more than the 8.0 GiB that it requested"
    )
    assert how_much in notice.message
    assert notice.decision_id == "uid-q.7"
    state.apply(seen(using(11)))
    state.parts.overuses.update(NOW_S + LASTING_S + 5)
    (more,) = reported(state, "GPUMemoryOveruse")
    assert event_name(more) == event_name(notice)  # Not yet twice as much.
    state.apply(seen(using(12)))
    state.parts.overuses.update(NOW_S + LASTING_S + 10)
    (doubled,) = reported(state, "GPUMemoryOveruse")
    assert event_name(doubled) != event_name(notice)


def test_overuse_that_stops_and_starts_again_is_tolerated_for_another_minute() -> None:
    state = state_of(*seen(kube_node(), using(10)))
    state.parts.overuses.update(NOW_S)
    state.apply(seen(using(8)))
    state.parts.overuses.update(NOW_S + 40)
    state.apply(seen(using(12)))
    state.parts.overuses.update(NOW_S + LASTING_S)
    assert state.cluster.overuses.lasting == ()
    state.parts.overuses.update(NOW_S + 2 * LASTING_S)
    assert [each.excess_bytes for each in state.cluster.overuses.lasting] == [4 * GIB]


def weighed(devices: Sequence[DeviceTerms]) -> WeighedNode:
    return WeighedNode("n", devices=devices, written_devices=devices)


def test_memory_that_devices_share_is_reported_once() -> None:
    overuses = Overuses(LASTING_S)
    devices = [mig("m1", 1, used_bytes=2 * GIB), mig("m2", 1, used_bytes=2 * GIB)]
    row = use("u", "m1", 2 * GIB, replica="m1")
    overuses.node_weighed(
        weighed(terms(*devices, pods=[row], reservations={"u": reservation({"m1": GIB})}))
    )
    overuses.update(0.0)
    overuses.update(LASTING_S)
    assert [(each.device, each.excess_bytes) for each in overuses.lasting] == [("m1", GIB)]


@pytest.mark.parametrize(
    "used_mib",
    [pytest.param(0, id="idle"), pytest.param(8192, id="all requested memory")],
)
def test_use_within_the_request_is_not_overuse(used_mib: int) -> None:
    overuses = Overuses(LASTING_S)
    row = use("u", "a", used_mib * MIB, replica="a::0")
    device = shared("a", used_bytes=used_mib * MIB)
    overuses.node_weighed(
        weighed(terms(device, pods=[row], reservations={"u": reservation({"a": 8 * GIB})}))
    )
    overuses.update(0.0)
    overuses.update(LASTING_S)
    assert overuses.lasting == ()
