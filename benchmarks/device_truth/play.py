"""Plays arrivals against one scheduler: what is bound is admitted, observed and ends, each with
its delay, and the judge is told where pods really start."""

import heapq
import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from benchmarks.device_truth.arrivals import Job
from benchmarks.device_truth.judge import Judge, Verdict
from benchmarks.device_truth.rules import Choice, Scheduler
from benchmarks.device_truth.world import World

#: What the shortest delay is of the longest.
LEAST = 0.1
#: After how long a pod that was evicted is tried again, without the nodes it was evicted from.
BACK_OFF_S = 3.0


@dataclass(frozen=True, slots=True)
class Delays:
    """The longest that each takes; they are drawn between a tenth of that and all of it."""

    #: From the Binding to the kubelet's admission.
    admission_s: float = 2.0
    #: From what happens on a node to the extender's knowing it, by the agent and the API server.
    observation_s: float = 2.0


@dataclass(frozen=True, slots=True)
class Played:
    verdict: Verdict
    evictions: int
    #: How many pods had been bound when the verdict's time began, and in all.
    bound: int


class Play:
    """``gated``: a pod starts only on a device with room, else it is evicted. ``pinned``: it uses
    the device that was chosen, whatever replica the plugin gives it."""

    def __init__(
        self,
        world: World,
        scheduler: Scheduler,
        judge: Judge,
        delays: Delays,
        seed: int,
        *,
        gated: bool = False,
        pinned: bool = False,
    ) -> None:
        self._world, self._scheduler, self._judge = world, scheduler, judge
        self._delays, self._gated, self._pinned = delays, gated, pinned
        self._lots = random.Random(seed)
        self._events: list[tuple[float, int, Callable[[float], None]]] = []
        self._turns = itertools.count()
        #: Replicas of each node that kube-scheduler counts as taken.
        self._taken = [0] * world.shape.nodes
        #: When the sample was taken that the scheduler knows of each node.
        self._known_s = [0.0] * world.shape.nodes
        self._evictions = self._bound = 0
        self._counts = False

    def run(self, jobs: Sequence[Job], since_s: float) -> Played:
        for job in jobs:
            self._at(job.at_s, lambda now_s, job=job: self._arrive(job, now_s))  # type: ignore[misc]
        self._at(since_s, self._begin)
        until_s = jobs[-1].at_s
        while self._events and self._events[0][0] <= until_s:
            now_s, _, event = heapq.heappop(self._events)
            event(now_s)
        return Played(self._judge.verdict(until_s), self._evictions, self._bound)

    def _begin(self, now_s: float) -> None:
        self._counts = True

    def _at(self, at_s: float, event: Callable[[float], None]) -> None:
        heapq.heappush(self._events, (at_s, next(self._turns), event))

    def _after(self, now_s: float, longest_s: float, event: Callable[[float], None]) -> None:
        self._at(now_s + self._lots.uniform(LEAST, 1) * longest_s, event)

    def _arrive(self, job: Job, now_s: float) -> None:
        self._judge.offered(now_s)
        self._try(job, frozenset(), now_s)

    def _try(self, job: Job, besides: frozenset[int], now_s: float) -> None:
        shape = self._world.shape
        full = shape.gpus * shape.replicas
        free = [n for n, taken in enumerate(self._taken) if taken < full and n not in besides]
        choice = self._scheduler.choose(job, free, now_s)
        if choice is None:
            self._judge.refused(job.request_bytes, now_s)
            return
        self._bound += self._counts
        self._taken[choice.node] += 1
        self._after(
            now_s,
            self._delays.admission_s,
            lambda now_s: self._admit(job, choice, besides, now_s),
        )

    def _admit(self, job: Job, choice: Choice, besides: frozenset[int], now_s: float) -> None:
        node = choice.node
        device = self._world.admit(job, node, None if self._pinned else choice.device)
        if self._gated:
            # The ledger is told of the device before the pod may start.
            self._scheduler.report(node, self._world.sample(node), now_s)
            self._known_s[node] = now_s
            if self._world.asked_bytes(node, device) > self._world.shape.allocatable_bytes:
                self._evict(job, node, besides, now_s)
                return
        else:
            self._observe(node, now_s)
        if self._pinned:
            assert choice.device is not None
            device = choice.device
        self._judge.came(job.name, node, device, job.request_bytes, now_s)
        self._at(now_s + job.life_s, lambda now_s: self._end(job, node, now_s))

    def _evict(self, job: Job, node: int, besides: frozenset[int], now_s: float) -> None:
        self._evictions += self._counts
        self._leave(job, node, now_s)
        again = replace(job, name=f"{job.name}+")
        self._at(now_s + BACK_OFF_S, lambda now_s: self._try(again, besides | {node}, now_s))

    def _end(self, job: Job, node: int, now_s: float) -> None:
        self._judge.went(job.name, now_s)
        self._leave(job, node, now_s)

    def _leave(self, job: Job, node: int, now_s: float) -> None:
        self._world.end(job.name, node)
        self._observe(node, now_s)
        self._after(now_s, self._delays.observation_s, lambda now_s: self._told(job, node, now_s))

    def _told(self, job: Job, node: int, now_s: float) -> None:
        self._taken[node] -= 1
        self._scheduler.ended(job, node, now_s)

    def _observe(self, node: int, now_s: float) -> None:
        """Half of the delay goes by before the agent looks, and half until its report is known."""
        half_s = self._lots.uniform(LEAST, 1) * self._delays.observation_s / 2
        self._at(now_s + half_s, lambda now_s: self._look(node, half_s, now_s))

    def _look(self, node: int, half_s: float, now_s: float) -> None:
        sample = self._world.sample(node)

        def tell(then_s: float) -> None:
            if now_s > self._known_s[node]:  # a later look may have been told already
                self._known_s[node] = now_s
                self._scheduler.report(node, sample, then_s)

        self._at(now_s + half_s, tell)
