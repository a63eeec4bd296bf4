"""Tests each reason to reject a node, and similar cases that are not a reason."""

from typing import Any

import numpy as np
import pytest

from headroom.contract.annotations import PROCESSES
from headroom.contract.gpunode import Device, Replicas, SmActivity
from headroom.contract.kube import Pod
from headroom.contract.reasons import Reason
from headroom.core.placement.fit import fit
from headroom.core.placement.snapshot import NodeTerms
from tests.builders import (
    FRESH_S,
    GIB,
    NOW_S,
    container,
    device,
    judged,
    mig,
    pod,
    reason_for,
    request,
    reservation,
    shared,
    use,
    weighed,
)

MAX_DEVICE_BYTES = 1 << 44

SHARED = "nvidia.com/gpu.shared"
SMALL_MIG = "nvidia.com/mig-1g.5gb"


def mps(uuid: str = "GPU-0", free: int = 4, **other: object) -> Device:
    return shared(uuid, free, **{"sharing": "mps", **other})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("asked", "node", "reason"),
    [
        pytest.param(pod("24Gi"), weighed(device()), None, id="all of an idle GPU"),
        pytest.param(pod("1M"), weighed(device()), None, id="one megabyte"),
        pytest.param(
            pod(str(24 * GIB + 1)), weighed(device()), Reason.MEMORY_ON_ANY, id="one byte too many"
        ),
        pytest.param(
            pod(str(MAX_DEVICE_BYTES)), weighed(shared()), Reason.MEMORY_ON_ANY, id="the maximum"
        ),
        pytest.param(
            pod(), weighed(device(resource=SHARED)), Reason.NO_SUCH_RESOURCE, id="another resource"
        ),
        pytest.param(pod(), weighed(), Reason.NO_SUCH_RESOURCE, id="no devices"),
        pytest.param(
            pod(),
            weighed(device(replicas=Replicas(allocated=1))),
            Reason.NO_REPLICA,
            id="every replica is allocated",
        ),
        pytest.param(
            pod(),
            weighed(device("D"), reservations={"u": reservation({"D": 1})}),
            Reason.NO_REPLICA,
            id="the last replica is reserved",
        ),
        pytest.param(
            pod("1Gi", container(gpus=3)),
            weighed(device("a"), device("b")),
            Reason.NO_REPLICA,
            id="more GPUs than the node has",
        ),
        pytest.param(
            pod("9Gi"),
            weighed(shared("a"), shared("b", used_bytes=16 * GIB, unattributed_bytes=16 * GIB)),
            Reason.MEMORY_ON_SOME,
            id="the plugin could choose the full device",
        ),
        pytest.param(
            pod(), weighed(device(), reserve_bytes=24 * GIB), Reason.MEMORY_ON_ANY, id="reserved"
        ),
        pytest.param(
            pod("25%"),
            weighed(device(), reserve_bytes=24 * GIB),
            Reason.MEMORY_ON_ANY,
            id="a share of nothing",
        ),
        pytest.param(
            pod(None),
            weighed(device(), reserve_bytes=24 * GIB),
            Reason.MEMORY_ON_ANY,
            id="a replica without a share",
        ),
    ],
)
def test_memory_and_replicas_decide_whether_a_pod_fits(
    asked: Pod, node: NodeTerms, reason: Reason | None
) -> None:
    assert reason_for(asked, node) is reason


@pytest.mark.parametrize("reason", [Reason.UNKNOWN_NODE, Reason.NO_REPORT, Reason.NOT_INITIALISED])
def test_reasons_of_the_node_precede_reasons_of_devices(reason: Reason) -> None:
    assert reason_for("1Ti", weighed(device(), reason=reason)) is reason


def test_a_pod_never_fits_on_a_stale_node() -> None:
    node = weighed(device())
    assert judged("1M", node, now_s=FRESH_S)[1].reason(0) is None
    assert judged("1M", node, now_s=FRESH_S + 0.001)[1].reason(0) is Reason.STALE_REPORT
    never = weighed(device(), fresh_until_s=float("-inf"))
    assert reason_for("1M", never) is Reason.STALE_REPORT


def test_a_pod_that_requests_no_gpu_fits_on_every_node() -> None:
    asked = pod(None, container(gpus=0))
    node = weighed(reason=Reason.NO_REPORT, fresh_until_s=float("-inf"))
    assert reason_for(asked, node) is None


class TestUnhealthyDevices:
    """An unhealthy device with a free replica closes only its own resource."""

    unhealthy = (
        pytest.param({"used_bytes": 25 * GIB}, Reason.CONTRADICTORY_REPORT, id="contradictory"),
        pytest.param({"healthy": False}, Reason.UNHEALTHY_DEVICE, id="unhealthy"),
        pytest.param({"compute_mode": "prohibited"}, Reason.COMPUTE_MODE, id="prohibited"),
        pytest.param(
            {"replicas": Replicas(free=-1)}, Reason.CONTRADICTORY_REPORT, id="unknown replicas"
        ),
        pytest.param(
            {"memory_bytes": -1, "used_bytes": -1, "healthy": False},
            Reason.MEMORY_UNKNOWN,
            id="its driver does not report it",
        ),
    )

    @pytest.mark.parametrize(("wrong", "reason"), unhealthy)
    def test_an_unhealthy_candidate_closes_its_resource(
        self, wrong: dict[str, object], reason: Reason
    ) -> None:
        assert reason_for("1M", weighed(device("a"), device("b", **wrong))) is reason

    @pytest.mark.parametrize(("wrong", "reason"), unhealthy[:3])
    def test_an_unhealthy_device_without_a_free_replica_blocks_no_pod(
        self, wrong: dict[str, object], reason: Reason
    ) -> None:
        held = device("b", **{**wrong, "replicas": Replicas(allocated=1)})
        assert reason_for("1M", weighed(device("a"), held)) is None

    @pytest.mark.parametrize(("wrong", "reason"), unhealthy)
    def test_other_resources_stay_open(self, wrong: dict[str, object], reason: Reason) -> None:
        node = weighed(device("a", **wrong), device("b", resource=SMALL_MIG))
        assert reason_for(pod("1Gi", container(resource=SMALL_MIG)), node) is None
        assert reason_for("1Gi", node) is not None

    def test_devices_with_equal_uuids_are_closed(self) -> None:
        node = weighed(device("a"), device("a"), device("b"))
        assert reason_for("1M", node) is Reason.CONTRADICTORY_REPORT


@pytest.mark.parametrize(
    ("mode", "sharing", "reason"),
    [
        pytest.param(
            "exclusive-process", "time-slicing", Reason.COMPUTE_MODE, id="exclusive process"
        ),
        pytest.param(
            "exclusive-thread", "time-slicing", Reason.COMPUTE_MODE, id="exclusive thread"
        ),
        pytest.param("exclusive-process", "none", None, id="exclusive for a pod"),
        pytest.param("exclusive-process", "mps", None, id="exclusive for the MPS server"),
        pytest.param("prohibited", "mps", Reason.COMPUTE_MODE, id="no MPS server"),
        pytest.param("default", "time-slicing", None, id="default"),
    ],
)
def test_a_device_is_closed_by_a_compute_mode_that_excludes_sharing(
    mode: str, sharing: Any, reason: Reason | None
) -> None:
    replicas = Replicas(free=1 if sharing == "none" else 4)
    closed = device("a", compute_mode=mode, sharing=sharing, replicas=replicas)
    assert reason_for("1M", weighed(closed)) is reason
    if reason is not None:
        (terms,) = weighed(closed).devices
        detail = f"its compute mode is {mode}; to change it on the node: nvidia-smi -i a -c DEFAULT"
        assert terms.health_detail == detail


class TestMps:
    """A device with 24 GiB and 4 replicas allows 6 GiB for each process."""

    @pytest.mark.parametrize(
        ("vram", "processes", "reason"),
        [
            pytest.param("6Gi", "1", None, id="the cap itself"),
            pytest.param(
                str(6 * GIB + 1), "1", Reason.ABOVE_MPS_LIMIT, id="one byte above the cap"
            ),
            pytest.param("12Gi", "2", None, id="the cap is for each process"),
            pytest.param(
                str(12 * GIB + 1), "2", Reason.ABOVE_MPS_LIMIT, id="only the cap for each process"
            ),
            pytest.param("25%", "1", None, id="a share up to the cap"),
            pytest.param("26%", "1", Reason.ABOVE_MPS_LIMIT, id="a share above the cap"),
        ],
    )
    def test_a_process_gets_the_share_of_its_replica(
        self, vram: str, processes: str, reason: Reason | None
    ) -> None:
        asked = pod(vram, annotations={PROCESSES: processes})
        assert reason_for(asked, weighed(mps())) is reason

    def test_each_container_has_its_own_limit(self) -> None:
        assert reason_for(pod("6Gi", container("a"), container("b")), weighed(mps())) is None

    def test_the_share_of_a_replica_equals_the_limit_set_by_the_plugin(self) -> None:
        odd = mps(free=5)  # not a whole number of MiB for each
        assert reason_for(None, weighed(odd)) is None
        assert reason_for("20%", weighed(odd)) is Reason.ABOVE_MPS_LIMIT

    def test_an_unannotated_pod_is_charged_the_limit_per_process(self) -> None:
        asked = pod(None, annotations={PROCESSES: "3"})

        def used(used_bytes: int) -> dict[str, object]:
            return {"used_bytes": used_bytes, "unattributed_bytes": used_bytes}

        assert reason_for(asked, weighed(mps(**used(6 * GIB)), tolerance_bytes=0)) is None
        full = used(6 * GIB + 1)
        assert reason_for(asked, weighed(mps(**full), tolerance_bytes=0)) is Reason.MEMORY_ON_ANY
        # Time-slicing has no limit per process.
        assert reason_for(asked, weighed(shared(**full), tolerance_bytes=0)) is None

    def test_two_replicas_in_one_container_are_rejected(self) -> None:
        two = pod("1Gi", container(gpus=2))
        assert reason_for(two, weighed(mps())) is Reason.TOO_MANY_SHARED
        assert reason_for(two, weighed(shared())) is None


class TestSmLimit:
    @pytest.mark.parametrize(
        ("activity", "reason"),
        [
            pytest.param(SmActivity(0.6999, "gpm"), None, id="below"),
            pytest.param(SmActivity(0.7, "gpm"), Reason.SM_ABOVE_LIMIT, id="at the limit"),
            pytest.param(None, Reason.SM_ABOVE_LIMIT, id="unknown"),
            pytest.param(SmActivity(0.1, "nvml"), Reason.SM_ABOVE_LIMIT, id="device utilisation"),
        ],
    )
    def test_sm_activity_must_be_known_and_below_the_limit(
        self, activity: SmActivity | None, reason: Reason | None
    ) -> None:
        asked = pod("1Gi", annotations={"headroom.gpu/max-sm": "70%"})
        idle = device("b", sm_activity=SmActivity(0, "gpm"))
        assert reason_for(asked, weighed(device("a", sm_activity=activity), idle)) is reason
        assert reason_for("1Gi", weighed(device(sm_activity=activity))) is None


class TestUnconfirmedPods:
    def test_the_sum_of_all_containers_is_charged_on_each_shared_device(self) -> None:
        held = {f"u{i}": reservation({"a": 8 * GIB, "b": 8 * GIB}) for i in range(2)}
        node = weighed(shared("a"), shared("b"), reservations=held)
        assert reason_for("8Gi", node) is None
        assert reason_for(str(8 * GIB + 1), node) is Reason.MEMORY_ON_ANY

    def test_each_container_takes_one_unshared_device(self) -> None:
        uuids = {"a": 24 * GIB, "b": 24 * GIB, "c": 24 * GIB}
        devices = [device(uuid) for uuid in uuids]
        held = {f"u{i}": reservation(uuids) for i in range(2)}
        assert reason_for("24Gi", weighed(*devices, reservations=held)) is None
        held["u2"] = reservation(uuids)
        assert reason_for("1M", weighed(*devices, reservations=held)) is Reason.NO_REPLICA

    def test_confirmed_pods_are_charged_on_one_device(self) -> None:
        held = {"u0": reservation({"a": 20 * GIB, "b": 20 * GIB})}
        devices = shared("a", free=0, allocated=1), shared("b")
        assert reason_for("20Gi", weighed(*devices, reservations=held)) is Reason.MEMORY_ON_ANY
        node = weighed(*devices, reservations=held, pods=[use("u0", "a")])
        assert reason_for("20Gi", node) is None


class TestMig:
    def test_a_single_free_instance_is_a_certain_choice(self) -> None:
        full = mig("M0", 1, replicas=Replicas(allocated=1), used_bytes=9 * GIB)
        _, verdicts = judged("10Gi", weighed(full, mig("M1", 2)))
        assert verdicts.fits.all()
        assert verdicts.asks[0].candidates.tolist() == [[False, True]]

    def test_compute_instances_share_their_memory(self) -> None:
        held = {"u": reservation({"M0": 6 * GIB, "M1": 6 * GIB})}
        same = weighed(mig("M0", 1), mig("M1", 1), reservations=held)
        assert reason_for("4Gi", same) is None
        assert reason_for(str(4 * GIB + 1), same) is Reason.MEMORY_ON_ANY
        apart = weighed(mig("M0", 1), mig("M1", 2), reservations=held)
        assert reason_for("10Gi", apart) is None

    def test_two_instances_for_one_container_need_twice_the_memory(self) -> None:
        two = pod("6Gi", container(gpus=2))
        assert reason_for(two, weighed(mig("M0", 1), mig("M1", 1))) is Reason.MEMORY_ON_ANY
        assert reason_for(two, weighed(mig("M0", 1), mig("M1", 2))) is None


class TestUnannotated:
    def test_an_unannotated_pod_is_charged_a_replicas_share_on_a_shared_device(self) -> None:
        held = {"u": reservation({"a": 18 * GIB})}
        assert reason_for(None, weighed(shared("a"), reservations=held)) is None
        held["u"] = reservation({"a": 18 * GIB + 1})
        assert reason_for(None, weighed(shared("a"), reservations=held)) is Reason.MEMORY_ON_ANY

    def test_an_unannotated_pod_is_exclusive_on_an_unshared_device(self) -> None:
        little, more = (
            device(used_bytes=n, unattributed_bytes=n) for n in (64 << 20, (64 << 20) + 1)
        )
        assert reason_for(None, weighed(little)) is None
        assert reason_for(None, weighed(more)) is Reason.MEMORY_ON_ANY


def test_the_reason_comes_from_the_first_request_that_fails() -> None:
    asked = pod("8Gi", container("a"), container("b", resource=SMALL_MIG))
    assert reason_for(asked, weighed(device("a"))) is Reason.NO_SUCH_RESOURCE
    small = device("b", resource=SMALL_MIG, memory_bytes=5 * GIB)
    assert reason_for(asked, weighed(device("a"), small)) is Reason.MEMORY_ON_ANY
    assert (
        reason_for(pod("a=8Gi,b=5Gi", *asked.spec.containers or ()), weighed(device("a"), small))
        is None
    )


def test_a_node_with_fewer_devices_does_not_use_devices_of_the_next_node() -> None:
    empty = weighed(name="empty")
    _, verdicts = judged("1M", weighed(device("a"), device("b"), name="full"), empty)
    assert [verdicts.reason(i) for i in (0, 1)] == [None, Reason.NO_SUCH_RESOURCE]


def test_an_empty_table_has_no_verdicts() -> None:
    snap, _ = judged("1M", weighed(device()))
    verdicts = fit(request("1M"), snap, np.empty(0, np.int64), NOW_S)
    assert verdicts.codes.shape == (0,)
