"""Checks that the memory of devices is summed over the fleet, and over each node for its extended
resource.
"""

import dataclasses

import msgspec
import numpy as np
import pytest

from headroom.contract.annotations import CORDON
from headroom.contract.gpunode import Device
from headroom.contract.kube import Node, NodeStatus
from headroom.contract.reasons import Reason
from headroom.contract.watched import GPUNodeSeen, NodeSeen
from headroom.core.cluster.cluster_writer import ClusterWriter
from headroom.core.cluster.memory_totals import (
    CapacityChange,
    Totals,
    capacity_changes,
    cordoned,
    nodes_by_state,
    report_ages_s,
    some_devices,
    totals,
    unhealthy,
)
from headroom.core.placement.policy import Rules
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import build
from tests.builders import (
    FRESH_S,
    GIB,
    MIB,
    NOW_S,
    device,
    gpunode,
    kube_node,
    mig,
    reservation,
    shared,
    use,
    weighed,
)

#: One pod has reserved 8 GiB and uses 10 GiB, and another has reserved 4 GiB and uses 1 GiB.
#: Unreserved use is 2 GiB, and unattributed use is 5 GiB.
FULL = weighed(
    shared("a", free=1, allocated=3, used_bytes=18 * GIB, unattributed_bytes=5 * GIB),
    shared("b"),
    pods=[
        use("u", "a", 10 * GIB, replica="0"),
        use("v", "a", GIB, replica="1"),
        use("stray", "a", 2 * GIB, replica="2"),
    ],
    reservations={"u": reservation({"a": 8 * GIB}), "v": reservation({"a": 4 * GIB})},
    tolerance_bytes=0,
)
LOST = device("lost", memory_bytes=-1, used_bytes=-1, healthy=False, health_reason="lost")


def node(name: str, **other: object) -> NodeTerms:
    return weighed(device(f"GPU-{name}"), name=name, **other)  # type: ignore[arg-type]


def test_every_term_is_added_up() -> None:
    assert totals(build([FULL, node("m")])) == Totals(
        devices=3,
        capacity=72 * GIB,
        allocatable=72 * GIB,
        reserved=14 * GIB,
        unconfirmed=0,
        committed=21 * GIB,
        used=18 * GIB,
        unattributed=5 * GIB,
        headroom=51 * GIB,
        overcommitted=0,
        overuse=2 * GIB,
        underuse=3 * GIB,
        unreserved=2 * GIB,
    )
    assert totals(build([])) == Totals()


def test_free_memory_of_one_device_does_not_offset_overcommitment_of_another() -> None:
    reservations = {"u": reservation({"a": 20 * GIB}), "v": reservation({"a": 8 * GIB})}
    uses = [use("u", "a", 0, replica="0"), use("v", "a", 0, replica="1")]
    over = weighed(
        shared("a", free=2, allocated=2), shared("b"), pods=uses, reservations=reservations
    )
    found = totals(build([over]))
    assert (found.overcommitted, found.headroom) == (4 * GIB, 24 * GIB)


def test_devices_with_implausible_values_are_counted_but_not_added() -> None:
    found = totals(build([weighed(LOST)]))
    assert found == Totals(devices=1)


def test_memory_that_devices_share_counts_once() -> None:
    cut = weighed(mig("m1", 1), mig("m2", 1), mig("m3", 2))
    found = totals(build([cut]))
    assert (found.devices, found.capacity) == (2, 20 * GIB)


def test_closed_nodes_are_counted_by_reason() -> None:
    snap = build([
        node("a"), node("b"), node("silent", fresh_until_s=NOW_S - 1),
        node("new", reason=Reason.NO_REPORT), node("cut", reason=Reason.MIG_CHANGING),
    ])  # fmt: skip
    assert nodes_by_state(snap, NOW_S) == {
        "open": 2, "stale_report": 1, "no_report": 1, "mig_changing": 1
    }  # fmt: skip
    assert nodes_by_state(build([]), NOW_S) == {"open": 0, "stale_report": 0, "no_report": 0}


def test_only_nodes_that_ever_reported_have_an_age() -> None:
    snap = build([node("a"), node("never", fresh_until_s=-np.inf), node("l", fresh_until_s=np.inf)])
    assert report_ages_s(snap, 90.0, NOW_S) == {"a": 90.0 - (FRESH_S - NOW_S)}


def test_unhealthy_devices_are_counted_by_cause() -> None:
    broken = device("x", healthy=False, health_reason="XID 79")
    snap = build([weighed(broken, device("y")), weighed(LOST, name="m")])
    assert unhealthy(snap) == {"unhealthy_device": 1, "memory_unknown": 1}
    assert unhealthy(build([node("a")])) == {}


@pytest.mark.parametrize("most", [0, 1, 3, 9])
def test_the_limited_list_of_devices_is_sorted_by_node(most: int) -> None:
    nodes = [node("c"), weighed(device("GPU-a0"), device("GPU-a1"), name="a"), node("b")]
    named = [(name, terms.device.uuid) for name, terms in some_devices(build(nodes), most)]
    everything = [("a", "GPU-a0"), ("a", "GPU-a1"), ("b", "GPU-b"), ("c", "GPU-c")]
    assert named == everything[:most]


def test_every_sum_is_tested() -> None:
    """For each field of the sums, a test above has a value other than 0."""
    fields = {field.name for field in dataclasses.fields(Totals)}
    shown = totals(build([FULL]))
    waits = weighed(shared("a"), reservations={"u": reservation({"a": 30 * GIB})})
    waited = totals(build([waits]))
    assert {name for name in fields if getattr(shown, name) or getattr(waited, name)} == fields


def showing(amount: str | None) -> Node:
    allocatable = {} if amount is None else {"headroom.gpu/vram": amount}
    return msgspec.structs.replace(kube_node(), status=NodeStatus(allocatable=allocatable))


def due(shows: str | None, *devices: Device, wanted: bool = True) -> list[CapacityChange]:
    state = ClusterWriter(Rules(), 90.0, 0.0)
    state.apply([NodeSeen(showing(shows)), GPUNodeSeen(gpunode(*devices), NOW_S)])
    return list(capacity_changes(state.cluster, wanted))


@pytest.mark.parametrize(
    ("devices", "mib"),
    [
        pytest.param([device(), device("GPU-1")], 48 << 10, id="two of 24 GiB"),
        pytest.param(
            [shared(reserved_bytes=GIB)], 23 << 10, id="without memory reserved by the driver"
        ),
        pytest.param([device(memory_bytes=8 * GIB - 1)], (8 << 10) - 1, id="rounded down"),
        pytest.param(
            [device(), device("GPU-1", healthy=False)], 24 << 10, id="without unhealthy devices"
        ),
        pytest.param(
            [mig("MIG-a", 1), mig("MIG-b", 1), mig("MIG-c", 2)],
            20 << 10,
            id="instances that share a memory count once",
        ),
        pytest.param(
            [device(), device("GPU-1", resource="other/gpu")], 24 << 10, id="only our resource"
        ),
    ],
)
def test_the_extended_resource_is_the_allocatable_memory_of_healthy_devices(
    devices: list[Device], mib: int
) -> None:
    assert due(None, *devices) == [CapacityChange("n", mib)]


def test_a_correct_value_is_not_written_again() -> None:
    assert due("24576", device()) == []
    assert due("80k", device(memory_bytes=80_000 * MIB)) == []  # Spelled as by the API server.
    assert due("what?", device()) == [CapacityChange("n", 24 << 10)]


def test_no_value_is_written_for_unknown_devices() -> None:
    assert due(None) == []
    assert due("24576") == []


def test_the_resource_is_removed_if_the_setting_is_off() -> None:
    assert due("24576", device(), wanted=False) == [CapacityChange("n", None)]
    assert due(None, device(), wanted=False) == []


def test_cordoned_devices_are_not_counted_as_unhealthy() -> None:
    sick = shared("sick", healthy=False)
    snap = build([weighed(shared("a"), shared("b"), sick, cordoned={"a", "sick"})])
    assert cordoned(snap) == 1
    assert unhealthy(snap) == {"unhealthy_device": 1}


def test_a_cordoned_device_is_not_part_of_the_extended_resource() -> None:
    state = ClusterWriter(Rules(), 90.0, 0.0)
    node = kube_node("n", {CORDON: "a"})
    state.apply([NodeSeen(node), GPUNodeSeen(gpunode(device("a"), device("b")), NOW_S)])
    assert list(capacity_changes(state.cluster, True)) == [CapacityChange("n", 24 * 1024)]
    state.apply([NodeSeen(kube_node("n"))])
    assert list(capacity_changes(state.cluster, True)) == [CapacityChange("n", 48 * 1024)]


def test_pods_on_a_cordoned_device_keep_their_part_of_the_extended_resource() -> None:
    """kube-scheduler and kubelets count their requests. Without this part, pods would be rejected
    although other devices are free, and a restarted kubelet could reject these pods too.
    """
    state = ClusterWriter(Rules(), 90.0, 0.0)
    taken, free = shared("a", free=2, allocated=2), shared("b")
    held = {"u": reservation({"a": 6 * GIB}), "v": reservation({"a": 4 * GIB - 1})}
    pods = [use("u", "a", GIB), use("v", "a", GIB, replica="1")]
    node = gpunode(taken, free, reservations=held, pods=pods)
    state.apply([NodeSeen(kube_node("n", {CORDON: "a"})), GPUNodeSeen(node, NOW_S)])
    assert list(capacity_changes(state.cluster, True)) == [CapacityChange("n", (24 + 10) * 1024)]
