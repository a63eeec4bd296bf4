"""Tests that a container which requests several replicas on a steered node gets different devices.

The devices are one set: they are chosen together, reserved together, and while a pod is
unconfirmed, a further pod must get exactly the same set.
"""

from collections import Counter
from typing import Any, ClassVar

import msgspec
import pytest

from headroom.contract.gpunode import (
    MAX_REPLICAS,
    STARTING,
    Charge,
    ContainerCharge,
    Plugin,
    Replicas,
)
from headroom.contract.reasons import Reason
from headroom.core.placement.capacity import largest_fitting
from headroom.core.placement.explain import explain, failing
from headroom.core.placement.explanation_text import explanation_lines
from headroom.core.placement.fit import fit
from headroom.core.placement.placement_record import Placement, place
from headroom.core.placement.policy import Weights
from headroom.core.placement.prediction_outcome import Basis, Result, Since, compare
from headroom.core.placement.snapshot import NodeTerms
from headroom.core.placement.snapshot_builder import build
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    NOW_S,
    container,
    judged,
    mig,
    pod,
    reason_for,
    request,
    reservation,
    shared,
    status,
    terms,
    use,
    weighed,
)
from tests.examples import examples
from tests.model.device_sets import run

STEERED = Plugin(
    allocation_policy="distributed",
    topology_manager_policy="none",
    fail_requests_greater_than_one=False,
    steered=[GPU],
    steers_several=True,
)


def node(*devices: Any, plugin: Plugin = STEERED, **how: Any) -> NodeTerms:
    return weighed(*devices, plugin=plugin, **how)


def several(count: int, vram: str | None = "8Gi", **how: Any) -> Any:
    return pod(vram, container(gpus=count), **how)


def placed(what: Any, on: NodeTerms) -> Placement:
    asked, snap = request(what), build([on])
    verdicts = fit(asked, snap, snap.rows(["n"]), NOW_S)
    assert verdicts.fits[0], verdicts.reason(0)
    return place(asked, snap, verdicts, 0)


def charge(what: Any, on: NodeTerms) -> Charge:
    (only,) = placed(what, on).charges
    return only


def holding(**gib: int) -> dict[str, Any]:
    """Return one running pod on each of these devices, with its reservation in GiB."""
    return {
        "pods": [use(f"s{uuid}", uuid, replica=f"{uuid}::0") for uuid in gib],
        "reservations": {
            f"s{uuid}": reservation({uuid: n * GIB}, choices=[uuid]) for uuid, n in gib.items()
        },
    }


def gpus(count: int, **other: Any) -> list[Any]:
    return [shared(f"G{i}", **other) for i in range(count)]


class TestTheSet:
    def test_it_has_as_many_different_devices_as_requested(self) -> None:
        found = charge(several(3), node(*gpus(4)))
        assert (found.count, found.choices) == (3, ["G0", "G1", "G2"])
        assert found.candidates == dict.fromkeys(found.choices, 8 * GIB)
        assert found.chosen_replicas == dict.fromkeys(found.choices, 1)
        assert found.total_bytes == 24 * GIB

    def test_the_fullest_devices_are_taken_so_that_empty_ones_stay(self) -> None:
        full = node(*gpus(4), **holding(G3=4, G1=12, G0=20))
        assert charge(several(2), full).choices == ["G1", "G3"]
        spread = several(2, annotations={"headroom.gpu/policy": "spread"})
        assert charge(spread, full).choices == ["G2", "G3"]

    def test_it_stays_within_a_numa_node_if_possible(self) -> None:
        halves = [shared(f"G{i}", numa_node=i // 2) for i in range(4)]
        assert charge(several(2), node(*halves, **holding(G0=4, G3=4))).choices == ["G0", "G1"]
        assert charge(several(2), node(*halves, **holding(G3=8, G0=4))).choices == ["G2", "G3"]
        assert charge(several(3), node(*halves, **holding(G3=4))).choices == ["G0", "G1", "G3"]

    def test_it_is_connected_by_nvlink_if_possible(self) -> None:
        """NVLink bridges connect 0 with 2 and 1 with 3. 0 and 1 are on one NUMA node."""
        pairs = [shared(f"G{i}", numa_node=i // 2, nvlink_group=i % 2) for i in range(4)]
        assert charge(several(2), node(*pairs, **holding(G0=4, G1=4))).choices == ["G0", "G2"]
        assert charge(several(2), node(*pairs, **holding(G0=4, G1=8))).choices == ["G1", "G3"]
        assert charge(several(3), node(*pairs, **holding(G3=4))).choices == ["G0", "G1", "G3"]
        # With an NVSwitch, all devices are connected, so the NUMA node decides.
        switched = [shared(f"G{i}", numa_node=i // 2, nvlink_group=0) for i in range(4)]
        assert charge(several(2), node(*switched, **holding(G0=4, G3=4))).choices == ["G0", "G1"]
        assert charge(several(3), node(*switched, **holding(G3=4))).choices == ["G0", "G1", "G3"]
        # Only the last two devices are connected.
        some = [shared(f"G{i}", nvlink_group=0 if i > 1 else None) for i in range(4)]
        assert charge(several(2), node(*some, **holding(G0=4, G1=4))).choices == ["G2", "G3"]

    def test_an_implausible_numa_node_counts_as_unknown(self) -> None:
        odd = [shared(f"G{i}", numa_node=numa) for i, numa in enumerate((1 << 40, -7, 0, 16))]
        assert charge(several(3), node(*odd)).choices == ["G0", "G1", "G3"]

    def test_the_annotations_name_the_devices_in_the_order_of_the_report(self) -> None:
        made = placed(several(2), node(*gpus(3), **holding(G2=4)))
        assert made.annotations["headroom.gpu/devices.0"] == "G0,G2"
        assert made.annotations["headroom.gpu/bytes.0"] == str(8 * GIB)
        assert made.annotations["headroom.gpu/fraction.0"] == "0.3333"

    def test_the_annotations_name_the_devices_of_containers_that_get_the_whole_set(self) -> None:
        both = pod("8Gi", container("a", 2), container("b", 1))
        written = placed(both, node(*gpus(2))).annotations
        assert written["headroom.gpu/devices.0"] == "G0,G1"
        assert "headroom.gpu/devices.1" not in written
        pair = placed(pod("8Gi", container("a"), container("b")), node(*gpus(2))).annotations
        assert [pair[f"headroom.gpu/devices.{i}"] for i in (0, 1)] == ["G0", "G0"]

    def test_the_share_of_a_replica_counts_once_on_each_device(self) -> None:
        found = charge(several(4, None), node(*gpus(4)))
        assert found.candidates == {f"G{i}": 6 * GIB for i in range(4)}

    def test_every_device_has_memory_for_all_containers(self) -> None:
        both = pod("a=8Gi,b=12Gi", container("a", 2), container("b", 1))
        found = charge(both, node(*gpus(2)))
        assert (found.count, found.choices) == (3, ["G0", "G1"])
        assert found.candidates == {"G0": 20 * GIB, "G1": 20 * GIB}
        assert found.containers == [
            ContainerCharge("a", 2, 8 * GIB),
            ContainerCharge("b", 1, 12 * GIB),
        ]
        assert found.chosen_replicas == {"G0": 2, "G1": 1}
        tight = pod("a=16Gi,b=12Gi", container("a", 2), container("b", 1))
        assert reason_for(tight, node(*gpus(2))) is Reason.MEMORY_ON_ANY

    def test_devices_that_share_a_memory_have_room_for_both(self) -> None:
        sliced = {"sharing": "time-slicing", "replicas": Replicas(free=4), "memory_bytes": 24 * GIB}
        parts = mig("A", 1, **sliced), mig("B", 1, **sliced)
        assert charge(several(2, "12Gi"), node(*parts)).choices == ["A", "B"]
        assert reason_for(several(2, "13Gi"), node(*parts)) is Reason.MEMORY_ON_ANY


class TestWhileAnotherPodIsUnconfirmed:
    WAITING: ClassVar = {"q": reservation(dict.fromkeys("AB", 8 * GIB), 2, choices=["A", "B"])}
    ABC = shared("A"), shared("B"), shared("C")

    def test_a_further_pod_gets_exactly_its_set(self) -> None:
        on = node(*self.ABC, reservations=self.WAITING)
        assert charge(several(2), on).choices == ["A", "B"]
        for other in (several(1), several(3), several(2, "20Gi")):
            assert reason_for(other, on) is Reason.OTHERS_ARRIVING

    def test_a_pod_with_fewer_devices_does_not_join_a_larger_set(self) -> None:
        three = {"q": reservation(dict.fromkeys("ABC", 8 * GIB), 3, choices=["A", "B", "C"])}
        assert reason_for(several(2), node(*self.ABC, reservations=three)) is Reason.OTHERS_ARRIVING

    def test_a_pod_with_several_devices_does_not_join_one_device(self) -> None:
        one = {"q": reservation({"A": 8 * GIB}, choices=["A"])}
        assert reason_for(several(2), node(*self.ABC, reservations=one)) is Reason.OTHERS_ARRIVING

    def test_every_device_of_the_set_is_charged(self) -> None:
        on = terms(*self.ABC, reservations=self.WAITING, plugin=STEERED)
        assert [each.unconfirmed_bytes // GIB for each in on] == [8, 8, 0]

    def test_the_set_is_free_again_when_the_report_shows_the_pod(self) -> None:
        devices = shared("A", 3, 1), shared("B", 3, 1), shared("C")
        rows = [use("q", uuid, replica=f"{uuid}::0") for uuid in "AB"]
        on = node(*devices, pods=rows, reservations=self.WAITING)
        assert charge(several(1, "20Gi"), on).choices == ["C"]

    @pytest.mark.parametrize(
        "others",
        [
            pytest.param({"q": reservation({"A": GIB})}, id="the plugin chooses for one"),
            pytest.param(
                {
                    "q": reservation({"A": GIB}, choices=["A"]),
                    "r": reservation({"A": GIB, "B": GIB}, 2, choices=["A", "B"]),
                },
                id="two sets",
            ),
        ],
    )
    def test_it_waits_if_the_set_is_not_certain(self, others: Any) -> None:
        on = node(*self.ABC, reservations=others)
        assert reason_for(several(2), on) is Reason.OTHERS_ARRIVING
        assert reason_for(several(1), on) is None


class TestRejections:
    def test_the_reason_names_what_is_missing(self) -> None:
        assert reason_for(several(3), node(*gpus(2))) is Reason.NO_REPLICA
        assert reason_for(several(2, "30Gi"), node(*gpus(2))) is Reason.MEMORY_ON_ANY
        one_full = node(*gpus(2), **holding(G0=20))
        assert reason_for(several(2), one_full) is Reason.TOO_FEW_DEVICES
        _, verdicts = judged(several(2), one_full)
        assert list(failing(verdicts, 0)) == [Reason.TOO_FEW_DEVICES]
        sick = shared("G0", healthy=False), shared("G1")
        assert reason_for(several(2), node(*sick)) is Reason.UNHEALTHY_DEVICE
        taken = shared("G0", free=0, allocated=4), shared("G1")
        assert reason_for(several(2), node(*taken)) is Reason.NO_REPLICA

    def test_every_device_has_a_replica_for_each_container(self) -> None:
        both = pod("1Gi", container("a", 2), container("b", 2))
        scarce = shared("A", 1, 3), shared("B", 3, 1), shared("C", 1, 3)
        assert reason_for(both, node(*scarce)) is Reason.NO_REPLICA
        assert charge(several(2, "1Gi"), node(*scarce)).count == 2

    def test_several_replicas_of_one_device_are_not_enough(self) -> None:
        _, verdicts = judged(several(2), node(shared("A")))
        assert verdicts.reason(0) is Reason.NO_REPLICA
        assert explain(verdicts, Weights()).nearest[0].detail == (
            "a container requests 2 nvidia.com/gpu, each on a GPU of its own; the node has 1"
        )

    @pytest.mark.parametrize(
        ("plugin", "sharing", "reason"),
        [
            pytest.param({"fail_requests_greater_than_one": True}, "time-slicing", "rejects"),
            pytest.param({"fail_requests_greater_than_one": None}, "time-slicing", None),
            pytest.param({"fail_requests_greater_than_one": None}, "mps", "rejects"),
            pytest.param({"fail_requests_greater_than_one": False}, "mps", None),
            pytest.param({"steers_several": False}, "time-slicing", "rejects"),
        ],
    )
    def test_the_plugins_setting_decides(
        self, plugin: dict[str, Any], sharing: str, reason: str | None
    ) -> None:

        on = node(*gpus(2, sharing=sharing), plugin=msgspec.structs.replace(STEERED, **plugin))
        expected = Reason.TOO_MANY_SHARED if reason else None
        assert reason_for(several(2, "4Gi"), on) is expected
        assert reason_for(several(1, "4Gi"), on) is None
        assert "failRequestsGreaterThanOne" in Reason.TOO_MANY_SHARED.sentence

    def test_predicted_nodes_still_count_the_worst_case(self) -> None:
        stock = node(*gpus(2), plugin=DISTRIBUTED, **holding(G0=20))
        assert reason_for(several(2), stock) is Reason.MEMORY_ON_SOME
        found = charge(several(2, None), node(*gpus(2), plugin=DISTRIBUTED))
        assert (found.choices, set(found.candidates.values())) == ([], {12 * GIB})

    def test_a_node_without_enough_large_devices_can_never_take_the_pod(self) -> None:
        mixed = node(shared("A"), shared("B", memory_bytes=4 * GIB))
        assert judged(several(2), mixed)[1].large_enough().tolist() == [False]
        assert judged(several(1), mixed)[1].large_enough().tolist() == [True]


def test_use_beyond_the_request_counts_on_its_own_device_only() -> None:
    held = {"q": reservation(dict.fromkeys("AB", 8 * GIB), 2, choices=["A", "B"])}
    rows = [use("q", uuid, gib * GIB, replica=f"{uuid}::0") for uuid, gib in (("A", 5), ("B", 12))]
    devices = [
        shared(uuid, 3, 1, used_bytes=gib * GIB) for uuid, gib in (("A", 5), ("B", 12), ("C", 0))
    ]
    found = terms(*devices, pods=rows, reservations=held, plugin=STEERED)
    assert [each.reservation_bytes // GIB for each in found] == [8, 12, 0]
    over = [
        (each.device.uuid, holder.uid)
        for each in found
        for holder in each.holders
        if (holder.measured_bytes or 0) > holder.requested_bytes
    ]
    assert over == [("B", "q")]


class TestStartingAlone:
    ALONE: ClassVar = {"headroom.gpu/startup": "alone"}

    def starting(self, *uuids: str) -> dict[str, Any]:
        """Return pods that start alone on these devices."""
        held = holding(**dict.fromkeys(uuids, 4))
        return held | {
            "reservations": {
                uid: msgspec.structs.replace(each, phase=STARTING, start_timeout_s=600)
                for uid, each in held["reservations"].items()
            }
        }

    def test_the_set_excludes_devices_on_which_another_pod_starts(self) -> None:
        on = node(*gpus(3), **self.starting("G0"))
        assert charge(several(2), on).choices == ["G0", "G1"]
        assert charge(several(2, annotations=self.ALONE), on).choices == ["G1", "G2"]

    def test_the_pod_waits_if_too_few_devices_are_left(self) -> None:
        on = node(*gpus(3), **self.starting("G0", "G1"))
        assert reason_for(several(2, annotations=self.ALONE), on) is Reason.OTHER_STARTING
        assert reason_for(several(1, annotations=self.ALONE), on) is None


class TestExplanations:
    def test_the_text_names_the_number_of_devices(self) -> None:
        _, verdicts = judged(several(2), node(*gpus(3)))
        (found,) = explain(verdicts, Weights()).nearest
        assert explanation_lines(found)[0] == "n: fits, on 2 GPUs that Headroom chooses"

    def test_the_memory_that_is_missing_is_that_of_the_best_set(self) -> None:
        """The three devices have 20, 16 and 12 GiB free."""
        on = node(*gpus(3), **holding(G0=4, G1=8, G2=12))
        for count, missing_gib in ((1, 2), (2, 6), (3, 10)):
            _, verdicts = judged(several(count, "22Gi"), on)
            found = explain(verdicts, Weights())
            assert found.nearest[0].short_bytes == missing_gib * GIB
            assert found.largest_fitting_bytes == (22 - missing_gib) * GIB

    def test_the_largest_request_that_fits_does_not_depend_on_the_size_of_the_pod(self) -> None:
        """The four devices have 20, 16, 12 and 24 GiB free."""
        on = node(*gpus(4), **holding(G0=4, G1=8, G2=12))
        for vram in ("1Gi", "8Gi", "23Gi"):
            for count, largest_gib in ((1, 24), (2, 20), (3, 16)):
                _, verdicts = judged(several(count, vram), on)
                assert largest_fitting(verdicts) == largest_gib * GIB

    @pytest.mark.parametrize("allocated", [0, 3])
    def test_on_a_predicted_node_the_plugin_can_give_one_gpu_twice(self, allocated: int) -> None:
        """The explanation shows this even if the pod does not fit."""
        used = dict.fromkeys(("used_bytes", "unattributed_bytes"), allocated * 6 * GIB)
        devices = gpus(2, free=4 - allocated, allocated=allocated, **used)
        hint = (
            "a container requests 2 nvidia.com/gpu, which the device plugin can allocate on one "
            "GPU; on a steered node, each is on a GPU of its own"
        )
        details = {}
        for name, plugin in (("predicted", DISTRIBUTED), ("steered", STEERED)):
            _, verdicts = judged(several(2), node(*devices, plugin=plugin))
            assert verdicts.fits[0] == (allocated == 0)
            details[name] = explain(verdicts, Weights()).nearest[0].detail
        assert details == {"predicted": hint, "steered": ""}

    def test_a_container_that_got_one_device_twice_is_a_miss(self) -> None:
        held = {"q": reservation(dict.fromkeys("AB", 8 * GIB), 2, choices=["A", "B"])}
        before = status(shared("A"), shared("B"), plugin=STEERED)

        def result(*replicas: str) -> Result:
            rows = [use("q", replica[0], 0, replica=replica) for replica in replicas]
            taken = Counter(replica[0] for replica in replicas)
            devices = [shared(uuid, 4 - taken[uuid], taken[uuid]) for uuid in "AB"]
            after = status(*devices, pods=rows, plugin=STEERED)
            ground = Basis(before, held, frozenset()), Since(after, {}, {}, set(), set())
            return compare("q", held["q"], [ground]).result

        assert result("A::0", "B::3") is Result.HIT
        assert result("A::0", "A::1") is Result.MISS


class TestAWholeDevice:
    def test_it_is_taken_alone(self) -> None:
        found = charge(several(1, "100%"), node(*gpus(2), **holding(G0=1)))
        assert found.choices == ["G1"]
        held = {"w": reservation({"G0": 24 * GIB}, choices=["G0"])}
        on = node(shared("G0", 3, 1), pods=[use("w", "G0", replica="G0::0")], reservations=held)
        assert reason_for(several(1, "1Mi"), on) is Reason.MEMORY_ON_ANY

    def test_a_pod_that_uses_no_memory_yet_is_company_too(self) -> None:
        idle = [use("stranger", "G0", 0, replica="G0::0")]
        on = node(shared("G0", 3, 1), shared("G1"), pods=idle)
        assert charge(several(1, "100%"), on).choices == ["G1"]
        alone = node(shared("G0", 3, 1), pods=idle)
        assert reason_for(several(1, "100%"), alone) is Reason.NO_REPLICA
        assert reason_for(several(1, "24Gi"), alone) is None

    def test_the_reason_is_memory_if_pods_use_it_and_replicas_if_they_only_hold_them(self) -> None:
        """Pods hold a replica of the first three GPUs. The first pod reserves no memory."""
        busy = [shared(f"G{i}", 3, 1) for i in range(3)]
        full = node(*busy, shared("G3"), **holding(G0=1, G1=1, G2=1))
        assert reason_for(several(2, "100%"), full) is Reason.TOO_FEW_DEVICES
        idle = [use(f"s{i}", f"G{i}", 0, replica=f"G{i}::0") for i in range(3)]
        held = node(*busy, shared("G3"), pods=idle)
        _, verdicts = judged(several(2, "100%"), held)
        assert verdicts.reason(0) is Reason.NO_REPLICA
        assert explain(verdicts, Weights()).nearest[0].detail == (
            "the pod takes whole GPUs, on which no other pod may hold a replica; "
            "1 of 4 GPUs is empty"
        )

    def test_the_default_of_a_namespace_can_be_a_whole_device(self) -> None:
        asked = request(pod(None), default_vram="100%")
        assert [ask.takes_whole_devices for ask in asked.asks] == [True]

    def test_several_whole_devices(self) -> None:
        on = node(*gpus(4), **holding(G2=1))
        assert charge(several(3, "100%"), on).choices == ["G0", "G1", "G3"]
        assert reason_for(several(4, "100%"), on) is Reason.TOO_FEW_DEVICES


def test_a_pod_with_one_replica_per_container_still_gets_one_device() -> None:
    pair = pod("8Gi", container("a"), container("b"))
    assert charge(pair, node(*gpus(2))).choices == ["G0"]
    assert charge(pair, node(*gpus(2))).chosen_replicas == {"G0": 2}


def test_the_number_of_chosen_replicas_never_exceeds_the_count() -> None:
    wide = [ContainerCharge(f"c{i}", 2) for i in range(3)]
    reused = Charge(GPU, 4, choices=["A", "B"], containers=wide)
    assert reused.chosen_replicas == {"A": 2, "B": 2}
    assert Charge(GPU, MAX_REPLICAS, choices=["A"]).chosen_replicas == {"A": MAX_REPLICAS}
    assert Charge(GPU, 2).chosen_replicas == {}


@pytest.mark.parametrize("toggles", [False, True], ids=["always steered", "steered now and then"])
def test_no_random_world_overcommits_or_gives_one_device_twice(toggles: bool) -> None:
    """The judge is independent of the product (``tests/model/device_sets.py``)."""
    counts: Counter[str] = Counter()
    for seed in range(examples(500)):
        problems, counted = run(seed, toggles)
        assert not problems, (seed, problems)
        counts += counted
    assert counts["rejected"] == 0
    kinds = ["1 devices", "2 devices", "3 devices", "4 devices", "alone", "waits"]
    for kind in [*kinds, "predicted"] if toggles else kinds:
        assert counts[kind] > 5, counts
