"""Runs pods through a placement policy and reports the results.

In experiment *inflation*, which was published, pods arrive one by one and never end. A pod that
does not fit is dropped. The admitted ratio is read when the requests reach given percentages of
capacity.

In experiment *churn*, pods arrive at random times and end again. After a while, as many pods arrive
as end.

CPU, host memory and GPU models are checked as by kube-scheduler's own filters, so a policy gets
only nodes that pass."""

import heapq
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from benchmarks.packing.judge import Judge
from benchmarks.packing.workload import Ask, Demand, Node

Rows = NDArray[np.int64]
#: Index of a node, and indices of devices.
Placed = tuple[int, tuple[int, ...]]

#: Ratios of the capacity that is requested, in percent, at which the inflation is read.
READ_AT = (90, 95, 100, 130)
#: The trace is repeated until it requests this multiple of the capacity.
UNTIL = 1.3
CHURN_LOAD, CHURN_LIVES = 0.95, 3.5
#: Length of a day in mean lives, and the relative change of arrivals by day and by night.
DAY_LIVES, SWING = 0.875, 0.5


class Scheduler(Protocol):
    def choose(self, name: str, ask: Ask, offered: Rows) -> Placed | None:
        """Place a pod on one of the nodes. Return the node and the devices, or None."""

    def ended(self, name: str) -> None: ...


def share_of(ask: Ask) -> str:
    """Return the class under which a rejection is counted."""
    if not ask.gpus:
        return "cpu"
    return "share" if ask.shares else f"{ask.gpus}-gpu"


@dataclass(slots=True)
class Inflation:
    capacity: int
    #: Percentage of the capacity, rounded -> admitted percentages at the arrivals there.
    _admitted: dict[int, list[float]] = field(default_factory=dict)
    _idle: dict[int, list[float]] = field(default_factory=dict)
    rejected: Counter[str] = field(default_factory=Counter)
    overcommits: int = 0

    def note(self, arrived: float, admitted: float, idle: float) -> None:
        at = round(100 * arrived / self.capacity)
        self._admitted.setdefault(at, []).append(100 * admitted / self.capacity)
        self._idle.setdefault(at, []).append(100 * idle / self.capacity)

    def admitted(self, at: int) -> float:
        return self._read(self._admitted, at)

    def idle(self, at: int) -> float:
        return self._read(self._idle, at)

    @staticmethod
    def _read(figures: dict[int, list[float]], at: int) -> float:
        """Return the mean over the arrivals there, or the nearest if no arrival hits the
        percent."""
        nearest = min(figures, key=lambda there: (abs(there - at), there))
        return sum(figures[nearest]) / len(figures[nearest])


@dataclass(slots=True)
class Churn:
    """The result for the second half of the time."""

    capacity: int
    _time: float = 0.0
    _running: float = 0.0
    _offered: float = 0.0
    _rejected: float = 0.0
    #: Class -> number of pods, and number of rejected pods.
    by_class: dict[str, tuple[int, int]] = field(default_factory=dict)
    overcommits: int = 0

    @property
    def running(self) -> float:
        """Percentage of the capacity that running pods requested, mean over time."""
        return 100 * self._running / self._time / self.capacity

    @property
    def rejected(self) -> float:
        """Percentage of the requested amount that was rejected."""
        return 100 * self._rejected / self._offered

    def goes_by(self, since: float, until: float, running: float) -> None:
        counted = max(0.0, until - max(since, CHURN_LIVES / 2))
        self._time += counted
        self._running += counted * running

    def note(self, which: str, worth: float, admitted: bool) -> None:
        came, rejected = self.by_class.get(which, (0, 0))
        self.by_class[which] = came + 1, rejected + (not admitted)
        self._offered += worth
        self._rejected += 0 if admitted else worth


class Filters:
    """kube-scheduler's own filters: CPU, memory, model and pool."""

    def __init__(self, nodes: Sequence[Node], unshared: Sequence[int] = ()) -> None:
        self._cpu = np.array([node.cpu_milli for node in nodes], np.int64)
        self._memory = np.array([node.memory_mib for node in nodes], np.int64)
        self._models = np.array([node.model for node in nodes])
        self._unshared = np.zeros(len(nodes), np.bool_)
        self._unshared[list(unshared)] = True
        self._pools = bool(len(unshared))
        self._allowed: dict[tuple[frozenset[str], bool], NDArray[np.bool_]] = {}

    def offered(self, ask: Ask) -> Rows:
        fits = (self._cpu >= ask.cpu_milli) & (self._memory >= ask.memory_mib)
        if ask.gpus:
            fits &= self._where(ask.models, ask.gpus > 1)
        return np.flatnonzero(fits)

    def take(self, ask: Ask, node: int, sign: int = 1) -> None:
        self._cpu[node] -= sign * ask.cpu_milli
        self._memory[node] -= sign * ask.memory_mib

    def _where(self, models: frozenset[str], several: bool) -> NDArray[np.bool_]:
        key = models, several
        if key not in self._allowed:
            allowed = np.ones(len(self._models), np.bool_)
            if models:
                allowed = np.isin(self._models, sorted(models))
            if self._pools:
                allowed = allowed & (self._unshared == several)
            self._allowed[key] = allowed
        return self._allowed[key]


class Play:
    """One cluster, one scheduler, one judge."""

    def __init__(
        self, filters: Filters, demand: Demand, judge: Judge, scheduler: Scheduler
    ) -> None:
        self._filters, self._demand = filters, demand
        self._judge, self._scheduler = judge, scheduler
        #: Running pod -> its request and its node.
        self._running: dict[str, tuple[Ask, int]] = {}

    def inflate(self, asks: Sequence[Ask], order: Sequence[int]) -> Inflation:
        found = Inflation(self._demand.capacity)
        arrived = admitted = 0.0
        for number, index in enumerate(order):
            ask = asks[index]
            worth = self._demand.of(ask)
            arrived += worth
            if self._place(f"p{number}", ask) is None:
                found.rejected[share_of(ask)] += 1
            else:
                admitted += worth
            found.note(arrived, admitted, self._judge.idle)
        found.overcommits = self._judge.overcommits
        return found

    def churn(self, asks: Sequence[Ask], seed: int, daily: bool = False) -> Churn:
        """Run the churn. Lives are drawn and last one unit of time on average.

        With ``daily``, as many pods arrive on average, but more of them by day than by night.
        """
        lots = random.Random(seed)
        worth = [self._demand.of(ask) for ask in asks]
        every = sum(worth) / len(worth) / (CHURN_LOAD * self._demand.capacity)
        found = Churn(self._demand.capacity)
        #: Time at which each pod leaves, and the pod.
        leaving: list[tuple[float, str, int]] = []
        now = running = 0.0
        for number in itertools.count():
            comes = now + lots.expovariate(1 / every)
            if daily:
                # Time since the last arrival, stretched by night and shortened by day.
                comes = now + (comes - now) / (1 + SWING * math.sin(2 * math.pi * now / DAY_LIVES))
            while leaving and leaving[0][0] <= min(comes, CHURN_LIVES):
                then, name, index = heapq.heappop(leaving)
                found.goes_by(now, then, running)
                now = then
                running -= worth[index]
                self._end(name)
            found.goes_by(now, min(comes, CHURN_LIVES), running)
            now = comes
            if now >= CHURN_LIVES:
                break
            index, life, name = lots.randrange(len(asks)), lots.expovariate(1), f"p{number}"
            placed = self._place(name, asks[index])
            if placed is not None:
                running += worth[index]
                heapq.heappush(leaving, (now + life, name, index))
            if now >= CHURN_LIVES / 2:
                found.note(share_of(asks[index]), worth[index], placed is not None)
        found.overcommits = self._judge.overcommits
        return found

    def _place(self, name: str, ask: Ask) -> Placed | None:
        offered = self._filters.offered(ask)
        placed = self._scheduler.choose(name, ask, offered) if len(offered) else None
        if placed is None or not self._judge.came(name, ask, *placed):
            return None
        self._filters.take(ask, placed[0])
        self._running[name] = ask, placed[0]
        return placed

    def _end(self, name: str) -> None:
        ask, node = self._running.pop(name)
        self._judge.went(name)
        self._filters.take(ask, node, -1)
        self._scheduler.ended(name)


def shuffled(worth: Sequence[float], capacity: float, seed: int) -> Iterator[int]:
    """Yield each pod once in random order, and then some again until enough is requested."""
    lots = random.Random(seed)
    order = list(range(len(worth)))
    lots.shuffle(order)
    asked = 0.0
    for index in order:
        asked += worth[index]
        yield index
    while asked < UNTIL * capacity and any(worth):
        index = lots.randrange(len(worth))
        asked += worth[index]
        yield index
