"""A storm's schedule is its seed's, and every kind of fault is in it."""

from collections import Counter

from tests.chaos.storm import BYSTANDERS, KINDS, Targets, schedule
from tests.chaos.weather import LIES, wire_settings

TARGETS = Targets(("a", "b", "c"), ("s1", "s2"), tuple(f"n{n}" for n in range(9)), ("c",), ("w",))


def test_the_same_seed_is_the_same_storm() -> None:
    first = schedule(7, 600.0, TARGETS, every_s=4.0)
    assert first == schedule(7, 600.0, TARGETS, every_s=4.0)
    assert first != schedule(8, 600.0, TARGETS, every_s=4.0)


def test_all_kinds_come_equally_often_and_all_are_over_in_time() -> None:
    faults = schedule(7, 600.0, TARGETS, every_s=4.0)
    counted = Counter(fault.kind for fault in faults)
    assert counted.keys() == KINDS.keys()
    assert max(counted.values()) - min(counted.values()) <= 1
    assert all(fault.at_s + fault.for_s <= 600.0 for fault in faults)
    paused = [fault.for_s for fault in faults if fault.kind == "extender paused"]
    assert all(5.0 <= each <= 90.0 for each in paused)


def test_each_kind_befalls_its_own() -> None:
    of = {
        "extender": TARGETS.extenders,
        "scheduler": TARGETS.schedulers,
        "node": TARGETS.nodes,
        "console": TARGETS.consoles,
        "webhook": TARGETS.webhooks,
    }
    for fault in schedule(3, 600.0, TARGETS, every_s=1.0):
        whom = KINDS[fault.kind][0]
        assert fault.target in of.get(whom, ("control plane",))
        if whom == "node":
            assert not wire_settings(fault)
    assert LIES.keys() <= KINDS.keys()


def test_at_first_there_are_only_unreserved_pods() -> None:
    faults = schedule(7, 600.0, TARGETS, every_s=2.0, alone_s=100.0)
    alone = [fault for fault in faults if fault.at_s < 100.0]
    assert {fault.kind for fault in alone} == BYSTANDERS.keys()
    assert all(fault.at_s + fault.for_s <= 100.0 for fault in alone)
    assert {fault.kind for fault in faults[len(alone) :]} == KINDS.keys()
