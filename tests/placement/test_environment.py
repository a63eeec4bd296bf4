"""Pods whose own NVIDIA_VISIBLE_DEVICES decides which devices they see."""

from collections.abc import Mapping
from typing import Any

import msgspec
import pytest

from contract.annotations import MAX_SM, POLICY, PROCESSES, ScoringPolicy
from contract.gpunode import Replicas, Reservation, SmActivity
from contract.kube import Container, Pod
from contract.reasons import Reason
from extender.placement.device_accounting import DeviceTerms
from extender.placement.fit import fit
from extender.placement.fit_cache import FitCache
from extender.placement.placement_record import Placement, place
from extender.placement.policy import Rules, VisibleDevices, Weights
from extender.placement.score import rank
from extender.placement.snapshot import NodeTerms
from extender.placement.snapshot_builder import build, reach
from tests.builders import (
    DISTRIBUTED,
    GIB,
    NOW_S,
    choosing,
    container,
    device,
    following,
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


def pinned(vram: str, *containers: Container, **other: Any) -> Pod:
    """Return a pod whose containers all use the chosen device by NVIDIA_VISIBLE_DEVICES."""
    given = containers or (container(),)
    return pod(vram, *(following(each, i) for i, each in enumerate(given)), **other)


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
    """Return a device with 24 GiB and 4 replicas, with this much unattributed use."""
    used = used_gib * GIB
    return shared(uuid, used_bytes=used, unattributed_bytes=used, **other)


def held(candidates: Mapping[str, int]) -> Reservation:
    """Return the reservation of a pod whose own variable decides."""
    plain = reservation({})
    (charge,) = plain.charges
    sizes = {uuid: gib * GIB for uuid, gib in candidates.items()}
    certain = msgspec.structs.replace(charge, candidates=sizes, by_environment=True)
    return msgspec.structs.replace(plain, charges=[certain])


class TestPinned:
    """Pods that use the device that we choose."""

    node = weighed(filled("a", 2), filled("b", 10), filled("c", 20), pins=True, tolerance_bytes=0)

    @pytest.mark.parametrize(
        ("vram", "policy", "device"),
        [
            pytest.param("4Gi", "pack", "c", id="packed: the fullest on which it fits"),
            pytest.param("5Gi", "pack", "b", id="the next when that is too full"),
            pytest.param("4Gi", "spread", "a", id="spread: the emptiest"),
        ],
    )
    def test_the_best_device_is_chosen(self, vram: str, policy: str, device: str) -> None:
        asked = pinned(vram, annotations={POLICY: policy})
        gib = int(vram.removesuffix("Gi"))
        assert chosen(asked, self.node) == {device: gib * GIB}

    @pytest.mark.parametrize("policy", ["pack", "spread"])
    def test_of_equally_full_devices_the_idlest_is_chosen(self, policy: str) -> None:
        busy = [
            filled(uuid, 10, sm_activity=SmActivity(ratio, "gpm"))
            for uuid, ratio in (("a", 0.9), ("b", 0.2), ("c", 0.5))
        ]
        asked = pinned("4Gi", annotations={POLICY: policy})
        node = weighed(*busy, pins=True, tolerance_bytes=0)
        assert chosen(asked, node) == {"b": 4 * GIB}

    @pytest.mark.parametrize(
        ("worse", "annotations"),
        [
            pytest.param({"healthy": False}, {}, id="unhealthy"),
            pytest.param({"memory_bytes": 20 * GIB, "used_bytes": 21 * GIB}, {}, id="absurd"),
            pytest.param({"sm_activity": SmActivity(0.9, "gpm")}, {MAX_SM: "50%"}, id="busy"),
            pytest.param({"sharing": "mps"}, {}, id="an MPS cap below the request"),
            pytest.param({"sharing": "none", "replicas": Replicas(free=1)}, {}, id="not shared"),
        ],
    )
    def test_an_unsuitable_device_is_not_chosen(
        self, worse: dict[str, Any], annotations: dict[str, str]
    ) -> None:
        idle = {"sm_activity": SmActivity(0.1, "gpm")}
        bad = filled("a", 15, **worse) if "used_bytes" not in worse else shared("a", **worse)
        node = weighed(bad, filled("b", 0, **idle), pins=True)
        assert chosen(pinned("7Gi", annotations=annotations), node) == {"b": 7 * GIB}

    def test_a_cordoned_device_is_not_chosen(self) -> None:
        node = weighed(filled("a", 15), filled("b", 0), pins=True, cordoned={"a"})
        assert chosen(pinned("7Gi"), node) == {"b": 7 * GIB}

    @pytest.mark.parametrize(
        ("asked", "node", "reason"),
        [
            pytest.param(
                pinned("23Gi"), node, Reason.MEMORY_ON_ANY, id="no device has so much left"
            ),
            pytest.param(
                pinned("1Gi"),
                weighed(shared("a", healthy=False), pins=True),
                Reason.UNHEALTHY_DEVICE,
                id="the only one is unhealthy",
            ),
            pytest.param(
                pinned("1Gi"),
                weighed(shared("a"), pins=True, cordoned={"a"}),
                Reason.CORDONED_DEVICE,
                id="the only one is cordoned",
            ),
            pytest.param(
                pinned("1Gi"),
                weighed(shared("a", free=0, allocated=4), pins=True),
                Reason.NO_REPLICA,
                id="the plugin has nothing to hand out",
            ),
            pytest.param(
                pinned("7Gi", annotations={PROCESSES: "1"}),
                weighed(shared("a", sharing="mps"), pins=True),
                Reason.ABOVE_MPS_LIMIT,
                id="above the MPS cap everywhere",
            ),
            pytest.param(
                pinned("1Gi", container(gpus=2)),
                node,
                Reason.TOO_MANY_SHARED,
                id="two replicas for one container",
            ),
            pytest.param(
                pinned("1Gi"),
                weighed(device("a"), pins=True),
                Reason.NOT_PINNED,
                id="devices that one pod has alone",
            ),
            pytest.param(
                pinned("1Gi"), weighed(shared("a")), Reason.NOT_PINNED, id="a node as any other"
            ),
        ],
    )
    def test_rejections(self, asked: Pod, node: NodeTerms, reason: Reason) -> None:
        assert verdict(asked, node) is reason

    def test_the_plugin_chooses_if_the_runtime_ignores_the_variable(self) -> None:
        node = weighed(shared("a"), shared("b"), obeys_environment=False)
        placement = verdict(pinned("4Gi"), node)
        assert isinstance(placement, Placement)
        (charge,) = placement.charges
        assert not charge.by_environment
        assert charge.candidates == {"a": 4 * GIB, "b": 4 * GIB}

    def test_all_containers_get_the_same_device(self) -> None:
        node = weighed(filled("a", 20), filled("b", 14), pins=True, tolerance_bytes=0)
        placement = verdict(pinned("a=4Gi,b=6Gi", *TWO), node)
        assert isinstance(placement, Placement)
        assert placement.charges[0].candidates == {"b": 10 * GIB}
        for index, size in enumerate((4, 6)):
            assert placement.annotations[f"headroom.gpu/devices.{index}"] == "b"
            assert placement.annotations[f"headroom.gpu/bytes.{index}"] == str(size * GIB)
        assert verdict(pinned("a=5Gi,b=6Gi", *TWO), node) is Reason.MEMORY_ON_ANY

    def test_a_pod_without_the_variable_is_predicted(self) -> None:
        node = weighed(shared("a"), shared("b"), pins=True)
        placement = verdict(pod("4Gi"), node)
        assert isinstance(placement, Placement)
        assert not placement.charges[0].by_environment
        assert sorted(placement.charges[0].candidates) == ["a", "b"]

    def test_cached_results_are_not_used_for_another_policy(self) -> None:
        snap, cached_fits = build([self.node]), FitCache(Weights())
        rows = snap.rows(["n"])
        for policy in (ScoringPolicy.PACK, ScoringPolicy.SPREAD):
            asked = request(pinned("4Gi", annotations={POLICY: policy.value}))
            kept = cached_fits.weigh(asked, snap).rank(asked, snap, rows, NOW_S)
            assert kept.scores == rank(fit(asked, snap, rows, NOW_S), Weights()).scores


class TestEverywhere:
    """Pods that set their variable themselves: they must fit on every device of the node."""

    def test_it_is_charged_on_every_device_of_the_node(self) -> None:
        node = weighed(shared("a"), shared("b"), device("c", resource="nvidia.com/other"))
        assert chosen(everywhere("4Gi"), node) == dict.fromkeys("abc", 4 * GIB)

    def test_it_is_rejected_if_one_device_is_full(self) -> None:
        # The plugin would not give it b, on which more replicas are taken.
        node = weighed(
            shared("a"), filled("b", 22, free=3, allocated=1), plugin=DISTRIBUTED, tolerance_bytes=0
        )
        assert verdict(everywhere("2Gi"), node).__class__ is Placement
        assert verdict(everywhere("3Gi"), node) is Reason.MEMORY_ON_SOME
        assert isinstance(verdict(pod("3Gi"), node), Placement)

    def test_it_is_rejected_if_one_device_is_unhealthy(self) -> None:
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
    """Charges of pods on their chosen device, and of their replica on another device."""

    def reserved(self, *found: DeviceTerms) -> list[int]:
        return [each.reservation_bytes // GIB for each in found]

    def test_an_unconfirmed_pod_is_charged_only_on_the_chosen_device(self) -> None:
        a, b = terms(shared("a"), shared("b"), reservations={"u": held({"a": 8})})
        assert self.reserved(a, b) == [8, 0]
        assert (a.unconfirmed_bytes, b.unconfirmed_bytes) == (0, 0)
        assert [(h.uid, h.observed) for h in a.holders] == [("u", False)]
        assert b.holders == ()

    def test_the_replica_of_another_device_charges_no_memory(self) -> None:
        rows = [use("u", "b", 0, replica="b::0"), use("u", "a", 9 * GIB)]
        found = terms(shared("a"), shared("b", 3, 1), pods=rows, reservations={"u": held({"a": 8})})
        assert self.reserved(*found) == [9, 0]
        assert [h.observed for h in found[0].holders] == [True]
        assert found[1].holders == ()

    @pytest.mark.parametrize(
        ("used_bytes", "charged"),
        [
            pytest.param(GIB, 8, id="a miss: it uses what it was given"),
            pytest.param(10 * GIB, 10, id="and more than it asked for"),
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
        """A replica released by another pod does not prove that it has ended."""
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
        # The next pod can be given it only when p has let go.
        assert found[0].free_bytes == (24 - 3) * GIB

    def test_unconfirmed_pods_are_checked_on_every_device(self) -> None:
        crowd = {"p": reservation({"a": 8 * GIB, "b": 8 * GIB})}
        node = weighed(shared("a"), shared("b"), reservations=crowd, pins=True)
        assert chosen(pinned("16Gi"), node) == {"a": 16 * GIB}
        assert verdict(pinned("17Gi"), node) is Reason.MEMORY_ON_ANY

    def test_no_pod_fits_if_it_could_shift_an_unconfirmed_pod_to_a_full_device(self) -> None:
        # p is unconfirmed and may get a; if a replica is taken there, it may get b as well.
        crowd = {"p": reservation({"a": 8 * GIB})}
        b = filled("b", 20, free=3, allocated=1)
        how: dict[str, Any] = {"plugin": DISTRIBUTED, "tolerance_bytes": 0, "pins": True}
        assert verdict(pinned("1Gi"), weighed(shared("a"), b, reservations=crowd, **how)) is (
            Reason.MEMORY_ON_ANY
        )
        assert chosen(pinned("1Gi"), weighed(shared("a"), b, **how)) == {"b": GIB}
