"""Runs arrivals through one scheduler and reports each pod's actual start to the judge.

Admission, the agent's report and the end of a bound pod each happen after a delay of their own.
"""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from benchmarks.device_truth.arrivals import Job
from benchmarks.device_truth.judge import Judge, Verdict
from benchmarks.device_truth.rules import Scheduler
from benchmarks.device_truth.world import World

#: Ratio of the shortest delay to the longest.
LEAST = 0.1
#: Seconds between two questions of a gate, and between two reconcile rounds of an extender.
KNOCK_EVERY_S, CHORES_EVERY_S = 1.0, 5.0


@dataclass(frozen=True, slots=True)
class Delays:
    """The longest delays. Each delay is drawn between a tenth of the longest and the longest."""

    #: Seconds from the bind at the API server to the kubelet's admission.
    admission_s: float = 2.0
    #: Seconds until a change on a node has reached the extender, through agent and API server.
    observation_s: float = 2.0
    #: Seconds for which a pod that fits on no node waits before it counts as rejected. It is tried
    #: again whenever the extender receives that a pod has ended.
    patience_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Played:
    verdict: Verdict
    #: Number of pods that were evicted before they started, or rejected by the kubelet. Their
    #: controllers created others.
    evictions: int
    #: Number of pods bound in the verdict's time.
    bound: int
    #: Waiting times in seconds of the bound pods that did not fit at first.
    waits_s: tuple[float, ...] = ()


class Play:
    def __init__(
        self, world: World, scheduler: Scheduler, judge: Judge, delays: Delays, seed: int
    ) -> None:
        self._world, self._scheduler, self._judge = world, scheduler, judge
        self._delays = delays
        self._lots = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._turns = itertools.count()
        #: Number of replicas of each node that kube-scheduler counts as taken.
        self._taken = [0] * world.shape.nodes
        #: Time of each node's newest sample that the scheduler has received.
        self._known_s = [0.0] * world.shape.nodes
        #: Pods on a node by name.
        self._there: dict[str, tuple[Job, int]] = {}
        #: Names of the pods that have started.
        self._started: set[str] = set()
        #: Pods that wait for memory, by name, in the order of their arrival.
        self._waiting: dict[str, Job] = {}
        #: Waiting times in seconds of the bound pods that had to wait.
        self._waits_s: list[float] = []
        self._evictions = self._bound = 0
        self._counts = False

    def run(self, jobs: Sequence[Job], since_s: float) -> Played:
        for job in jobs:
            self._at(job.at_s, partial(self._arrive, job))
        self._at(since_s, self._begin)
        self._at(0.0, self._do_chores)
        until_s = jobs[-1].at_s
        while self._events and self._events[0][0] <= until_s:
            now_s, _, event = heapq.heappop(self._events)
            event(now_s)
        return Played(
            self._judge.verdict(until_s), self._evictions, self._bound, tuple(self._waits_s)
        )

    def _begin(self, now_s: float) -> None:
        self._counts = True

    def _at(self, at_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._turns), event))

    def _after(self, now_s: float, longest_s: float, event: Callable[[float], None]) -> None:
        self._at(now_s + self._lots.uniform(LEAST, 1) * longest_s, event)

    def _arrive(self, job: Job, now_s: float) -> None:
        self._judge.offered(now_s)
        self._try(job, now_s)
        if job.name in self._waiting:
            self._at(now_s + self._delays.patience_s, partial(self._give_up, job))

    def _give_up(self, job: Job, now_s: float) -> None:
        if self._waiting.pop(job.name, None):
            self._judge.rejected(job.request_bytes, now_s)

    def _try(self, job: Job, now_s: float) -> None:
        shape = self._world.shape
        full = shape.gpus * shape.replicas
        free = [node for node, taken in enumerate(self._taken) if taken < full]
        node = self._scheduler.choose(job, free, now_s)
        if node is None:
            if now_s < job.at_s + self._delays.patience_s:
                self._waiting[job.name] = job
            else:
                self._judge.rejected(job.request_bytes, now_s)
            return
        if self._waiting.pop(job.name, None) and self._counts:
            self._waits_s.append(now_s - job.at_s)
        self._bound += self._counts
        self._taken[node] += 1
        self._after(now_s, self._delays.admission_s, partial(self._admit, job, node))

    def _admit(self, job: Job, node: int, now_s: float) -> None:
        device = self._world.admit(job, node, partial(self._scheduler.lots, node))
        self._there[job.name] = job, node
        if device is None:
            self._send_away(job.name, now_s)
            return
        self._observe(node, now_s)
        self._knock(job, node, device, now_s)

    def _knock(self, job: Job, node: int, device: int, now_s: float) -> None:
        if job.name not in self._there:
            return
        if not self._scheduler.may_start(job, node, now_s):
            self._at(now_s + KNOCK_EVERY_S, partial(self._knock, job, node, device))
            return
        self._world.start(job, node, device)
        self._started.add(job.name)
        self._judge.came(job.name, node, device, job.request_bytes, now_s)
        self._at(now_s + job.life_s, partial(self._end, job))
        self._at(now_s + self._delays.observation_s, partial(self._scheduler.started, job))

    def _do_chores(self, now_s: float) -> None:
        self._tend(now_s)
        self._at(now_s + CHORES_EVERY_S, self._do_chores)

    def _tend(self, now_s: float) -> None:
        for name in self._scheduler.tend(now_s):
            self._after(now_s, self._delays.admission_s, partial(self._send_away, name))

    def _send_away(self, name: str, now_s: float) -> None:
        """Remove the pod from its node early. Its controller creates another pod."""
        if name not in self._there:
            return  # it has ended in the meantime
        job, _ = self._there[name]
        self._evictions += self._counts
        self._leave(name, now_s)
        again = replace(job, name=f"{name}+")
        self._after(now_s, self._delays.observation_s, partial(self._try, again))

    def _end(self, job: Job, now_s: float) -> None:
        if job.name in self._there:
            self._leave(job.name, now_s)

    def _leave(self, name: str, now_s: float) -> None:
        job, node = self._there.pop(name)
        if name in self._started:
            self._started.remove(name)
            self._judge.went(name, now_s)
        self._world.end(name, node)
        self._observe(node, now_s, ended=True)
        self._after(now_s, self._delays.observation_s, partial(self._told, job, node))

    def _told(self, job: Job, node: int, now_s: float) -> None:
        self._taken[node] -= 1
        self._scheduler.ended(job, node, now_s)
        self._try_again(now_s)

    def _try_again(self, now_s: float) -> None:
        for job in list(self._waiting.values()):
            self._try(job, now_s)

    def _observe(self, node: int, now_s: float, ended: bool = False) -> None:
        """Let the agent sample after half of the delay, and the report arrive after the other half.

        If a pod has ended (``ended``), waiting pods are tried again with the report.
        """
        half_s = self._lots.uniform(LEAST, 1) * self._delays.observation_s / 2
        self._at(now_s + half_s, partial(self._look, node, half_s, ended))

    def _look(self, node: int, half_s: float, ended: bool, now_s: float) -> None:
        arrives = self._scheduler.look(node, self._world.sample(node), now_s)

        def tell(then_s: float) -> None:
            if now_s > self._known_s[node]:  # a later sample may already have arrived
                self._known_s[node] = now_s
                arrives(then_s)
                self._tend(then_s)
            if ended:
                self._try_again(then_s)

        self._at(now_s + half_s, tell)
