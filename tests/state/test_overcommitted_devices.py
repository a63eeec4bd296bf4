"""Checks that a device is reported exactly while it is overcommitted."""

import msgspec
import pytest

from headroom.contract.annotations import PLACEMENT
from headroom.contract.gpunode import Device, GPUNode
from headroom.contract.kube import Pod
from headroom.contract.watched import GPUNodeGone, NodeGone, PodGone, PodSeen
from headroom.core.cluster.changes import BindBegun
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.notices import Notice, notices
from headroom.core.overuse.tracker import MAX_SPAN_PODS, Overcommit, Overcommits
from headroom.core.placement.device_accounting import Holder
from headroom.core.placement.policy import Rules
from tests.builders import GIB, gpunode, kube_node, pod, reservation, shared, use
from tests.state.states import seen, state_of


def figures(state: ClusterWriter) -> list[tuple[str, str, int]]:
    return [(over.node, over.device, over.excess_bytes) for over in state.cluster.overcommits.now()]


def around_us(uid: str = "uid-p", vram: str = "20Gi") -> Pod:
    return pod(vram, uid=uid, name=uid, node="n")


def shown(state: ClusterWriter) -> list[tuple[str, str]]:
    found = [(each.about.uid, each.reason) for each in notices(state.cluster)]
    return [each for each in found if each[1] == "Overcommitted"]


#: 8 of 24 GiB are reserved for another pod.
HALF_FULL = gpunode(shared("a"), reservations={"uid-q": reservation({"a": 8 * GIB})})


def test_an_unreserved_pod_overcommits_a_device_until_it_is_deleted() -> None:
    state = state_of(*seen(kube_node(), HALF_FULL))
    assert (figures(state), shown(state)) == ([], [])
    state.apply(seen(around_us()))
    assert figures(state) == [("n", "a", 4 * GIB)]
    assert shown(state) == [("uid-p", "Overcommitted")]
    notice = next(notices(state.cluster))
    assert "overcommitted by 4.0 GiB (allocatable: 24.0 GiB)" in notice.message
    # The device stays overcommitted when the ledger has the reservation.
    both = {**HALF_FULL.spec.reservations, "uid-p": reservation({"a": 20 * GIB})}
    state.apply(seen(gpunode(shared("a"), reservations=both, version="2")))
    assert figures(state) == [("n", "a", 4 * GIB)]
    assert next(notices(state.cluster)) == notice
    state.apply([PodGone("uid-p"), *seen(msgspec.structs.replace(HALF_FULL, metadata=VERSION_3))])
    assert (figures(state), shown(state)) == ([], [])


VERSION_3 = msgspec.structs.replace(HALF_FULL.metadata, resource_version="3")


@pytest.mark.parametrize(
    "device",
    [
        pytest.param(
            shared("a", memory_bytes=-1, used_bytes=-1, healthy=False, health_reason="lost"),
            id="its driver does not report use",
        ),
        pytest.param(shared("a", used_bytes=90 * GIB), id="contradictory values"),
    ],
)
def test_a_device_with_unknown_values_raises_no_alarm(device: Device) -> None:
    lost = gpunode(
        device, reservations={"uid-q": reservation({"a": 8 * GIB})}, pods=[use("uid-q", "a")]
    )
    state = state_of(*seen(kube_node(), lost, pod(uid="uid-q", name="q", node="n")))
    assert figures(state) == []


def test_the_alarm_ends_when_the_node_is_deleted() -> None:
    state = state_of(*seen(kube_node(), HALF_FULL, around_us()))
    assert figures(state)
    state.apply([GPUNodeGone("n"), NodeGone("n")])
    assert figures(state) == []


def test_assumed_binds_raise_no_alarm() -> None:
    """An assumed bind is charged on every device of the node, so that filter keeps enough memory
    for the pod on each device.
    """
    state = state_of(*seen(kube_node(), HALF_FULL))
    state.apply([BindBegun(pod("20Gi"), "n")])
    assert figures(state) == []
    state.apply([PodSeen(around_us("uid-o", "18Gi"))])
    assert figures(state) == [("n", "a", 2 * GIB)]


@pytest.mark.parametrize(
    "node",
    [
        pytest.param(gpunode(shared("a", memory_bytes=0)), id="no memory"),
        pytest.param(gpunode(shared("a", used_bytes=-1)), id="negative use"),
    ],
)
def test_a_contradictory_report_raises_no_alarm(node: GPUNode) -> None:
    assert figures(state_of(*seen(kube_node(), node, around_us()))) == []


def test_only_unreserved_pods_get_an_event() -> None:
    """Headroom's own pods are not the cause, and metrics report overusing pods."""
    ours = pod("8Gi", uid="uid-q", name="q", node="n", annotations={PLACEMENT: '{"node":"n"}'})
    state = state_of(*seen(kube_node(), HALF_FULL, ours, around_us()))
    assert shown(state) == [("uid-p", "Overcommitted")]
    grown = gpunode(
        shared("a", used_bytes=24 * GIB),
        pods=[use("uid-q", "a", 24 * GIB)],
        reservations={**HALF_FULL.spec.reservations, "uid-r": reservation({"a": GIB})},
    )
    state = state_of(*seen(kube_node(), grown, ours))
    assert figures(state) == [("n", "a", GIB)]
    assert shown(state) == []


def test_the_view_shows_the_terms_of_an_overcommitted_device() -> None:
    state = ClusterWriter(Rules(), 90.0, 0.0)
    state.apply(seen(kube_node(), HALF_FULL, around_us()))
    (over,) = state.cluster.overcommits.now()
    (terms,) = state.cluster.snapshot().nodes[0].devices
    assert over == Overcommit("n", "a", 4 * GIB, 24 * GIB, terms.holders)
    assert isinstance(next(notices(state.cluster)), Notice)


class Churning(Overcommits):
    """A device that stays overcommitted while its pods change."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def now(self) -> list[Overcommit]:
        holders = tuple(Holder(name, "default", name, GIB, 2 * GIB, True) for name in self.names)
        return [Overcommit("n", "a", GIB, 24 * GIB, holders)]


def test_a_device_that_stays_overcommitted_remembers_a_limited_number_of_pods() -> None:
    overcommits = Churning()
    for hour in range(2 * MAX_SPAN_PODS):
        overcommits.names = ["service", f"job-{hour}"]
        overcommits.update(3600.0 * hour)
        (span,) = overcommits.spans.values()
        assert {"service", f"job-{hour}"} <= span.uids
        assert len(span.uids) <= MAX_SPAN_PODS + 2
    assert (span.began_s, span.ended_s) == (0.0, None)
