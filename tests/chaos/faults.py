"""The faults of a storm: a schedule, which is a pure function of the seed, and their effects.

Every kind occurs before any occurs twice. Faults of the same target can overlap.
"""

import contextlib
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.load import AWAY
from tests.chaos.site import CONSOLES, EXTENDERS, SCHEDULERS, WEBHOOKS, Plan, Site
from tests.e2e.cluster import GPUNODES

#: Kind of target -> fault -> least and most seconds.
Kinds = Mapping[str, Mapping[str, tuple[float, float]]]
_BYSTANDER = {
    "killed": (0.0, 15.0),
    "paused": (5.0, 90.0),
    "cut off": (5.0, 40.0),
    "slow": (10.0, 40.0),
    "flooded": (5.0, 30.0),
}
#: Faults of processes that take no part in scheduling.
BYSTANDERS: Kinds = {"console": _BYSTANDER, "webhook": _BYSTANDER}
_REQUESTS = (
    *("requests dropped", "answered 409", "answered 429", "answered 500", "passed on late"),
    *("done and answered 409", "done and answered 500", "done and not answered"),
)
KINDS: Kinds = {
    "extender": {
        "killed": (0.0, 15.0),
        "paused": (5.0, 90.0),
        "clock moved": (10.0, 60.0),
        "cut off": (5.0, 40.0),
        "slow": (10.0, 40.0),
        "connections cut": (0.0, 0.0),
        "watches cut": (0.0, 0.0),
        **dict.fromkeys(_REQUESTS, (10.0, 30.0)),
    },
    "scheduler": {"killed": (0.0, 10.0), "paused": (5.0, 60.0)},
    "kube-apiserver": {"killed": (0.0, 5.0)},
    "etcd": {"killed": (0.0, 5.0)},
    "agent": {"silent": (10.0, 150.0), "clock moved": (10.0, 60.0)},
    "GPUNode": {"deleted": (0.0, 0.0)},
    **BYSTANDERS,
}
#: The targets of each; those of others are nodes.
TARGETS: Mapping[str, Sequence[str]] = {
    "extender": EXTENDERS,
    "scheduler": SCHEDULERS,
    "console": CONSOLES,
    "webhook": WEBHOOKS,
    "kube-apiserver": ("kube-apiserver",),
    "etcd": ("etcd",),
}


@dataclass(frozen=True, slots=True)
class Fault:
    at_s: float
    #: A key of ``KINDS``, and a key of its faults.
    of: str
    what: str
    target: str
    #: 0: it has no duration.
    for_s: float
    #: 0..1, how bad.
    force: float

    @property
    def kind(self) -> str:
        return f"{self.of} {self.what}"

    @property
    def effect(self) -> str:
        """``what``, except that consoles and webhooks are cut off in two ways."""
        stalls = self.of in BYSTANDERS and self.what == "cut off" and self.force >= 0.5
        return "stalled" if stalls else self.what

    def __str__(self) -> str:
        lasts = f" for {self.for_s:.1f} s" if self.for_s else ""
        return f"{self.at_s:7.1f} s  {self.kind}: {self.target}{lasts}, force {self.force:.2f}"


def schedule(plan: Plan, nodes: Sequence[str]) -> Iterator[Fault]:
    """Yield faults for ``lasts_s``, one ``every_s`` on average, none longer than ``longest_s``.

    In the first ``alone_s`` only consoles and webhooks have faults; these end before the others
    begin.
    """
    lots = random.Random(plan.seed)
    for begins_s, ends_s, kinds in (
        (0.0, plan.alone_s, BYSTANDERS),
        (plan.alone_s, plan.lasts_s, KINDS),
    ):
        every = sorted((of, what) for of, faults in kinds.items() for what in faults)
        drawn: list[tuple[str, str]] = []
        at_s = begins_s + lots.expovariate(1 / plan.every_s)
        while at_s < ends_s:
            drawn = drawn or lots.sample(every, len(every))
            of, what = drawn.pop()
            for_s = min(lots.uniform(*kinds[of][what]), plan.longest_s, ends_s - at_s)
            target = lots.choice(TARGETS.get(of, nodes))
            yield Fault(at_s, of, what, target, for_s, lots.random())
            at_s += lots.expovariate(1 / plan.every_s)


def say(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


class Weather:
    """Begins and ends the faults of a schedule."""

    def __init__(self, site: Site, faults: Iterable[Fault]) -> None:
        self._site, self._due = site, deque(faults)
        self._began_s = time.monotonic()
        #: Faults that have begun -> when they end.
        self._on: dict[Fault, float] = {}
        self.happened: Counter[str] = Counter()

    def pass_until(self, ends_s: float) -> None:
        """Return at that time of the storm, when no fault from before is still to come."""
        while (now_s := time.monotonic() - self._began_s) < ends_s or self._comes_before(ends_s):
            for fault in [fault for fault, over_s in self._on.items() if over_s <= now_s]:
                self._end(fault)
            while self._comes_before(now_s):
                self._begin(self._due.popleft(), now_s)
            self._site.keep_up()
            time.sleep(0.1)

    def _comes_before(self, time_s: float) -> bool:
        return bool(self._due) and self._due[0].at_s < time_s

    def end(self) -> None:
        """End all faults at once; none begins any more."""
        self._due.clear()
        for fault in [*self._on]:
            self._end(fault)

    def _begin(self, fault: Fault, now_s: float) -> None:
        plane, proxies, target = self._site.plane, self._site.proxies, fault.target
        say(f"begins {fault}")
        self.happened[fault.kind] += 1
        # Measured from its actual start: a busy machine may begin a fault late.
        self._on[fault] = now_s + fault.for_s
        self._set(target)
        match fault.effect:
            case "killed" if plane.runs(target):
                plane.kill(target)
            case "paused" if plane.runs(target):
                plane.pause(target)
            case "flooded" if not plane.runs(f"flood-of-{target}"):
                self._site.start_process(f"flood-of-{target}")
            case "cut off" | "connections cut":
                proxies.cut(self._site.wires[target])
            case "watches cut":
                proxies.cut(self._site.wires[target], watches_only=True)
            case "deleted":
                # While etcd is down, the API server holds this call for 30 s. All other faults
                # would wait for it.
                with contextlib.suppress(*AWAY):
                    plane.call("DELETE", f"{GPUNODES}/{target}", timeout_s=1.0)

    def _end(self, fault: Fault) -> None:
        plane, target = self._site.plane, fault.target
        del self._on[fault]
        self._set(target)
        if any(on.kind == fault.kind and on.target == target for on in self._on):
            return
        match fault.what:
            case "killed" if not plane.runs(target):
                self._site.start_process(target)
            case "paused" if plane.runs(target):
                plane.resume(target)
            case "flooded":
                plane.kill(f"flood-of-{target}")

    def _set(self, target: str) -> None:
        """Set the target's wire, clock and agent according to all faults that it has now."""
        site, here = self._site, {on.effect: on.force for on in self._on if on.target == target}
        # Up to 50 minutes either way.
        clock_s = (2 * here["clock moved"] - 1) * 3000.0 if "clock moved" in here else 0.0
        if target in site.wires:
            site.wires[target].faults = here
        if target in EXTENDERS:
            site.clock(target).write_text(f"{clock_s}")
        if agent := site.agents.get(target):
            agent.silent, agent.clock_s = "silent" in here, clock_s
