"""Tests pods whose own NVIDIA_VISIBLE_DEVICES decides which devices they see."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from headroom.contract.gpunode import Reservation
from headroom.contract.kube import Container, Pod
from headroom.contract.reasons import Reason
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.placement_record import Placement, place
from headroom.core.placement.policy import Rules, VisibleDevices
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import reach
from tests.builders import (
    DISTRIBUTED,
    GIB,
    choosing,
    container,
    device,
    judged,
    mig,
    pod,
    request,
    reservation,
    shared,
    terms,
    use,
    weighed,
)

CHARGE = Rules(visible_devices=VisibleDevices.CHARGE)
TWO = (container("a"), container("b"))


def everywhere(vram: str, *containers: Container) -> Pod:
    return pod(vram, *(choosing(each) for each in containers or (container(),)))


def verdict(asked: Pod, node: NodeTerms) -> Reason | Placement:
    understood = request(asked, rules=CHARGE)
    snap, verdicts = judged(understood, node)
    return verdicts.reason(0) or place(understood, snap, verdicts, 0)


def chosen(asked: Pod, node: NodeTerms) -> dict[str, int]:
    """Return the reserved bytes by device."""
    placement = verdict(asked, node)
    assert isinstance(placement, Placement), placement
    (charge,) = placement.charges
    assert charge.by_environment
    return charge.candidates


def filled(uuid: str, used_gib: int, **other: Any) -> Any:
    """Return a device with 24 GiB and 4 replicas, with this amount of unattributed use."""
    used = used_gib * GIB
    return shared(uuid, used_bytes=used, unattributed_bytes=used, **other)


def held(candidates: Mapping[str, int]) -> Reservation:
    """Return the reservation of a pod whose own variable decides."""
    plain = reservation({})
    (charge,) = plain.charges
    sizes = {uuid: gib * GIB for uuid, gib in candidates.items()}
    certain = msgspec.structs.replace(charge, candidates=sizes, by_environment=True)
    return msgspec.structs.replace(plain, charges=[certain])


class TestEverywhere:
    """Pods that set their variable themselves must fit on every device of the node."""

    def test_the_pod_is_charged_on_every_device_of_the_node(self) -> None:
        node = weighed(shared("a"), shared("b"), device("c", resource="nvidia.com/other"))
        assert chosen(everywhere("4Gi"), node) == dict.fromkeys("abc", 4 * GIB)

    def test_the_pod_is_rejected_if_one_device_is_full(self) -> None:
        # The plugin would not choose b, which has more allocated replicas.
        node = weighed(
            shared("a"), filled("b", 22, free=3, allocated=1), plugin=DISTRIBUTED, tolerance_bytes=0
        )
        assert verdict(everywhere("2Gi"), node).__class__ is Placement
        assert verdict(everywhere("3Gi"), node) is Reason.MEMORY_ON_SOME
        assert isinstance(verdict(pod("3Gi"), node), Placement)

    def test_the_pod_is_rejected_if_one_device_is_unhealthy(self) -> None:
        node = weighed(shared("a"), device("b", resource="nvidia.com/other", healthy=False))
        assert verdict(everywhere("1Gi"), node) is Reason.UNHEALTHY_DEVICE

    def test_all_containers_count_even_on_unshared_devices(self) -> None:
        node = weighed(device("a"), device("b"))
        assert chosen(everywhere("a=8Gi,b=9Gi", *TWO), node) == {"a": 17 * GIB, "b": 17 * GIB}

    def test_all_instances_of_a_shared_memory_are_charged(self) -> None:
        node = weighed(mig("a", 1), mig("b", 1), mig("c", 2))
        sizes = {"a": 8 * GIB, "b": 8 * GIB, "c": 4 * GIB}
        assert chosen(everywhere("4Gi"), node) == sizes
        assert verdict(everywhere("6Gi"), node) is Reason.MEMORY_ON_SOME

    def test_the_plugin_chooses_if_the_runtime_ignores_the_variable(self) -> None:
        node = weighed(shared("a"), filled("b", 23, free=0, allocated=4), obeys_environment=False)
        placement = verdict(everywhere("2Gi"), node)
        assert isinstance(placement, Placement)
        assert not placement.charges[0].by_environment


class TestTheEquation:
    """Charges of pods whose replica is on their chosen device or on another one."""

    def reserved(self, *found: DeviceTerms) -> list[int]:
        return [each.reservation_bytes // GIB for each in found]

    def test_an_unconfirmed_pod_is_charged_only_on_the_chosen_device(self) -> None:
        a, b = terms(shared("a"), shared("b"), reservations={"u": held({"a": 8})})
        assert self.reserved(a, b) == [8, 0]
        assert (a.unconfirmed_bytes, b.unconfirmed_bytes) == (0, 0)
        assert [(h.uid, h.observed) for h in a.holders] == [("u", False)]
        assert b.holders == ()

    def test_the_replica_on_another_device_is_not_charged_memory(self) -> None:
        rows = [use("u", "b", 0, replica="b::0"), use("u", "a", 9 * GIB)]
        found = terms(shared("a"), shared("b", 3, 1), pods=rows, reservations={"u": held({"a": 8})})
        assert self.reserved(*found) == [9, 0]
        assert [h.observed for h in found[0].holders] == [True]
        assert found[1].holders == ()

    @pytest.mark.parametrize(
        ("used_bytes", "charged"),
        [
            pytest.param(GIB, 8, id="a miss: it uses its replica's device"),
            pytest.param(10 * GIB, 10, id="a miss, and it uses more than its request"),
            pytest.param(None, 8, id="unknown"),
        ],
    )
    def test_a_pod_that_may_ignore_its_variable_is_charged_on_both(
        self, used_bytes: int | None, charged: int
    ) -> None:
        rows = [use("u", "b", used_bytes, replica="b::0")]
        found = terms(shared("a"), shared("b", 3, 1), pods=rows, reservations={"u": held({"a": 8})})
        assert self.reserved(*found) == [8, charged]

    def test_an_unconfirmed_pod_counts_for_one_replica(self) -> None:
        node = (shared("a"), shared("b", free=3, allocated=1))
        alone = terms(*node, plugin=DISTRIBUTED)
        assert [reach(each) == 1 for each in alone] == [True, False]
        found = terms(*node, plugin=DISTRIBUTED, reservations={"u": held({"b": 8})})
        assert [reach(each) == 1 for each in found] == [True, True]
        assert [each.unconfirmed_bytes for each in found] == [0, 0]

    def test_an_ending_pod_stays_charged_until_it_is_gone(self) -> None:
        """The freed replica may belong to another pod, so it does not prove that this pod has
        ended.
        """
        rows = [use("p", "a", 0, replica="a::0"), use("u", "a", GIB), use("u", "b", 0)]
        full = shared("a", free=0, allocated=1)
        found = terms(
            full,
            shared("b", free=0, allocated=1),
            pods=rows,
            reservations={"p": reservation({"a": 5 * GIB}), "u": held({"a": 3})},
            leaving={"p", "u"},
            plugin=DISTRIBUTED,
        )
        # The next pod can get the replica only after p has released it.
        assert found[0].free_bytes == (24 - 3) * GIB

    def test_unconfirmed_pods_are_checked_on_every_device(self) -> None:
        crowd = {"p": reservation({"a": 8 * GIB, "b": 8 * GIB})}
        node = weighed(shared("a"), shared("b"), reservations=crowd)
        assert chosen(everywhere("16Gi"), node) == {"a": 16 * GIB, "b": 16 * GIB}
        assert verdict(everywhere("17Gi"), node) is Reason.MEMORY_ON_ANY

    def test_a_pod_is_rejected_if_it_could_displace_an_unconfirmed_pod_to_a_full_device(
        self,
    ) -> None:
        # p is unconfirmed and may get a. If a replica is allocated there, it may get b as well.
        crowd = {"p": reservation({"a": 8 * GIB})}
        b = filled("b", 20, free=3, allocated=1)
        how: dict[str, Any] = {"plugin": DISTRIBUTED, "tolerance_bytes": 0}
        assert verdict(everywhere("1Gi"), weighed(shared("a"), b, reservations=crowd, **how)) is (
            Reason.MEMORY_ON_ANY
        )
        assert chosen(everywhere("1Gi"), weighed(shared("a"), b, **how)) == {"a": GIB, "b": GIB}
