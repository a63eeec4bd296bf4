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
from tests.chaos.site import EXTENDERS, WIRED, Site
from tests.chaos.storm import Fault
from tests.e2e.cluster import GPUNODES

CUTS = {"connections cut": "cut", "watches cut": "cut_watches"}
LIES = {"agent overstates": "overstate", "agent forgets": "forget", "agent frozen": "freeze"}


def wire_settings(fault: Fault) -> dict[str, Any]:
    """The effect of a fault of a connection; empty for other kinds of faults."""
    often = 0.1 + 0.5 * fault.force
    slow = {"latency_s": 0.05 + 2.5 * fault.force**3}
    dark = {"refuses": True} if fault.force < 0.5 else {"holds": True}
    return {
        "extender cut off": {"refuses": True},
        "latency": slow,
        "connections dropped": {"drop_ratio": often / 2},
        "answered 409": {"answer": 409, "answer_ratio": often},
        "answered 429": {"answer": 429, "answer_ratio": often},
        "answered 500": {"answer": 500, "answer_ratio": often},
        "done and answered 409": {"after": 409, "after_ratio": often},
        "done and answered 500": {"after": 500, "after_ratio": often},
        "done and not answered": {"after": 0, "after_ratio": often},
        "console cut off": dark,
        "webhook cut off": dark,
        "console slow": slow,
        "webhook slow": slow,
        "passed on late": {"late_s": 3.0 + 40.0 * fault.force, "late_ratio": 0.2},
    }.get(fault.kind, {})


class Weather:
    def __init__(self, site: Site, faults: Iterable[Fault], say: Callable[[str], None]) -> None:
        self._site, self._say = site, say
        self._order = itertools.count()
        #: When, and whether it begins or ends.
        self._due: list[tuple[float, int, bool, Fault]] = []
        for fault in faults:
            heapq.heappush(self._due, (fault.at_s, next(self._order), True, fault))
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
                # Measured from its actual start: a busy machine may begin a fault late.
                ends_s = now_s + fault.for_s
                heapq.heappush(self._due, (ends_s, next(self._order), False, fault))
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
        """The faults of these kinds that are active for the same target."""
        return [on for on in self._on if on.target == fault.target and on.kind in kinds]

    def _begin(self, fault: Fault) -> None:
        site, target, process = self._site, fault.target, _process(fault)
        runs = process is not None and site.plane.runs(process)
        match fault.kind.rpartition(" ")[2]:
            case "killed" | "restarted" if process and runs:
                site.plane.kill(process)
            case "paused" if process and runs:
                site.plane.pause(process)
            case "flooded" if process and not runs:
                site.start_process(process)
            case "cut" if fault.kind in CUTS:
                site.wire({CUTS[fault.kind]: [target]})
            case "deleted":
                # While etcd is down, the API server holds this call for 30 s. All other faults
                # would wait for it.
                with away():
                    site.plane.call("DELETE", f"{GPUNODES}/{target}", timeout_s=1.0)
            case _ if process is None:
                self._change(fault)

    def _end(self, fault: Fault) -> None:
        site, process = self._site, _process(fault)
        if process is None:
            self._change(fault)
        elif self._others(fault, fault.kind):
            return
        elif fault.kind.endswith((" paused", " flooded")):
            if site.plane.runs(process):
                (site.plane.resume if fault.kind.endswith(" paused") else site.plane.kill)(process)
        elif not site.plane.runs(process):
            site.start_process(process)

    def _change(self, fault: Fault) -> None:
        """Make its target as all that goes on there makes it."""
        site, target = self._site, fault.target
        here = [on for on in self._on if on.target == target]
        if target in WIRED:
            settings: dict[str, Any] = {}
            for on in here:
                settings |= wire_settings(on)
            site.wire({"set": {target: settings}})
            if settings.get("refuses"):
                site.wire({"cut": [target]})
            if target not in EXTENDERS:
                return
            moved = [on for on in here if on.kind == "extender's clock moved"]
            site.clocks[target].move(_offset_s(moved[-1].force) if moved else 0.0)
            return
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


def _process(fault: Fault) -> str | None:
    """The process that the fault stops or starts; None where it is another sort of fault."""
    match fault.kind.rpartition(" ")[2]:
        case "killed" | "paused":
            return fault.target
        case "restarted":
            return {"API server restarted": "kube-apiserver"}.get(fault.kind, "etcd")
        case "flooded":
            return f"flood-of-{fault.target}"
    return None


def _offset_s(force: float) -> float:
    """Up to 50 minutes either way."""
    return (2 * force - 1) * 3000.0
