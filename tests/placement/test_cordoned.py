"""Tests which pods a cordoned device rejects, depending on how the node's devices are chosen."""

from typing import Any

import pytest

from headroom.contract.gpunode import Device, Plugin, Replicas
from headroom.contract.reasons import Reason
from headroom.core.placement.explain import explain
from headroom.core.placement.policy import Weights
from tests.builders import (
    DISTRIBUTED,
    GIB,
    GPU,
    device,
    judged,
    mig,
    reason_for,
    reservation,
    shared,
    use,
    weighed,
)

STEERED = Plugin(allocation_policy="distributed", topology_manager_policy="none", steered=[GPU])
TAKEN = Replicas(free=0, allocated=1)


def candidates(*devices: Device, **how: Any) -> list[str]:
    """Return the devices that an 8 GiB pod could get."""
    verdicts = judged("8Gi", weighed(*devices, **how))[1]
    assert verdicts.fits[0]
    (node,) = explain(verdicts, Weights()).nearest
    return [each.terms.device.uuid for each in node.candidates]


def test_an_empty_cordoned_device_closes_the_others_while_the_plugin_could_choose_it() -> None:
    node = weighed(shared("A"), shared("B"), plugin=DISTRIBUTED, cordoned={"A"})
    assert reason_for("8Gi", node) is Reason.CORDONED_DEVICE


def test_a_cordoned_device_that_is_not_the_next_choice_closes_nothing() -> None:
    held = shared("A", free=3, allocated=1)
    how = {"plugin": DISTRIBUTED, "cordoned": {"A"}, "pods": [use("u", "A")]}
    busy = {"u": reservation({"A": GIB})}
    assert candidates(held, shared("B"), reservations=busy, **how) == ["B"]


def test_a_cordoned_device_without_a_free_replica_closes_nothing() -> None:
    full = device("A", replicas=TAKEN)
    held = {"u": reservation({"A": GIB})}
    how = {"cordoned": {"A"}, "reservations": held, "pods": [use("u", "A")]}
    assert candidates(full, device("B"), **how) == ["B"]


def test_a_steering_agent_excludes_only_the_cordoned_device() -> None:
    assert candidates(shared("A"), shared("B"), plugin=STEERED, cordoned={"A"}) == ["B"]
    both = weighed(shared("A"), shared("B"), plugin=STEERED, cordoned={"A", "B"})
    assert reason_for("8Gi", both) is Reason.CORDONED_DEVICE


def test_a_cordoned_gpu_closes_its_mig_devices() -> None:
    of_first, of_second = mig("m0", 1, parent="GPU-0"), mig("m1", 1, parent="GPU-1")
    terms = weighed(of_first, of_second, cordoned={"GPU-0"}).devices
    assert [each.cordoned for each in terms] == [True, False]
    assert terms[0].health_detail == "its GPU, GPU-0"


def test_pods_on_a_cordoned_device_stay_charged() -> None:
    held = {"u": reservation({"A": 6 * GIB})}
    taken = shared("A", free=3, allocated=1)
    node = weighed(taken, cordoned={"A"}, reservations=held, pods=[use("u", "A")])
    (terms,) = node.devices
    assert terms.reservation_bytes == 6 * GIB
    assert terms.headroom_bytes == terms.allocatable_bytes - 6 * GIB


@pytest.mark.parametrize("cordoned", [set(), {"A"}])
def test_an_unhealthy_device_is_reported_as_unhealthy_although_it_is_cordoned(
    cordoned: set[str],
) -> None:
    (terms,) = weighed(shared("A", healthy=False), cordoned=cordoned).devices
    assert terms.unhealthy is Reason.UNHEALTHY_DEVICE
    assert not terms.cordoned
