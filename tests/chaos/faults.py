"""Schedules the faults of a storm, and begins and ends their effects.

The schedule depends only on the seed. Every kind of fault occurs before any kind occurs twice.
Faults of one target can overlap.
"""

import contextlib
import random
import sys
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tests.chaos.audit import Finding
from tests.chaos.calls import VERBS
from tests.chaos.load import AWAY
from tests.chaos.site import CONSOLES, EXTENDERS, SCHEDULERS, WEBHOOKS, Plan, Site
from tests.e2e.cluster import GPUNODES

#: Minimum and maximum duration of each fault in seconds, by kind of target.
Kinds = Mapping[str, Mapping[str, tuple[float, float]]]
#: Faults of processes that scheduling does not need.
_APART = {
    "killed": (0.0, 15.0),
    "paused": (5.0, 90.0),
    "cut off": (5.0, 40.0),
    "slow": (10.0, 40.0),
    "flooded": (5.0, 30.0),
}
CONSOLES_AND_WEBHOOKS: Kinds = {"console": _APART, "webhook": _APART}
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
    **CONSOLES_AND_WEBHOOKS,
}
#: The targets of each kind. The targets of all other kinds are nodes.
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
    #: ``of`` is a key of ``KINDS``, and ``what`` is a fault of this kind.
    of: str
    what: str
    target: str
    #: Duration in seconds, or 0 for a fault without a duration.
    for_s: float
    #: Severity between 0 and 1.
    force: float

    @property
    def kind(self) -> str:
        return f"{self.of} {self.what}"

    @property
    def effect(self) -> str:
        """Return the effect of the fault. It is ``what``, except that some consoles and webhooks
        stall instead of being cut off.
        """
        stalls = self.of in CONSOLES_AND_WEBHOOKS and self.what == "cut off" and self.force >= 0.5
        return "stalled" if stalls else self.what

    def __str__(self) -> str:
        lasts = f" for {self.for_s:.1f} s" if self.for_s else ""
        return f"{self.at_s:7.1f} s  {self.kind}: {self.target}{lasts}, force {self.force:.2f}"


def schedule(plan: Plan, nodes: Sequence[str]) -> Iterator[Fault]:
    """Yield faults for ``lasts_s``, on average one every ``every_s``. Each fault lasts at most
    ``longest_s``.

    During the first ``alone_s``, only consoles and webhooks have faults. All of these faults end
    before other faults begin.
    """
    rng = random.Random(plan.seed)
    for begins_s, ends_s, kinds in (
        (0.0, plan.alone_s, CONSOLES_AND_WEBHOOKS),
        (plan.alone_s, plan.lasts_s, KINDS),
    ):
        every = sorted((of, what) for of, faults in kinds.items() for what in faults)
        drawn: list[tuple[str, str]] = []
        at_s = begins_s + rng.expovariate(1 / plan.every_s)
        while at_s < ends_s:
            drawn = drawn or rng.sample(every, len(every))
            of, what = drawn.pop()
            for_s = min(rng.uniform(*kinds[of][what]), plan.longest_s, ends_s - at_s)
            target = rng.choice(TARGETS.get(of, nodes))
            yield Fault(at_s, of, what, target, for_s, rng.random())
            at_s += rng.expovariate(1 / plan.every_s)


def report(line: str) -> None:
    sys.stdout.write(f"{time.strftime('%H:%M:%S')} {line}\n")
    sys.stdout.flush()


class Injector:
    """Begins and ends the faults of a schedule."""

    def __init__(self, site: Site, faults: Iterable[Fault], patience_s: float) -> None:
        """``run_alone`` extends a fault by at most ``patience_s``."""
        self._site, self._due, self._patience_s = site, deque(faults), patience_s
        self._began_s = time.monotonic()
        #: The end of each current fault on the storm's clock.
        self._ends: dict[Fault, float] = {}
        #: Number of faults of each kind that have begun.
        self.counts: Counter[str] = Counter()

    def run_until(self, ends_s: float) -> None:
        """Run the storm until this time and until all faults that are due before have begun."""
        while (now_s := self._now_s()) < ends_s or self._is_due(ends_s):
            for fault in [fault for fault, over_s in self._ends.items() if over_s <= now_s]:
                self._end(fault)
            self._begin_due(now_s)

    def run_alone(self, ends_s: float) -> Iterator[Finding]:
        """Run until this time with only faults that must not affect kube-scheduler's calls.

        Each fault is extended until a call of each verb that began after the fault has succeeded,
        because machines differ in speed. The storm's clock stands still during the extension. If no
        such call succeeds within ``patience_s``, yield a finding and begin no other fault. All
        faults have ended when this method returns.

        Faults of one webhook wait until the other webhook has none. Otherwise, no pod could be
        created while faults of both are extended, and each would wait for calls about new pods.
        """
        began_s: dict[Fault, float] = {}
        while (now_s := self._now_s()) < ends_s or self._is_due(ends_s) or self._ends:
            for fault in [fault for fault, over_s in self._ends.items() if over_s <= now_s]:
                if not self._site.verbs.succeeds_since(began_s[fault]):
                    if now_s < self._ends[fault] + self._patience_s:
                        continue
                    what = f"not a {' and a '.join(VERBS)} succeeded within {self._patience_s:g} s"
                    yield Finding("starved", f"{fault.kind}: {fault.target}", what)
                    self._due.clear()
                self._end(fault)
            for fault in self._begin_due(min(now_s, ends_s), one_webhook=True):
                began_s[fault] = time.monotonic()
        self._began_s += self._now_s() - ends_s

    def _now_s(self) -> float:
        return time.monotonic() - self._began_s

    def _begin_due(self, now_s: float, one_webhook: bool = False) -> list[Fault]:
        """Begin the faults that are due at this time, wait for a moment, and return the faults.

        With ``one_webhook``, stop at a fault of a webhook while another webhook has a fault.
        """
        begun = []
        while self._is_due(now_s) and not (one_webhook and self._affects_all(self._due[0])):
            begun.append(self._due.popleft())
            self._begin(begun[-1], self._now_s())
        self._site.supervise()
        time.sleep(0.1)
        return begun

    def _affects_all(self, fault: Fault) -> bool:
        """Return whether the other webhook has a fault now."""
        return fault.of == "webhook" and any(
            on.of == "webhook" and on.target != fault.target for on in self._ends
        )

    def _is_due(self, time_s: float) -> bool:
        return bool(self._due) and self._due[0].at_s < time_s

    def end(self) -> None:
        """End all faults immediately. No other fault begins."""
        self._due.clear()
        for fault in [*self._ends]:
            self._end(fault)

    def _begin(self, fault: Fault, now_s: float) -> None:
        report(f"begins {fault}")
        self.counts[fault.kind] += 1
        # Measure the duration from the actual start, because a busy machine may begin a fault late.
        self._ends[fault] = now_s + fault.for_s
        self._switch(fault, "begins")

    def _end(self, fault: Fault) -> None:
        del self._ends[fault]
        same = any((on.kind, on.target) == (fault.kind, fault.target) for on in self._ends)
        self._switch(fault, "goes on" if same else "ends")

    def _switch(self, fault: Fault, now: str) -> None:
        """Begin or end the effects of a fault.

        ``now`` is "begins", "ends", or "goes on" if the target still has another fault of this
        kind.
        """
        site, plane, target = self._site, self._site.plane, fault.target
        flood = f"flood-of-{target}"
        # The target's wire, clock and agent depend on all current faults of the target.
        here = {on.effect: on.force for on in self._ends if on.target == target}
        # Move the clock by up to 50 minutes in either direction.
        clock_s = (2 * here["clock moved"] - 1) * 3000.0 if "clock moved" in here else 0.0
        if target in site.wires:
            site.wires[target].faults = here
        if target in EXTENDERS:
            site.clock(target).write_text(f"{clock_s}")
        if agent := site.agents.get(target):
            agent.silent, agent.clock_s = "silent" in here, clock_s
        match fault.effect, now:
            case "killed", "begins" if plane.runs(target):
                plane.kill(target)
            case "killed", "ends" if not plane.runs(target):
                site.start_process(target)
            case "paused", "begins" if plane.runs(target):
                plane.pause(target)
            case "paused", "ends" if plane.runs(target):
                plane.resume(target)
            case "flooded", "begins" if not plane.runs(flood):
                site.start_process(flood)
            case "flooded", "ends":
                plane.kill(flood)
            case ("cut off" | "connections cut" | "watches cut") as what, "begins":
                site.wires[target].cut(watches_only=what == "watches cut")
            case "deleted", "begins":
                # Use a short timeout. While etcd is down, the API server holds this call for 30 s,
                # and all other faults would wait.
                with contextlib.suppress(*AWAY):
                    plane.call("DELETE", f"{GPUNODES}/{target}", timeout_s=1.0)
