"""Checks that a storm's schedule depends only on its seed and contains every kind of fault."""

from collections import Counter

from tests.chaos.faults import (
    KINDS,
    Fault,
    Kinds,
    schedule,
)
from tests.chaos.site import Plan

NODES = [f"n{n}" for n in range(9)]


def drawn(seed: int, every_s: float = 4.0, alone_s: float = 0.0) -> list[Fault]:
    return [*schedule(Plan(seed, 600.0, alone_s=alone_s, every_s=every_s), NODES)]


def kinds(of: Kinds) -> set[str]:
    return {f"{name} {what}" for name, faults in of.items() for what in faults}


def test_all_kinds_occur_equally_often_and_end_in_time() -> None:
    faults = drawn(7)
    counted = Counter(fault.kind for fault in faults)
    assert counted.keys() == kinds(KINDS)
    assert len(counted) == 32
    assert max(counted.values()) - min(counted.values()) <= 1
    assert all(fault.at_s + fault.for_s <= 600.0 for fault in faults)
    paused = [fault.for_s for fault in faults if fault.kind == "extender paused"]
    assert all(5.0 <= each <= 90.0 for each in paused)
