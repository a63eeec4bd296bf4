"""Replays lives on machines: pods arrive when they were created, wait, run and end.

Each pod holds its peak of GPU memory from its start to its end. If its device has less free memory,
the pod runs out of memory: the replay counts this, and the pod keeps its replica without memory.
The replay counts memory itself, independently of the placement.

After each end, waiting pods are tried again in the order of their creation. Pods with equal
requests do not overtake each other, but a pod with a smaller request may overtake a larger one."""

import heapq
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from headroom.core.placement.snapshot import Rows
from headroom.planner.contention import Contention, Contentions
from headroom.planner.placers import Placer, Request, Spot
from headroom.planner.workload import Life, Machine

_UNLIMITED = np.iinfo(np.int64).max // 4


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one replay."""

    pods: int
    #: Seconds that each pod waited, in the order of the lives. Pods that never ran are left out.
    waited_s: Sequence[float]
    #: Number of pods that fit on no machine even if all machines are idle.
    never_ran: int
    out_of_memory: int
    #: Means over time of the fraction of all GPU memory in use, and of the summed SM activity per
    #: GPU. They cover the time from the first to the last arrival. If all pods arrive at once, they
    #: cover the shortest life.
    memory_ratio: float
    sm_ratio: float
    #: Maximum number of pods that ran at the same time.
    most_running: int
    contention: Contention

    #: Mean waiting times of the pods that share a GPU, and of the pods with GPUs of their own. A
    #: kind without pods is left out.
    mean_waits_s: tuple[float, ...] = ()

    @property
    def mean_wait_s(self) -> float:
        return sum(self.waited_s) / len(self.waited_s) if self.waited_s else 0.0

    def wait_s(self, quantile: float) -> float:
        """Return this quantile of the waiting times."""
        if not self.waited_s:
            return 0.0
        ordered = sorted(self.waited_s)
        return ordered[min(len(ordered) - 1, int(quantile * len(ordered)))]


class _Filters:
    """The checks of kube-scheduler that a plan models: GPU model and memory, CPU, host memory."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._cpu = _amounts([machine.cpu_milli for machine in machines])
        self._host = _amounts([machine.host_bytes for machine in machines])
        self._models = np.array([machine.model for machine in machines])
        self._gpu_bytes = np.array([machine.memory_bytes for machine in machines], np.int64)
        self._allowed: dict[tuple[frozenset[str], int], NDArray[np.bool_]] = {}

    def rows(self, request: Request) -> Rows:
        fits = (self._cpu >= request.cpu_milli) & (self._host >= request.host_bytes)
        kind = request.models, request.least_bytes
        if kind not in self._allowed:
            allowed = self._gpu_bytes >= request.least_bytes
            if request.models:
                allowed &= np.isin(self._models, sorted(request.models))
            self._allowed[kind] = allowed
        fits &= self._allowed[kind]
        return np.flatnonzero(fits)

    def take(self, request: Request, machine: int, sign: int = 1) -> None:
        self._cpu[machine] -= sign * request.cpu_milli
        self._host[machine] -= sign * request.host_bytes


def _amounts(found: Sequence[int | None]) -> NDArray[np.int64]:
    return np.array([_UNLIMITED if each is None else each for each in found], np.int64)


@dataclass(slots=True)
class _Running:
    spot: Spot
    request: Request
    #: Bytes that the pod holds on each of its devices, or 0 after it ran out of memory.
    held_bytes: int


class Replay:
    """One replay. ``requests`` has one request for each life, in the same order."""

    def __init__(
        self,
        lives: Sequence[Life],
        requests: Sequence[Request],
        machines: Sequence[Machine],
        placer: Placer,
    ) -> None:
        self._lives, self._requests, self._placer = lives, requests, placer
        self._filters = _Filters(machines)
        self._machines = machines
        self._free_bytes = [[machine.memory_bytes] * machine.devices for machine in machines]
        self._running: dict[int, _Running] = {}
        #: The future ends of running lives, as time and index of the life.
        self._ends: list[tuple[float, int]] = []
        #: The indices of the waiting lives with each request, in the order of creation.
        self._waiting: dict[Request, deque[int]] = {}
        self._waits = 0
        #: Sum of the creation times of the waiting pods.
        self._waiting_created_s = 0.0
        self._waited_s = array("d")
        self._waited_total_s = 0.0
        #: Number of pods that ran, and their total waiting time, for pods that share GPUs (True)
        #: and for the others (False).
        self._waits_by_kind: dict[bool, tuple[int, float]] = {}
        self._never = self._out_of_memory = self._most_running = 0
        self._now_s = self._until_s = 0.0
        self._used_bytes, self._used_sm = 0, 0.0
        self._contentions = Contentions([machine.sm_share for machine in machines])
        self._byte_s = self._sm_s = 0.0

    def run(self, most_wait_s: float | None = None) -> Outcome | None:
        """Run to the end. Return None as soon as the mean waiting time is certain to exceed
        ``most_wait_s``."""
        limit_s = None if most_wait_s is None else most_wait_s * len(self._lives)
        if not self._lives:
            return self._outcome()
        self._now_s, self._until_s = self._lives[0].created_s, self._lives[-1].created_s
        if self._until_s == self._now_s:  # all pods arrive at once, as in a snapshot
            self._until_s += min(life.run_s for life in self._lives)
        for index, life in enumerate(self._lives):
            if not self._run_until(life.created_s, limit_s):
                return None
            self._advance(life.created_s)
            self._arrive(index)
        if not self._run_until(float("inf"), limit_s):
            return None
        self._never += self._waits
        return self._outcome()

    def _run_until(self, until_s: float, limit_s: float | None) -> bool:
        """Process all ends up to ``until_s``. Return False if the waiting time exceeds the
        limit."""
        while self._ends and self._ends[0][0] <= until_s:
            now_s = self._ends[0][0]
            self._advance(now_s)
            while self._ends and self._ends[0][0] <= now_s:
                self._end(heapq.heappop(self._ends)[1])
            if self._waits:
                self._retry()
                if limit_s is not None and self._waits:
                    waiting_s = now_s * self._waits - self._waiting_created_s
                    if self._waited_total_s + waiting_s > limit_s:
                        return False
        return True

    def _arrive(self, index: int) -> None:
        request = self._requests[index]
        queue = self._waiting.get(request)
        if queue or not self._start(index):
            if not self._running and not queue:
                self._never += 1  # it fits nowhere, although no pod runs
                return
            self._waiting.setdefault(request, deque()).append(index)
            self._waits += 1
            self._waiting_created_s += self._lives[index].created_s

    def _retry(self) -> None:
        for request in sorted(self._waiting, key=lambda each: self._waiting[each][0]):
            queue = self._waiting[request]
            while queue and self._start(queue[0]):
                self._waits -= 1
                self._waiting_created_s -= self._lives[queue.popleft()].created_s
            if not queue:
                del self._waiting[request]

    def _start(self, index: int) -> bool:
        request, life = self._requests[index], self._lives[index]
        spot = self._place(index, request)
        if spot is None:
            return False
        self._filters.take(request, spot.machine)
        held_bytes = self._use(life, spot)
        self._running[index] = _Running(spot, request, held_bytes)
        self._most_running = max(self._most_running, len(self._running))
        self._used_sm += (life.sm_ratio or 0.0) * len(spot.devices)
        self._contentions.start(index, life, spot, self._now_s)
        waited_s = self._now_s - life.created_s
        self._waited_s.append(waited_s)
        self._waited_total_s += waited_s
        shares = request.need_bytes is not None
        pods, total_s = self._waits_by_kind.get(shares, (0, 0.0))
        self._waits_by_kind[shares] = pods + 1, total_s + waited_s
        heapq.heappush(self._ends, (self._now_s + life.run_s, index))
        return True

    def _place(self, index: int, request: Request) -> Spot | None:
        rows, life = self._filters.rows(request), self._lives[index]
        if not len(rows):
            return None
        sm_ratio, used_bytes = life.sm_ratio or 0.0, life.known_bytes or 0
        return self._placer.place(f"p{index}", request, rows, sm_ratio, used_bytes)

    def _use(self, life: Life, spot: Spot) -> int:
        """Let the pod take its peak on each device. Return the peak, or 0 if a device has less."""
        free_bytes = self._free_bytes[spot.machine]
        known_bytes = life.known_bytes
        held_bytes = self._machines[spot.machine].memory_bytes
        if known_bytes is not None:
            held_bytes = min(held_bytes, known_bytes)
        if any(free_bytes[device] < held_bytes for device in spot.devices):
            self._out_of_memory += 1
            return 0
        for device in spot.devices:
            free_bytes[device] -= held_bytes
        self._used_bytes += held_bytes * len(spot.devices)
        return held_bytes

    def _end(self, index: int) -> None:
        held = self._running.pop(index)
        self._filters.take(held.request, held.spot.machine, -1)
        if held.held_bytes:
            for device in held.spot.devices:
                self._free_bytes[held.spot.machine][device] += held.held_bytes
            self._used_bytes -= held.held_bytes * len(held.spot.devices)
        self._used_sm -= (self._lives[index].sm_ratio or 0.0) * len(held.spot.devices)
        self._contentions.end(index, held.spot, self._now_s)
        self._placer.end(f"p{index}", held.spot)

    def _advance(self, now_s: float) -> None:
        elapsed_s = min(now_s, self._until_s) - min(self._now_s, self._until_s)
        self._byte_s += elapsed_s * self._used_bytes
        self._sm_s += elapsed_s * self._used_sm
        self._now_s = now_s

    def _outcome(self) -> Outcome:
        all_bytes = sum(machine.devices * machine.memory_bytes for machine in self._machines)
        gpus = sum(machine.gpus for machine in self._machines)
        span_s = self._until_s - self._lives[0].created_s if self._lives else 0.0
        return Outcome(
            pods=len(self._lives),
            waited_s=self._waited_s,
            never_ran=self._never,
            out_of_memory=self._out_of_memory,
            memory_ratio=self._byte_s / (all_bytes * span_s) if span_s and all_bytes else 0.0,
            sm_ratio=self._sm_s / (gpus * span_s) if span_s and gpus else 0.0,
            most_running=self._most_running,
            contention=self._contentions.result(),
            mean_waits_s=tuple(total_s / pods for pods, total_s in self._waits_by_kind.values()),
        )
