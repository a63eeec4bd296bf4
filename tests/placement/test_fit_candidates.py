"""Checks that candidate devices depend only on replica counts, which the plugin uses."""

from dataclasses import replace

from headroom.contract.annotations import Bytes
from headroom.contract.gpunode import Replicas
from headroom.core.placement.fit import fit
from headroom.core.placement.request import Ask, Portion
from headroom.core.placement.snapshot_builder import build
from tests.builders import GPU, device, request, reservation, shared, weighed


def could(resource: str = GPU, *devices: object, **how: object) -> list[bool]:
    snap = build([weighed(*devices, **how)])  # type: ignore[arg-type]
    asked = replace(request(), asks=(Ask(resource, 1, 1, ((Portion(Bytes(1), 1),),)),))
    found: list[bool] = fit(asked, snap, snap.rows(["n"]), 0.0).asks[0].candidates[0].tolist()
    return found


def test_every_device_with_a_free_replica_is_a_candidate() -> None:
    nearly_full = shared("b", free=1, allocated=3, used_bytes=24 << 30)
    full = shared("c", free=0, allocated=4)
    assert could(GPU, shared("a"), nearly_full, full) == [True, True, False]


def test_the_plugin_ignores_memory_health_and_plausibility() -> None:
    assert could(GPU, device("a", healthy=False), device("b", used_bytes=-1)) == [True, True]


def test_unhealthy_replicas_are_not_allocated() -> None:
    assert could(GPU, device("a", replicas=Replicas(unhealthy=1))) == [False]


def test_devices_of_other_resources_are_not_candidates() -> None:
    assert could(GPU, device("a"), device("b", resource="nvidia.com/mig-1g.5gb")) == [True, False]
    assert could("nobody.has/this", device("a")) == [False]


def test_a_device_stays_a_candidate_with_unconfirmed_pods() -> None:
    assert could(GPU, shared("a", free=1), reservations={"u": reservation({"a": 1})}) == [True]
