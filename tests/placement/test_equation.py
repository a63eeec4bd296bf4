"""Tests the terms of the equation, one by one."""

from typing import Any

import pytest

from headroom.contract.gpunode import Charge, Device, Replicas, Reservation
from headroom.contract.reasons import Reason
from headroom.core.placement.device_accounting import without
from tests.builders import (
    GIB,
    MIB,
    device,
    mig,
    reservation,
    shared,
    status,
    terms,
    use,
    weighed_anew,
)


def test_allocatable_is_memory_minus_both_reserves() -> None:
    (t,) = terms(device(reserved_bytes=GIB), reserve_bytes=2 * GIB)
    assert t.allocatable_bytes == t.headroom_bytes == 21 * GIB
    (t,) = terms(device(), reserve_bytes=25 * GIB)
    assert t.allocatable_bytes == 0


def test_an_unconfirmed_pod_is_charged_on_all_shared_candidates() -> None:
    held = {"u1": reservation({"D0": 6 * GIB, "D1": 6 * GIB}), "u2": reservation({"D1": 4 * GIB})}
    rows = [use("s", "D2", replica=str(i)) for i in range(4)]
    full = shared("D2", free=0, allocated=4)
    a, b, c = terms(shared("D0"), shared("D1"), full, reservations=held, pods=rows)
    assert (a.unconfirmed_bytes, b.unconfirmed_bytes, c.unconfirmed_bytes) == (
        10 * GIB,
        10 * GIB,
        0,
    )
    assert a.reservation_bytes == 0
    assert a.unconfirmed_replicas == b.unconfirmed_replicas == 2
    assert [h.observed for h in b.holders] == [False, False]


def test_a_freed_replica_can_go_to_an_unconfirmed_pod() -> None:
    """u1 was placed when D1 had no free replica, but now the plugin can choose D1."""
    held = {"u1": reservation({"D0": 6 * GIB})}
    _, b = terms(shared("D0"), shared("D1"), reservations=held)
    assert b.unconfirmed_bytes == 6 * GIB


def test_a_confirmed_pod_is_charged_only_on_its_device() -> None:
    held = {"u1": reservation({"D0": 6 * GIB, "D1": 6 * GIB})}
    a, b = terms(shared("D0"), shared("D1"), reservations=held, pods=[use("u1", "D1")])
    assert (a.reservation_bytes, b.reservation_bytes) == (0, 6 * GIB)
    assert a.unconfirmed_replicas == 0


def test_a_partly_confirmed_pod_stays_charged_for_the_rest() -> None:
    held = {"u1": reservation({"D0": 6 * GIB, "D1": 6 * GIB}, count=2)}
    a, b = terms(shared("D0"), shared("D1"), reservations=held, pods=[use("u1", "D1")])
    assert (a.unconfirmed_bytes, b.reservation_bytes, a.unconfirmed_replicas) == (
        6 * GIB,
        6 * GIB,
        1,
    )
    assert b.unconfirmed_bytes == 0  # Its whole request is already charged on D1.


def test_a_replica_that_two_containers_use_in_turn_counts_once() -> None:
    """The kubelet lists an init container's replica again for the app container that reuses it."""
    rows = [use("u1", "D0", container=name, replica="0") for name in ("init", "main")]
    held = {"u1": reservation({"D0": 6 * GIB, "D1": 6 * GIB}, count=2)}
    a, b = terms(shared("D0"), shared("D1"), reservations=held, pods=rows)
    assert (b.unconfirmed_bytes, a.unconfirmed_replicas) == (6 * GIB, 1)
    rows[1] = use("u1", "D0", container="main", replica="1")
    a, b = terms(shared("D0"), shared("D1"), reservations=held, pods=rows)
    assert (b.unconfirmed_bytes, a.unconfirmed_replicas) == (0, 0)


def test_on_an_unshared_device_only_the_largest_unconfirmed_pod_counts() -> None:
    both = {"D0": 6 * GIB, "D1": 6 * GIB}
    held = {"u1": reservation(both), "u2": reservation({uuid: 9 * GIB for uuid in both})}
    for t in terms(device("D0"), device("D1"), reservations=held):
        assert (t.reservation_bytes, t.unconfirmed_bytes, t.unconfirmed_replicas) == (0, 9 * GIB, 2)
        assert t.headroom_bytes == 15 * GIB


def test_an_unshared_device_is_not_charged_for_two_pods_at_once() -> None:
    """u2 can get D0 only after u1 has ended."""
    both = {"D0": 20 * GIB, "D1": 20 * GIB}
    held = {"u1": reservation({uuid: 15 * GIB for uuid in both}), "u2": reservation(both)}
    taken = device("D0", replicas=Replicas(free=0, allocated=1))
    for leaving, awaited in ((set[str](), 0), ({"u1"}, 5)):
        a, b = terms(
            taken, device("D1"), reservations=held, pods=[use("u1", "D0")], leaving=leaving
        )
        assert (a.reservation_bytes, a.unconfirmed_bytes) == (15 * GIB, awaited * GIB)
        assert (b.reservation_bytes, b.unconfirmed_bytes, b.headroom_bytes) == (
            0,
            20 * GIB,
            4 * GIB,
        )


def test_the_larger_of_request_and_measured_use_is_charged() -> None:
    held = {"u1": reservation({"D0": 6 * GIB})}
    for used, charged in ((None, 6), (2 * GIB, 6), (8 * GIB, 8), (-GIB, 6)):
        (t,) = terms(device("D0"), reservations=held, pods=[use("u1", "D0", used)])
        assert t.reservation_bytes == charged * GIB


def test_a_pod_on_an_unexpected_device_is_charged_its_largest_reservation_of_a_device() -> None:
    held = {"u1": reservation({"D0": 6 * GIB, "D1": 7 * GIB})}
    _, _, c = terms(*(shared(f"D{i}") for i in range(3)), reservations=held, pods=[use("u1", "D2")])
    assert c.reservation_bytes == 7 * GIB


def test_a_pod_stays_charged_after_its_resource_was_renamed() -> None:
    held = {"u1": reservation({"D0": 6 * GIB}), "u2": Reservation(namespace="d", name="q")}
    rows = [use("u1", "D1", GIB), use("u2", "D1", 2 * GIB)]
    other = shared("D1", resource="nvidia.com/gpu.shared")
    _, b = terms(shared("D0"), other, reservations=held, pods=rows)
    assert b.reservation_bytes == 8 * GIB
    assert b.unreserved_pods_bytes == 0


def test_an_unreserved_pod_is_charged_its_measured_use() -> None:
    rows = [use("s1", "D0", 3 * GIB), use("s1", "D0", GIB, container="b"), use("s2", "D0", GIB)]
    (t,) = terms(shared("D0", used_bytes=5 * GIB), pods=rows)
    assert (t.unreserved_pods_bytes, t.unattributed_bytes) == (5 * GIB, 0)


@pytest.mark.parametrize(
    ("unattributed", "charged"),
    [
        pytest.param(64 * MIB, 0, id="within the tolerance"),
        pytest.param(64 * MIB + 1, 1, id="beyond the tolerance"),
    ],
)
def test_small_unattributed_use_is_tolerated(unattributed: int, charged: int) -> None:
    (t,) = terms(device(used_bytes=GIB, unattributed_bytes=unattributed))
    assert t.unattributed_bytes == charged


@pytest.mark.parametrize(
    ("own", "stray", "unattributed"),
    [
        pytest.param(None, None, 9 - 6, id="not reported: the use beyond requests"),
        pytest.param(None, 2, 9 - 6 - 2, id="use of an unreserved pod is not charged twice"),
        pytest.param(8, None, 9 - 8, id="use beyond a request is not charged twice"),
        pytest.param(-1, 2, 9 - 6 - 2, id="a negative value is ignored"),
        pytest.param(8, 1, 0, id="all reported: the agent's value"),
    ],
)
def test_unattributed_use_is_a_difference(
    own: int | None, stray: int | None, unattributed: int
) -> None:
    rows = [
        use("u1", "D0", own and own * GIB),
        use("s1", "D0", stray and stray * GIB, replica="1"),
    ]
    (t,) = terms(
        shared("D0", used_bytes=9 * GIB, unattributed_bytes=0),
        reservations={"u1": reservation({"D0": 6 * GIB})},
        pods=rows,
        tolerance_bytes=0,
    )
    assert t.unattributed_bytes == unattributed * GIB
    assert t.committed_bytes >= 9 * GIB


def test_without_attribution_idle_reservations_hide_unattributed_use() -> None:
    (t,) = terms(
        shared("D0", used_bytes=5 * GIB, unattributed_bytes=None),
        reservations={"u1": reservation({"D0": 6 * GIB})},
        pods=[use("u1", "D0", 0)],
    )
    assert t.unattributed_bytes == 0


class TestInstancesThatShareMemory:
    """Compute instances D0 and D1 belong to one GPU instance, and D2 to another."""

    devices = (mig("D0", 1), mig("D1", 1), mig("D2", 2))

    def test_use_on_one_instance_counts_on_all(self) -> None:
        held = {"u1": reservation({"D0": 3 * GIB})}
        a, b, c = terms(*self.devices, reservations=held, pods=[use("u1", "D0", 4 * GIB)])
        assert [t.reservation_bytes for t in (a, b, c)] == [4 * GIB, 4 * GIB, 0]
        assert [t.sharers for t in (a, b, c)] == [2, 2, 1]

    def test_an_unconfirmed_pod_is_charged_once(self) -> None:
        both = {d.uuid: 3 * GIB for d in self.devices}
        held = {"u1": reservation(both), "u2": reservation(both)}
        a, b, c = terms(*self.devices, reservations=held)
        assert [t.unconfirmed_bytes for t in (a, b, c)] == [6 * GIB, 6 * GIB, 3 * GIB]

    def test_unreserved_and_unattributed_use_counts_on_all(self) -> None:
        first = mig("D0", 1, used_bytes=5 * GIB, unattributed_bytes=2 * GIB)
        second = mig("D1", 1, used_bytes=5 * GIB, unattributed_bytes=0)
        a, b = terms(first, second, pods=[use("s1", "D1", 3 * GIB)], tolerance_bytes=0)
        assert a.headroom_bytes == b.headroom_bytes == 5 * GIB

    def test_the_use_of_a_pod_on_another_instance_is_attributed(self) -> None:
        quiet = [mig(f"D{i}", 1, used_bytes=4 * GIB, unattributed_bytes=None) for i in (0, 1)]
        held = {"u1": reservation({"D0": 4 * GIB})}
        a, b = terms(*quiet, reservations=held, pods=[use("u1", "D0", None)])
        assert a.unattributed_bytes == b.unattributed_bytes == 0

    def test_contradictory_values_of_one_instance_close_all(self) -> None:
        a, b, c = terms(mig("D0", 1, used_bytes=-1), *self.devices[1:])
        assert (a.health_issue, b.health_issue, c.health_issue) == (
            Reason.CONTRADICTORY_REPORT,
        ) * 2 + (None,)


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"uuid": ""}, id="no uuid"),
        pytest.param({"memory_bytes": -1}, id="memory is absent"),
        pytest.param({"memory_bytes": 1 << 90}, id="memory beyond any device"),
        pytest.param({"reserved_bytes": 25 * GIB}, id="more reserved than its memory"),
        pytest.param({"used_bytes": 24 * GIB + 1}, id="more used than its memory"),
        pytest.param({"used_bytes": -1}, id="use is absent"),
        pytest.param({"unattributed_bytes": 1}, id="more unattributed than used"),
        pytest.param({"unattributed_bytes": -1}, id="negative unattributed use"),
        pytest.param({"replicas": Replicas(free=-1)}, id="negative replicas"),
        pytest.param({"replicas": Replicas(free=1, allocated=1)}, id="two replicas, unshared"),
        pytest.param(
            {"sharing": "time-slicing", "replicas": Replicas(free=1025)},
            id="too many replicas",
        ),
        pytest.param(
            {"sharing": "mps", "replicas": Replicas(free=40, allocated=8, unhealthy=1)},
            id="more replicas than an MPS server has clients",
        ),
        pytest.param(
            {"sharing": "mps", "replicas": Replicas(free=17), "architecture": "volta"},
            id="more replicas than clients on old GPUs",
        ),
        pytest.param({"sharing": "mps", "kind": "mig"}, id="MPS on a MIG device"),
    ],
)
def test_impossible_values_close_only_their_device(wrong: dict[str, Any]) -> None:
    a, b = terms(device(**{"uuid": "D0", **wrong}), device("D1"))
    assert a.health_issue is Reason.CONTRADICTORY_REPORT
    assert a.health_detail
    assert a.allocatable_bytes == 0
    assert (b.health_issue, b.headroom_bytes) == (None, 24 * GIB)


@pytest.mark.parametrize(
    ("architecture", "replicas"),
    [pytest.param("turing", 48), pytest.param("", 48, id="unknown"), pytest.param("volta", 16)],
)
def test_up_to_the_mps_client_limit_of_replicas_is_plausible(
    architecture: str, replicas: int
) -> None:
    (t,) = terms(shared(free=replicas, sharing="mps", architecture=architecture))
    assert t.health_issue is None


def test_unknown_memory_has_its_own_reason() -> None:
    silent = device("D0", memory_bytes=-1, used_bytes=-1, healthy=False, health_reason="GB10")
    a, b = terms(silent, device("D1"))
    assert (a.health_issue, a.health_detail, a.allocatable_bytes) == (
        Reason.MEMORY_UNKNOWN,
        "GB10",
        0,
    )
    assert b.health_issue is None
    # Every compute instance with this memory has this reason.
    one, other = terms(mig("M0", 1, **_SILENT), mig("M1", 1))
    assert (one.health_issue, other.health_issue) == (Reason.MEMORY_UNKNOWN,) * 2


_SILENT = {"memory_bytes": -1, "used_bytes": -1, "healthy": False}


def test_all_devices_with_a_duplicate_uuid_are_closed() -> None:
    a, b, c = terms(device("D0"), device("D0"), device("D1"))
    assert (a.health_issue, b.health_issue, c.health_issue) == (
        Reason.CONTRADICTORY_REPORT,
    ) * 2 + (None,)
    assert "2 times" in a.health_detail


@pytest.mark.parametrize("more", [{}, {"used_bytes": -1}], ids=["", "and has contradictory values"])
def test_instances_of_an_unhealthy_gpu_are_unhealthy(more: dict[str, int]) -> None:
    gpu = device("GPU-0", healthy=False, health_reason="XID 79", resource="", **more)
    _, b, c = terms(gpu, mig("M0", 1), mig("M1", 1, parent="GPU-1"))
    assert b.health_issue is Reason.UNHEALTHY_DEVICE
    assert "XID 79" in b.health_detail
    assert c.health_issue is None


def test_huge_reservations_do_not_overflow() -> None:
    held = {f"u{i}": reservation({"D0": (1 << 63) - 1}) for i in range(3)}
    (t,) = terms(shared("D0"), reservations=held)
    assert t.headroom_bytes == 24 * GIB - 3 * ((1 << 63) - 1)


def test_one_megabyte_is_charged_exactly() -> None:
    (t,) = terms(shared("D0"), reservations={"u1": reservation({"D0": 1_000_000})})
    assert t.headroom_bytes == 24 * GIB - 1_000_000


def test_a_charge_without_candidates_charges_nothing() -> None:
    held = {"u1": Reservation(namespace="d", name="q", charges=[Charge(resource="x", count=1)])}
    (t,) = terms(device(), reservations=held)
    assert t.committed_bytes == 0


def test_pods_missing_from_a_report_release_their_memory() -> None:
    device_ = shared("D0", free=1, allocated=3, used_bytes=9 * GIB)
    rows = [
        use("u1", "D0", 2 * GIB, container="init", replica="0"),
        use("u1", "D0", 3 * GIB, container="main", replica="0"),
        use("u2", "D0", 4 * GIB, replica="1"),
        use("u3", "D0", None, replica="2"),
    ]
    left = without(status(device_, pods=rows), {"u1", "u3"})
    (d,) = left.devices
    assert (d.replicas, d.used_bytes) == (Replicas(free=3, allocated=1), 4 * GIB)
    assert [row.uid for row in left.pods] == ["u2"]
    assert without(left, set()) == left


def test_a_pod_that_uses_a_device_without_a_replica_frees_no_replica() -> None:
    """The pod chose its device itself, or the kubelet has already taken the pod's replica back."""
    device_ = shared("D0", free=3, allocated=1, used_bytes=6 * GIB)
    rows = [use("u1", "D0", 2 * GIB, replica=""), use("u2", "D0", 4 * GIB, replica="1")]
    (d,) = without(status(device_, pods=rows), {"u1"}).devices
    assert (d.replicas, d.used_bytes) == (Replicas(free=3, allocated=1), 4 * GIB)


def test_devices_that_share_memory_all_lose_the_use_of_a_deleted_pod() -> None:
    """If only one device lost the use, the other device would report the freed bytes as
    unattributed.
    """
    mates = [
        device(uuid, kind="mig", parent="GPU-0", gpu_instance=1, used_bytes=9 * GIB)
        for uuid in ("M0", "M1")
    ]
    rows = [use("u1", "M0", 5 * GIB), use("u2", "M1", 4 * GIB)]
    left = without(status(*mates, pods=rows), {"u1"})
    assert [d.used_bytes for d in left.devices] == [4 * GIB, 4 * GIB]


def test_an_empty_report_has_no_terms() -> None:
    assert weighed_anew(status(), {"u1": reservation({"D0": GIB})}) == ()


def test_a_report_may_refer_to_missing_devices() -> None:
    device_: Device = shared("D0")
    held = {"u1": reservation({"D0": GIB})}
    (t,) = terms(device_, reservations=held, pods=[use("u1", "lost", GIB), use("s", "lost", GIB)])
    assert (t.unconfirmed_bytes, t.unreserved_pods_bytes) == (GIB, 0)
