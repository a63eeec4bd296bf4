"""A storm's schedule depends only on its seed and contains every kind of fault."""

from collections import Counter
from types import SimpleNamespace
from typing import Any, cast

from tests.chaos.faults import (
    CONSOLES_AND_WEBHOOKS,
    KINDS,
    TARGETS,
    Fault,
    Injector,
    Kinds,
    schedule,
)
from tests.chaos.site import Plan
from tests.reverse_proxy import Wire

NODES = [f"n{n}" for n in range(9)]


def drawn(seed: int, every_s: float = 4.0, alone_s: float = 0.0) -> list[Fault]:
    return [*schedule(Plan(seed, 600.0, alone_s=alone_s, every_s=every_s), NODES)]


def kinds(of: Kinds) -> set[str]:
    return {f"{name} {what}" for name, faults in of.items() for what in faults}


def test_the_same_seed_gives_the_same_storm() -> None:
    first = drawn(7)
    assert first == drawn(7)
    assert first != drawn(8)


def test_all_kinds_occur_equally_often_and_end_in_time() -> None:
    faults = drawn(7)
    counted = Counter(fault.kind for fault in faults)
    assert counted.keys() == kinds(KINDS)
    assert len(counted) == 32
    assert max(counted.values()) - min(counted.values()) <= 1
    assert all(fault.at_s + fault.for_s <= 600.0 for fault in faults)
    paused = [fault.for_s for fault in faults if fault.kind == "extender paused"]
    assert all(5.0 <= each <= 90.0 for each in paused)


def test_each_kind_has_its_targets() -> None:
    for fault in drawn(3, every_s=1.0):
        assert fault.target in TARGETS.get(fault.of, NODES)


def test_at_first_only_consoles_and_webhooks_have_faults() -> None:
    faults = drawn(7, every_s=2.0, alone_s=100.0)
    alone = [fault for fault in faults if fault.at_s < 100.0]
    assert {fault.kind for fault in alone} == kinds(CONSOLES_AND_WEBHOOKS)
    assert all(fault.at_s + fault.for_s <= 100.0 for fault in alone)
    assert {fault.kind for fault in faults[len(alone) :]} == kinds(KINDS)


class Calls:
    """Succeed only after they were asked for so often."""

    def __init__(self, site: Any, after: float) -> None:
        self.site, self.left = site, after
        #: Whether the fault lasted, each time.
        self.lasted: list[bool] = []

    def succeeds_since(self, monotonic_s: float) -> bool:
        self.left -= 1
        self.lasted.append("slow" in self.site.wires["console-a"].faults)
        return self.left < 0


def alone(calls_after: float, patience_s: float) -> tuple[Calls, Injector, list[str]]:
    site = SimpleNamespace(plane=None, wires={"console-a": Wire()}, agents={}, supervise=int)
    site.verbs = Calls(site, calls_after)
    # The last one is not of the time that is asked for.
    times_s = 0.0, 0.01, 0.02
    faults = [Fault(at_s, "console", "slow", "console-a", 0.01, 0.5) for at_s in times_s]
    injector = Injector(cast("Any", site), faults, patience_s)
    findings = [str(each) for each in injector.run_alone(0.02)]
    assert site.wires["console-a"].faults == {}
    return site.verbs, injector, findings


def test_a_fault_that_must_not_affect_calls_lasts_until_calls_succeed() -> None:
    calls, injector, findings = alone(3, patience_s=60.0)
    assert findings == []
    assert len(calls.lasted) > 3
    assert all(calls.lasted)
    assert injector.counts == {"console slow": 2}


def test_a_fault_beside_which_no_call_succeeds_is_found() -> None:
    calls, _, findings = alone(float("inf"), patience_s=0.0)
    what = "not a filter and a bind succeeded within 0 s"
    assert set(findings) == {f"starved: console slow: console-a: {what}"}
    assert all(calls.lasted[:1])
