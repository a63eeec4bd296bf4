"""Checks that a storm's schedule depends only on its seed and contains every kind of fault."""

import time
from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from tests.chaos.faults import (
    KINDS,
    Fault,
    Injector,
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


class OnASlowMachine(Injector):
    """Pods are created only while one webhook has no fault, and calls succeed late."""

    def __init__(self, *faults: Fault) -> None:
        calls = SimpleNamespace(succeeds_since=self.succeeds_since)
        site = SimpleNamespace(verbs=calls, supervise=lambda: None)
        super().__init__(cast(Any, site), faults, patience_s=1.0)

    def succeeds_since(self, monotonic_s: float) -> bool:
        is_late = time.monotonic() > monotonic_s + 0.3
        return is_late and len({fault.target for fault in self._ends}) < 2

    def _switch(self, fault: Fault, now: str) -> None:
        pass


def test_faults_that_are_extended_never_affect_both_webhooks() -> None:
    """Each of them would wait for calls about new pods, which no webhook admits."""
    storm = OnASlowMachine(
        Fault(0.0, "webhook", "killed", "webhook-a", 0.05, 0.5),
        Fault(0.05, "webhook", "paused", "webhook-b", 0.05, 0.5),
    )
    assert [*storm.run_alone(0.1)] == []
    assert storm.counts == {"webhook killed": 1, "webhook paused": 1}
