"""The faults of a storm: a schedule, which is a pure function of the seed, and their effects.

Every kind occurs before any occurs twice. Faults of the same target can overlap.
"""

import contextlib
import heapq
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tests.chaos.kubelets import AWAY
from tests.chaos.site import CONSOLES, EXTENDERS, SCHEDULERS, WEBHOOKS, Site
from tests.e2e.cluster import GPUNODES

#: Faults of processes that take no part in scheduling: kind -> target, least and most seconds.
BYSTANDERS: dict[str, tuple[str, float, float]] = {
    f"{target} {what}": (target, least_s, most_s)
    for target in ("console", "webhook")
    for what, least_s, most_s in (
        ("killed", 0.0, 15.0),
        ("paused", 5.0, 90.0),
        ("cut off", 5.0, 40.0),
        ("slow", 10.0, 40.0),
        ("flooded", 5.0, 30.0),
    )
}
KINDS: dict[str, tuple[str, float, float]] = {
    "extender killed": ("extender", 0.0, 15.0),
    "extender paused": ("extender", 5.0, 90.0),
    "extender clock moved": ("extender", 10.0, 60.0),
    "extender cut off": ("extender", 5.0, 40.0),
    "extender slow": ("extender", 10.0, 40.0),
    "connections dropped": ("extender", 10.0, 30.0),
    "connections cut": ("extender", 0.0, 0.0),
    "watches cut": ("extender", 0.0, 0.0),
    "answered 409": ("extender", 10.0, 30.0),
    "answered 429": ("extender", 10.0, 30.0),
    "answered 500": ("extender", 10.0, 30.0),
    "done and answered 409": ("extender", 10.0, 30.0),
    "done and answered 500": ("extender", 10.0, 30.0),
    "done and not answered": ("extender", 10.0, 30.0),
    "passed on late": ("extender", 10.0, 30.0),
    "scheduler killed": ("scheduler", 0.0, 10.0),
    "scheduler paused": ("scheduler", 5.0, 60.0),
    "kube-apiserver killed": ("kube-apiserver", 0.0, 5.0),
    "etcd killed": ("etcd", 0.0, 5.0),
    "agent silent": ("node", 10.0, 150.0),
    "agent clock moved": ("node", 10.0, 60.0),
    "GPUNode deleted": ("node", 0.0, 0.0),
    **BYSTANDERS,
}
CUTS = {"connections cut": "cut", "watches cut": "cut_watches"}


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    kind: str
    target: str
    #: 0: it has no duration.
    for_s: float
    #: 0..1, how bad.
    force: float

    def __str__(self) -> str:
        lasts = f" for {self.for_s:.1f} s" if self.for_s else ""
        return f"{self.at_s:7.1f} s  {self.kind}: {self.target}{lasts}, force {self.force:.2f}"


def targets(nodes: Sequence[str]) -> dict[str, Sequence[str]]:
    return {
        "extender": EXTENDERS,
        "scheduler": SCHEDULERS,
        "console": CONSOLES,
        "webhook": WEBHOOKS,
        "kube-apiserver": ("kube-apiserver",),
        "etcd": ("etcd",),
        "node": nodes,
    }


def schedule(
    seed: int,
    lasts_s: float,
    of: Mapping[str, Sequence[str]],
    *,
    every_s: float,
    longest_s: float = 150.0,
    alone_s: float = 0.0,
) -> list[Fault]:
    """Return faults for ``lasts_s``, one ``every_s`` on average, none longer than ``longest_s``.

    In the first ``alone_s`` only consoles and webhooks have faults; these end before the others
    begin.
    """
    lots = random.Random(seed)
    faults: list[Fault] = []
    for begins_s, ends_s, kinds_of in (0.0, alone_s, BYSTANDERS), (alone_s, lasts_s, KINDS):
        kinds: list[str] = []
        at_s = begins_s + lots.expovariate(1 / every_s)
        while at_s < ends_s:
            kinds = kinds or lots.sample(sorted(kinds_of), len(kinds_of))
            kind = kinds.pop()
            target, least_s, most_s = kinds_of[kind]
            for_s = min(lots.uniform(least_s, most_s), longest_s, ends_s - at_s)
            faults.append(Fault(at_s, kind, lots.choice(of[target]), for_s, lots.random()))
            at_s += lots.expovariate(1 / every_s)
    return faults


def wire_faults(fault: Fault) -> dict[str, Any]:
    """Return what a fault changes on its target's wire."""
    often = 0.1 + 0.5 * fault.force
    match fault.kind.split(" "):
        case ["extender", "cut", "off"]:
            return {"refuses": True}
        case [_, "cut", "off"]:
            return {"refuses": True} if fault.force < 0.5 else {"holds": True}
        case [_, "slow"]:
            return {"latency_s": 0.05 + 2.5 * fault.force**3}
        case ["connections", "dropped"]:
            return {"drop_ratio": often / 2}
        case ["answered", status]:
            return {"answer": int(status), "answer_ratio": often}
        case ["done", "and", "answered", status]:
            return {"after": int(status), "after_ratio": often}
        case ["done", "and", "not", "answered"]:
            return {"after": 0, "after_ratio": often}
        case ["passed", "on", "late"]:
            return {"late_s": 3.0 + 40.0 * fault.force, "late_ratio": 0.2}
    return {}


class Weather:
    """Begins and ends the faults of a schedule, at each ``step``."""

    def __init__(self, site: Site, faults: Iterable[Fault], say: Callable[[str], None]) -> None:
        self._site, self._say = site, say
        self._order = itertools.count()
        #: Time, a number that makes each entry different, whether it begins, and the fault.
        self._due = [(fault.at_s, next(self._order), True, fault) for fault in faults]
        self._on: list[Fault] = []
        self.happened: Counter[str] = Counter()

    def step(self, now_s: float) -> bool:
        """Do what is due. Return whether anything is still to come."""
        while self._due and self._due[0][0] <= now_s:
            _, _, begins, fault = heapq.heappop(self._due)
            if begins:
                self._say(f"begins {fault}")
                self.happened[fault.kind] += 1
                self._on.append(fault)
                self._apply(fault, begins=True)
                # Measured from its actual start: a busy machine may begin a fault late.
                ends_s = now_s + fault.for_s
                heapq.heappush(self._due, (ends_s, next(self._order), False, fault))
            else:
                self._on.remove(fault)
                self._apply(fault, begins=False)
        return bool(self._due)

    def end(self) -> None:
        """End all faults at once; none begins any more."""
        self._due.clear()
        while self._on:
            self._apply(self._on.pop(), begins=False)

    def _apply(self, fault: Fault, begins: bool) -> None:
        site, target, runs = self._site, fault.target, self._site.plane.runs
        goes_on = any(on.kind == fault.kind and on.target == target for on in self._on)
        flood = f"flood-of-{target}"
        match fault.kind.rpartition(" ")[2], begins:
            case "killed", True if runs(target):
                site.plane.kill(target)
            case "killed", False if not (goes_on or runs(target)):
                site.start_process(target)
            case "flooded", True if not runs(flood):
                site.start_process(flood)
            case "flooded", False if not goes_on:
                site.plane.kill(flood)
            case "paused", True if runs(target):
                site.plane.pause(target)
            case "paused", False if runs(target) and not goes_on:
                site.plane.resume(target)
            case "cut", True:
                site.control({CUTS[fault.kind]: [target]})
            case "deleted", True:
                # While etcd is down, the API server holds this call for 30 s. All other faults
                # would wait for it.
                with contextlib.suppress(*AWAY):
                    site.plane.call("DELETE", f"{GPUNODES}/{target}", timeout_s=1.0)
            case "killed" | "flooded" | "paused" | "cut" | "deleted", _:
                pass
            case _:
                self._set(target)

    def _set(self, target: str) -> None:
        """Set the target's wire, clock and agent according to all faults that it has now."""
        site, here = self._site, [on for on in self._on if on.target == target]
        moved = [on.force for on in here if on.kind.endswith(" clock moved")]
        clock_s = (2 * moved[-1] - 1) * 3000.0 if moved else 0.0  # up to 50 minutes either way
        if mood := site.agents.moods.get(target):
            mood.silent, mood.clock_s = any(on.kind == "agent silent" for on in here), clock_s
            return
        faults: dict[str, Any] = {}
        for on in here:
            faults |= wire_faults(on)
        site.control({"set": {target: faults}, "cut": [target] if faults.get("refuses") else []})
        if target in EXTENDERS:
            site.clocks[target].move(clock_s)
