"""Makes the faults of a schedule happen, and ends them; a step whenever it is asked.

Several may befall the same target at once. What is done twice is done once; what ends while another
of its kind goes on goes on.
"""

import heapq
import itertools
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from tests.chaos.kubelets import away
from tests.chaos.site import EXTENDERS, SCHEDULERS, Site
from tests.chaos.storm import Fault
from tests.e2e.cluster import GPUNODES

LIES = {"agent boasts": "boast", "agent forgets": "forget", "agent frozen": "freeze"}


def wire_settings(fault: Fault) -> dict[str, Any]:
    """What a fault of a wire makes of it; empty where it is another sort of fault."""
    often = 0.1 + 0.5 * fault.force
    return {
        "extender cut off": {"refuses": True},
        "latency": {"latency_s": 0.05 + 2.5 * fault.force**3},
        "connections dropped": {"drop_ratio": often / 2},
        "answered 409": {"answer": 409, "answer_ratio": often},
        "answered 429": {"answer": 429, "answer_ratio": often},
        "answered 500": {"answer": 500, "answer_ratio": often},
        "done and answered 409": {"after": 409, "after_ratio": often},
        "done and answered 500": {"after": 500, "after_ratio": often},
        "done and not answered": {"after": 0, "after_ratio": often},
        "passed on late": {"late_s": 3.0 + 40.0 * fault.force, "late_ratio": 0.2},
    }.get(fault.kind, {})


class Weather:
    def __init__(self, site: Site, faults: Iterable[Fault], say: Callable[[str], None]) -> None:
        self._site, self._say = site, say
        order = itertools.count()
        #: When, and whether it begins or ends.
        self._due: list[tuple[float, int, bool, Fault]] = []
        for fault in faults:
            heapq.heappush(self._due, (fault.at_s, next(order), True, fault))
            heapq.heappush(self._due, (fault.at_s + fault.for_s, next(order), False, fault))
        self._on: list[Fault] = []
        self.happened: Counter[str] = Counter()

    def step(self, now_s: float) -> bool:
        """Do what is due by then; whether anything is still to come."""
        while self._due and self._due[0][0] <= now_s:
            _, _, begins, fault = heapq.heappop(self._due)
            if begins:
                self._say(f"begins {fault}")
                self.happened[fault.kind] += 1
                self._on.append(fault)
                self._begin(fault)
            else:
                self._on.remove(fault)
                self._end(fault)
        return bool(self._due)

    def end(self) -> None:
        """It is over at once: nothing begins any more, and all that goes on ends."""
        self._due.clear()
        while self._on:
            self._end(self._on.pop())

    def _others(self, fault: Fault, *kinds: str) -> list[Fault]:
        """Of these kinds, those that go on for the same target."""
        return [on for on in self._on if on.target == fault.target and on.kind in kinds]

    def _begin(self, fault: Fault) -> None:
        site, target = self._site, fault.target
        match fault.kind:
            case "extender killed" | "scheduler killed":
                if site.plane.runs(target):
                    site.plane.kill(target)
            case "extender paused" | "scheduler paused":
                if site.plane.runs(target):
                    site.plane.pause(target)
            case "API server restarted":
                if site.plane.runs("kube-apiserver"):
                    site.plane.kill("kube-apiserver")
            case "etcd restarted":
                if site.plane.runs("etcd"):
                    site.plane.kill("etcd")
            case "connections cut":
                site.wire({"cut": [target]})
            case "watches cut":
                site.wire({"cut_watches": [target]})
            case "GPUNode deleted":
                with away():
                    site.plane.call("DELETE", f"{GPUNODES}/{target}")
            case _:
                self._change(fault)

    def _end(self, fault: Fault) -> None:
        site, target = self._site, fault.target
        match fault.kind:
            case "extender killed":
                if not self._others(fault, fault.kind) and not site.plane.runs(target):
                    site.start_extender(target)
            case "scheduler killed":
                if not self._others(fault, fault.kind) and not site.plane.runs(target):
                    site.start_scheduler(target)
            case "extender paused" | "scheduler paused":
                if not self._others(fault, fault.kind) and site.plane.runs(target):
                    site.plane.resume(target)
            case "API server restarted":
                if not self._others(fault, fault.kind) and not site.plane.runs("kube-apiserver"):
                    site.plane.spawn_apiserver()
            case "etcd restarted":
                if not self._others(fault, fault.kind) and not site.plane.runs("etcd"):
                    site.plane.spawn_etcd()
            case _:
                self._change(fault)

    def _change(self, fault: Fault) -> None:
        """Make its target as all that goes on there makes it."""
        site, target = self._site, fault.target
        here = [on for on in self._on if on.target == target]
        if target in EXTENDERS:
            settings: dict[str, Any] = {}
            for on in here:
                settings |= wire_settings(on)
            site.wire({"set": {target: settings}})
            if settings.get("refuses"):
                site.wire({"cut": [target]})
            moved = [on for on in here if on.kind == "extender's clock moved"]
            site.clocks[target].move(_offset_s(moved[-1].force) if moved else 0.0)
            return
        assert target not in SCHEDULERS
        mood = site.moods[target]
        mood.silent = any(on.kind == "agent silent" for on in here)
        lies = [LIES[on.kind] for on in here if on.kind in LIES]
        mood.lie = lies[-1] if lies else None  # type: ignore[assignment]
        moved = [on for on in here if on.kind == "agent's clock moved"]
        mood.clock_s = _offset_s(moved[-1].force) if moved else 0.0
        with site.nodes[target].lock:
            with site.books:
                site.auditor.lying(target, mood.lie is not None)
            site.look(target)


def _offset_s(force: float) -> float:
    """Up to 50 minutes either way."""
    return (2 * force - 1) * 3000.0
