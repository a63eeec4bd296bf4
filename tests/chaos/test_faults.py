"""A storm's schedule depends only on its seed and contains every kind of fault."""

from collections import Counter

from tests.chaos.faults import BYSTANDERS, KINDS, schedule, targets, wire_faults
from tests.chaos.proxy import Faults

TARGETS = targets([f"n{n}" for n in range(9)])


def test_the_same_seed_gives_the_same_storm() -> None:
    first = schedule(7, 600.0, TARGETS, every_s=4.0)
    assert first == schedule(7, 600.0, TARGETS, every_s=4.0)
    assert first != schedule(8, 600.0, TARGETS, every_s=4.0)


def test_all_kinds_occur_equally_often_and_end_in_time() -> None:
    faults = schedule(7, 600.0, TARGETS, every_s=4.0)
    counted = Counter(fault.kind for fault in faults)
    assert counted.keys() == KINDS.keys()
    assert len(KINDS) == 32
    assert max(counted.values()) - min(counted.values()) <= 1
    assert all(fault.at_s + fault.for_s <= 600.0 for fault in faults)
    paused = [fault.for_s for fault in faults if fault.kind == "extender paused"]
    assert all(5.0 <= each <= 90.0 for each in paused)


def test_each_kind_has_its_targets() -> None:
    for fault in schedule(3, 600.0, TARGETS, every_s=1.0):
        assert fault.target in TARGETS[KINDS[fault.kind][0]]
        assert Faults(**wire_faults(fault))
        if fault.target not in TARGETS["extender"]:
            assert wire_faults(fault).keys() <= {"refuses", "holds", "latency_s"}


def test_at_first_only_bystanders_have_faults() -> None:
    faults = schedule(7, 600.0, TARGETS, every_s=2.0, alone_s=100.0)
    alone = [fault for fault in faults if fault.at_s < 100.0]
    assert {fault.kind for fault in alone} == BYSTANDERS.keys()
    assert all(fault.at_s + fault.for_s <= 100.0 for fault in alone)
    assert {fault.kind for fault in faults[len(alone) :]} == KINDS.keys()
