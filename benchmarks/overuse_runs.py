"""A run of ``benchmarks.overuse_kubelets``: a pod that leaks and three that do not, on one node."""

import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from benchmarks.overuse import HOSTNAME, MARGIN_BYTES, MIB
from tests.e2e.cluster import PODS, pod_manifest
from tests.e2e.nodes import GIB, RESOURCE
from tests.e2e.real import GPU_BYTES, RealCluster
from tests.e2e.test_evictions import BUDGETS

INTERVAL_S, GRACE_S = 5.0, 5.0
AGENT = (f"--interval={INTERVAL_S:g}", "--heartbeat=30")
RATES_MIB = (4, 512)
#: Seconds for which a run continues after its end was seen, because a second eviction could follow.
AFTER_S = 8.0
#: Seconds for which a pod is watched that must not be evicted.
HELD_S = 30.0
GIVEN_UP_S = 240.0
EVENTS = ("none", "agent restarts", "agent stops", "leak ends")


@dataclass
class Outcome:
    """A run, as it is written to the file."""

    seed: int
    number: int
    event: str
    budget: str
    rate_mib: float
    #: Memory that innocent pods had reserved but did not use when the pressure began.
    needed_bytes: int = 0
    #: Seconds from the pressure to the eviction; null if the pod was not evicted.
    took_s: float | None = None
    #: Whether the pod had to be evicted.
    due: bool = True
    #: Whether it would be evicted if the mode were not observe.
    would: bool = False
    wrong: list[str] = field(default_factory=list)
    #: Names of innocent pods that were out of memory.
    out_of_memory: list[str] = field(default_factory=list)


class Run:
    """One node with four pods, from their creation until they are gone."""

    def __init__(
        self, cluster: RealCluster, node: str, seed: int, number: int, observe: bool
    ) -> None:
        self._cluster, self._machine = cluster, cluster.machines[node]
        self._node = node
        chance = self._chance = random.Random(f"{seed}/{number}")
        self._uuid = self._machine.driver.gpus[0].uuid
        sizes = [chance.randint(2, 7) for _ in range(3)]
        sizes.append(24 - sum(sizes) - chance.randint(0, 1))
        chance.shuffle(sizes)
        self.names = [f"run-{seed}-{number}-{i}" for i in range(4)]
        self.leaker = chance.choice(self.names)
        low, high = np.log2(RATES_MIB)
        self._rate = 2 ** chance.uniform(low, high) * MIB
        self.outcome = Outcome(
            seed,
            number,
            chance.choices(EVENTS, (4, 2, 0, 0) if observe else (4, 2, 2, 2))[0],
            chance.choices(("none", "allows it", "forbids it"), (6, 2, 2))[0],
            round(float(self._rate) / MIB, 1),
        )
        self.outcome.due = self.outcome.budget != "forbids it" and self.outcome.event != "leak ends"
        self._observe = observe
        if observe:
            self.outcome.would, self.outcome.due = self.outcome.due, False
        self._reserved = {n: size * GIB for n, size in zip(self.names, sizes, strict=True)}
        self._used, self._goal, self._grows_s = dict[str, int](), dict[str, int](), {}
        for name, size in self._reserved.items():
            self._used[name] = int(size * (1 if name == self.leaker else chance.uniform(0.2, 1)))
            self._goal[name] = int(chance.uniform(self._used[name], size))
            self._grows_s[name] = chance.uniform(0, 40)
        unused = sum(self._reserved[n] - self._used[n] for n in self._innocent)
        spare = self._free_bytes() - max(MARGIN_BYTES, unused)
        # The pressure begins about ten seconds after the leak, even if the leak is slow.
        self._used[self.leaker] += max(0, int(spare - 10 * self._rate))
        self._began_s = self._stepped_s = 0.0
        self._pressure_s: float | None = None
        self._decided_s: float | None = None
        self._paused_until_s = 0.0
        self._event_due_s = chance.uniform(6, 22)
        self._ends_after_s = chance.uniform(0, 3)
        self._stops_s = chance.choice((12, 20, 110))
        self._event_done = self._leak_ended = False
        self._over_s: float | None = None
        #: Times at which the memory was changed, and whether there was pressure.
        self._truth: list[tuple[float, bool]] = []
        self._created_s = time.monotonic()

    @property
    def _innocent(self) -> Iterator[str]:
        return (name for name in self.names if name != self.leaker)

    def _free_bytes(self) -> int:
        return GPU_BYTES - sum(self._used.values())

    def create(self) -> None:
        chance = self._chance
        for name in chance.sample(self.names, 4):
            pod = pod_manifest(f"{self._reserved[name] // GIB}Gi")
            pod["metadata"] |= {"name": name, "labels": {"run": name}}
            pod["spec"] |= {
                "nodeSelector": {HOSTNAME: self._node},
                "terminationGracePeriodSeconds": 1,
                "containers": [
                    {
                        "name": "main",
                        "image": "none",
                        "env": [{"name": "TAKES_VRAM", "value": str(self._used[name])}],
                        "resources": {"limits": {RESOURCE: "1"}},
                    }
                ],
            }
            if chance.random() < 0.5:
                pod["spec"]["priorityClassName"] = "high"
            self._cluster.plane.call("POST", PODS, pod)
        if self.outcome.budget != "none":
            forbids = self.outcome.budget == "forbids it"
            spec = {
                "maxUnavailable": 0 if forbids else 1,
                "selector": {"matchLabels": {"run": self.leaker}},
            }
            body = {"metadata": {"name": self.leaker}, "spec": spec}
            made = self._cluster.plane.call("POST", BUDGETS, body)
            # The disruption controller would do this, but it does not run here.
            status = {
                "observedGeneration": made["metadata"]["generation"],
                "disruptionsAllowed": int(not forbids),
                "currentHealthy": 1,
                "desiredHealthy": int(forbids),
                "expectedPods": 1,
            }
            path = f"{BUDGETS}/{self.leaker}/status"
            self._cluster.plane.call("PATCH", path, {"status": status})

    def step(self, deleted_s: dict[str, float], ledger: dict[str, Any]) -> bool:
        """Change the memory up to now. Return whether the run is over.

        ``deleted_s`` maps a pod to the time at which the API server first showed it as terminating.
        ``ledger`` maps a pod's name to its reservation on the node, as last read.
        """
        now_s = time.monotonic()
        if self._began_s == 0:
            if len(ledger) == 4 and all(self._machine.runtime.running(n) for n in self.names):
                self._began_s = self._stepped_s = now_s + self._chance.uniform(0, INTERVAL_S)
            elif now_s > self._created_s + GIVEN_UP_S:
                raise RuntimeError(f"the pods of run {self.outcome.number} do not start")
            return False
        self._play(now_s)
        if self._decided_s is None and ledger.get(self.leaker, {}).get("overuse"):
            self._decided_s = now_s
        self._have_event(now_s)
        self._judge(now_s, deleted_s)
        return self._over_s is not None and now_s >= self._over_s

    def _play(self, now_s: float) -> None:
        """Let the pods allocate what they want by now, if there is enough memory."""
        if now_s < self._stepped_s:
            return
        for name in self._innocent:
            if now_s - self._began_s >= self._grows_s[name] and name in self._used:
                wanted = self._goal[name] - self._used[name]
                got = max(0, min(wanted, self._free_bytes()))
                if got < wanted:
                    self.outcome.out_of_memory.append(name)
                self._goal[name] = self._used[name] = self._used[name] + got
        if self.leaker in self._used:
            if not self._machine.runtime.running(self.leaker):
                del self._used[self.leaker]
            elif not self._leak_ended:
                leak = int(self._rate * (now_s - self._stepped_s))
                self._used[self.leaker] += max(0, min(leak, self._free_bytes()))
        self._stepped_s = now_s
        with self._machine.driver.batch():
            for name, used in self._used.items():
                for container in self._machine.runtime.running(name).values():
                    self._machine.runtime.use(container, used)
        needed = sum(self._reserved[n] - self._used[n] for n in self._innocent)
        over = self._used.get(self.leaker, 0) > self._reserved[self.leaker]
        pressed = over and self._free_bytes() < max(MARGIN_BYTES, needed)
        if pressed and self._pressure_s is None:
            self._pressure_s, self.outcome.needed_bytes = now_s, needed
        self._truth.append((now_s, pressed))

    def _have_event(self, now_s: float) -> None:
        agent = self._machine
        if self._paused_until_s and now_s >= self._paused_until_s:
            agent.resume("agent")
            self._paused_until_s = 0.0
        if self._event_done:
            return
        match self.outcome.event:
            case "agent restarts" if now_s - self._began_s >= self._event_due_s:
                agent.kill("agent")
                agent.start_agent(self._cluster.plane.kubeconfig("agent-of-the-tests"), *AGENT)
            case "agent stops" if self._decided_s is not None:
                # The pod frees its memory while no sample can show it, and reports become stale.
                agent.pause("agent")
                self._paused_until_s = now_s + self._stops_s
                self._end_leak()
                self.outcome.due = False
            case "leak ends" if self._decided_s is not None:
                if now_s - self._decided_s < self._ends_after_s:
                    return
                self._end_leak()
            case _:
                return
        self._event_done = True

    def _end_leak(self) -> None:
        self._leak_ended = True
        if self.leaker in self._used:
            self._used[self.leaker] = self._reserved[self.leaker]

    def _judge(self, now_s: float, deleted_s: dict[str, float]) -> None:
        """Record the evictions, and decide when the run is over."""
        for name in self._innocent:
            if name in deleted_s and name not in self.outcome.wrong:
                self.outcome.wrong.append(name)
        at_s = deleted_s.get(self.leaker)
        if at_s is not None and self.outcome.took_s is None and self._pressure_s is not None:
            self.outcome.took_s = round(at_s - self._pressure_s, 2)
            if not self.outcome.due or not self._was_pressed(at_s):
                self.outcome.wrong.append(self.leaker)
        if self._over_s is not None:
            return
        if self.leaker not in self._used:
            self._over_s = now_s + AFTER_S
        elif self._pressure_s is not None and not self.outcome.due and not self._paused_until_s:
            decided = self._decided_s is not None or self._observe
            if decided and (self._event_done or self.outcome.event in ("none", "agent restarts")):
                self._over_s = now_s + HELD_S
        if now_s > self._began_s + GIVEN_UP_S:
            self.outcome.wrong.append("not evicted" if self.outcome.due else "no decision")
            self._over_s = now_s

    def _was_pressed(self, at_s: float) -> bool:
        """Return whether there was pressure when the newest sample before this may have begun."""
        return any(p for s, p in self._truth if at_s - INTERVAL_S - 2 <= s <= at_s)

    def remove(self) -> None:
        if self._paused_until_s:
            self._machine.resume("agent")
        for name in self.names:
            self._cluster._unless(404, "DELETE", f"{PODS}/{name}", {})
        if self.outcome.budget != "none":
            self._cluster._unless(404, "DELETE", f"{BUDGETS}/{self.leaker}", {})

    def gone(self, pods: set[str], ledger: dict[str, Any]) -> bool:
        return not ledger and pods.isdisjoint(self.names)
