"""Tests which pods must leave a device without enough memory for all of its pods."""

from typing import Any, ClassVar

import msgspec
import pytest

from headroom.core.eviction.misplaced_pods import Idle, Misplaced, misplaced, overfull
from tests.builders import GIB, device, mig, reservation, shared, terms, use
from tests.standin.plugin import Device

NOBODY = Misplaced()


def waiting(since: str = "1", **other: Any) -> Idle:
    return Idle(**({"since": since, "gated": True, "replaced": True, "marked": False} | other))


def newcomer(since: str = "1", **other: Any) -> Idle:
    return waiting(since, **({"gated": False} | other))


def found(
    idle: dict[str, Idle],
    sizes: dict[str, int],
    *devices: Device,
    on: dict[str, str] | None = None,
    used: dict[str, int] | None = None,
    leaving: frozenset[str] = frozenset(),
    may_mark: bool = True,
    namespaces: dict[str, str] | None = None,
    cordoned: frozenset[str] = frozenset(),
) -> Misplaced:
    """Return the misplaced pods. ``sizes`` are in GiB. By default, pods are on device ``a`` and in
    namespace default.
    """
    weighed = terms(
        *(devices or (shared("a", free=0, allocated=len(sizes)), shared("b"))),
        reservations={
            uid: msgspec.structs.replace(
                reservation({"a": gib * GIB, "b": gib * GIB}),
                namespace=(namespaces or {}).get(uid, "default"),
            )
            for uid, gib in sizes.items()
        },
        pods=[use(uid, (on or {}).get(uid, "a"), (used or {}).get(uid, 0)) for uid in sizes],
        cordoned=cordoned,
    )
    return misplaced(weighed, idle, leaving, may_mark)


def leave(*uids: str, stuck: tuple[str, ...] = ()) -> Misplaced:
    return Misplaced(frozenset(uids), frozenset(stuck))


def test_no_pod_leaves_if_all_fit() -> None:
    assert found({"p": waiting()}, {"p": 16, "q": 8}) == NOBODY


def test_a_gated_pod_leaves_a_device_on_which_it_does_not_fit() -> None:
    assert found({"p": waiting()}, {"p": 16, "q": 9}) == leave("p")


def test_a_pod_that_has_started_stays() -> None:
    assert found({}, {"p": 16, "q": 9}) == NOBODY


def test_the_newer_of_two_gated_pods_leaves() -> None:
    idle = {"p": waiting("1"), "q": waiting("2")}
    assert found(idle, {"p": 16, "q": 9}) == leave("q")


def test_one_pod_is_marked_at_a_time() -> None:
    idle = {uid: waiting(uid) for uid in "pqr"}
    assert found(idle, {"p": 20, "q": 20, "r": 20}) == leave("r")
    idle["r"] = waiting("r", marked=True)
    assert found(idle, {"p": 20, "q": 20, "r": 20}) == leave("q", "r")
    # The same holds for two devices.
    apart = {"p": "b", "q": "b"}
    sizes = {"p": 20, "q": 20, "r": 20, "s": 20}
    both = {uid: waiting(uid) for uid in sizes}
    assert len(found(both, sizes, on=apart).leave) == 1


def test_no_pod_is_marked_during_backoff() -> None:
    assert found({"p": waiting()}, {"p": 16, "q": 9}, may_mark=False) == NOBODY
    marked = {"p": waiting(marked=True)}
    assert found(marked, {"p": 16, "q": 9}, may_mark=False) == leave("p")


def test_a_mark_is_removed_if_the_pod_fits_again() -> None:
    assert found({"p": waiting(marked=True)}, {"p": 16, "q": 8}) == NOBODY


def test_a_marked_pod_leaves_before_a_newer_one() -> None:
    idle = {"p": waiting("1", marked=True), "q": waiting("2")}
    assert found(idle, {"p": 16, "q": 9}) == leave("p")


def test_terminating_pods_free_memory() -> None:
    sizes = {"p": 16, "q": 9}
    assert found({"p": waiting()}, sizes, leaving=frozenset("q")) == NOBODY


def test_a_pod_without_a_controller_stays_and_is_stuck() -> None:
    alone = {"p": waiting(replaced=False)}
    assert found(alone, {"p": 16, "q": 9}) == leave(stuck=("p",))
    assert found(alone, {"p": 16, "q": 8}) == NOBODY
    both = alone | {"q": waiting("2")}
    assert found(both, {"p": 16, "q": 9}) == leave("q")  # Then the other pod fits.


def test_a_new_pod_without_a_controller_is_not_evicted_and_blocks_no_pod() -> None:
    assert found({"p": newcomer(replaced=False)}, {"p": 16, "q": 9}) == NOBODY


def test_an_unreserved_pod_leaves_before_a_newer_pod() -> None:
    idle = {"p": waiting("1", granted=False), "q": waiting("2")}
    assert found(idle, {"p": 16, "q": 9}) == leave("p")
    fresh = {"p": newcomer("1", granted=False), "q": newcomer("2")}
    assert found(fresh, {"p": 16, "q": 9}) == leave("p")


class TestPodWithoutAController:
    """The author of a pod decides whether it has a controller, so this must not affect pods of
    other namespaces.
    """

    OTHERS: ClassVar = {"q": "other"}

    def test_the_pod_leaves_if_an_older_pod_of_another_namespace_waits_because_of_it(self) -> None:
        idle = {"p": waiting("2", replaced=False), "q": waiting("1")}
        assert found(idle, {"p": 16, "q": 9}) == leave("q", stuck=("p",))
        assert found(idle, {"p": 16, "q": 9}, namespaces=self.OTHERS) == leave("p")

    def test_the_pod_waits_if_the_pods_of_other_namespaces_run(self) -> None:
        idle = {"p": waiting(replaced=False)}
        assert found(idle, {"p": 16, "q": 9}, namespaces=self.OTHERS) == leave(stuck=("p",))

    def test_the_pod_leaves_without_a_gate_if_it_may_use_memory_of_another_namespace(self) -> None:
        idle = {"p": newcomer(replaced=False)}
        assert found(idle, {"p": 16, "q": 9}, namespaces=self.OTHERS) == leave("p")

    def test_the_pod_waits_on_an_unhealthy_device_whichever_pods_are_there(self) -> None:
        sick = shared("a", free=2, allocated=2, healthy=False)
        idle = {"p": waiting("2", replaced=False), "q": waiting("1")}
        expected = leave("q", stuck=("p",))
        assert found(idle, {"p": 1, "q": 1}, sick, namespaces=self.OTHERS) == expected


class TestCordonedDevice:
    CORDON = frozenset("a")

    def test_a_gated_pod_that_was_placed_elsewhere_leaves(self) -> None:
        assert found({"p": waiting()}, {"p": 1}) == NOBODY
        assert found({"p": waiting()}, {"p": 1}, cordoned=self.CORDON) == leave("p")

    def test_a_gated_pod_that_was_placed_on_the_cordoned_device_stays(self) -> None:
        placed = {"p": waiting(placed_on=frozenset("a"))}
        assert found(placed, {"p": 1}, cordoned=self.CORDON) == NOBODY

    def test_a_pod_without_a_gate_stays(self) -> None:
        assert found({"p": newcomer()}, {"p": 1}, cordoned=self.CORDON) == NOBODY

    def test_a_node_with_a_misplaced_pod_is_checked(self) -> None:
        held = {"p": reservation({"a": GIB})}
        pods = [use("p", "a")]
        assert not overfull(terms(shared("a"), reservations=held, pods=pods))
        assert overfull(terms(shared("a"), reservations=held, pods=pods, cordoned={"a"}))


@pytest.mark.parametrize("state", [{"healthy": False}, {"compute_mode": "prohibited"}])
def test_no_pod_starts_on_a_device_that_takes_no_pods(state: dict[str, Any]) -> None:
    sick = shared("a", free=3, allocated=1, **state)
    assert found({"p": waiting()}, {"p": 1}, sick) == leave("p")
    assert found({"p": newcomer()}, {"p": 1}, sick) == NOBODY  # The pod fits there.


def test_no_pod_is_evicted_from_a_device_with_implausible_values() -> None:
    odd = shared("a", free=3, allocated=1, used_bytes=48 * GIB)
    assert found({"p": waiting()}, {"p": 1}, odd) == NOBODY


@pytest.mark.parametrize(
    "devices",
    [
        pytest.param(
            (shared("a", unattributed_bytes=20 * GIB, used_bytes=20 * GIB),), id="unattributed use"
        ),
        pytest.param((shared("a"), shared("b")), id="another pod's use beyond its request"),
    ],
)
def test_measured_use_counts_if_it_exceeds_the_reservation(devices: tuple[Device, ...]) -> None:
    used = {"q": 20 * GIB} if len(devices) > 1 else {}
    assert found({"p": waiting()}, {"p": 5, "q": 1}, *devices, used=used) == leave("p")


def test_instances_that_share_memory_are_checked_together() -> None:
    both = (mig("a", 1), mig("b", 1))
    idle = {"p": waiting()}
    assert found(idle, {"p": 6, "q": 5}, *both, on={"q": "b"}) == leave("p")
    assert found(idle, {"p": 5, "q": 5}, *both, on={"q": "b"}) == NOBODY


def test_an_unconfirmed_pod_is_not_on_a_device_yet() -> None:
    weighed = terms(
        shared("a", free=3, allocated=1),
        reservations={"p": reservation({"a": 20 * GIB}), "q": reservation({"a": 20 * GIB})},
        pods=[use("p", "a", 0)],
    )
    assert not overfull(weighed)
    assert misplaced(weighed, {"p": waiting()}, frozenset(), True) == NOBODY


@pytest.mark.parametrize(
    ("of", "full"),
    [
        pytest.param(shared("a", allocated=1), True, id="overcommitted"),
        pytest.param(shared("a", allocated=1, memory_bytes=48 * GIB), False, id="it fits"),
        pytest.param(
            shared("a", allocated=1, memory_bytes=48 * GIB, healthy=False), True, id="unhealthy"
        ),
        pytest.param(
            shared("a", allocated=1, memory_bytes=48 * GIB, compute_mode="exclusive-process"),
            True,
            id="exclusive compute mode",
        ),
        pytest.param(device("b", healthy=False), False, id="unhealthy, without a pod"),
    ],
)
def test_a_node_is_checked_only_if_a_pod_may_have_to_leave(of: Device, full: bool) -> None:
    weighed = terms(of, reservations={"p": reservation({"a": 30 * GIB})}, pods=[use("p", "a", 0)])
    assert overfull(weighed) == full
