"""Schedulers coded here: the baselines, and ways to choose the device, by their rule.

None of them shares code with the product. What they believe of a node is what they bound there,
corrected by what its agent reports.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from benchmarks.device_truth.arrivals import Job
from benchmarks.device_truth.world import Sample, Shape


@dataclass(frozen=True, slots=True)
class Choice:
    node: int
    #: The device that the pod shall get; None where the plugin chooses.
    device: int | None = None


class Scheduler(Protocol):
    def choose(self, job: Job, nodes: Sequence[int], now_s: float) -> Choice | None:
        """Bind the pod to one of these nodes, which have a free replica, or refuse it."""

    def report(self, node: int, sample: Sample, now_s: float) -> None:
        """An agent's report arrives."""

    def ended(self, job: Job, node: int, now_s: float) -> None:
        """The API server tells that the pod has ended."""


class Counting:
    """Stock Kubernetes: the node with most free replicas, ties at random; memory unseen."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._taken = [0] * shape.nodes
        self._lots = random.Random(seed)

    def choose(self, job: Job, nodes: Sequence[int], now_s: float) -> Choice | None:
        if not nodes:
            return None
        fewest = min(self._taken[node] for node in nodes)
        node = self._lots.choice([node for node in nodes if self._taken[node] == fewest])
        self._taken[node] += 1
        return Choice(node)

    def report(self, node: int, sample: Sample, now_s: float) -> None:
        """Nobody listens."""

    def ended(self, job: Job, node: int, now_s: float) -> None:
        self._taken[node] -= 1


@dataclass
class _Belief:
    """One bound pod: where it is, or was meant to be."""

    request_bytes: int
    node: int
    device: int
    seen: bool = False


class BestFit:
    """The device with the least room that is enough; knows every bound pod and its device.

    ``obeyed``: the plugin gives that device (steered), or the pod uses it whatever the plugin gives
    (``pinned``). Otherwise the extender merely believes that the pod fits there, as those do that
    look for *some* device with room.
    """

    def __init__(self, shape: Shape, *, obeyed: bool, pinned: bool = False) -> None:
        self._shape, self._obeyed, self._pinned = shape, obeyed, pinned
        self._pods: dict[str, _Belief] = {}

    def choose(self, job: Job, nodes: Sequence[int], now_s: float) -> Choice | None:
        used, held = self._books()
        best: tuple[int, int, int] | None = None
        for node in nodes:
            for device in range(self._shape.gpus):
                left = self._shape.allocatable_bytes - used[node][device] - job.request_bytes
                place = left, node, device
                full = held[node][device] >= self._shape.replicas
                if left < 0 or (full and not self._pinned):
                    continue
                if (best is None or place < best) and self._any_order(job, node, device, used):
                    best = place
        if best is None:
            return None
        _, node, device = best
        self._pods[job.name] = _Belief(job.request_bytes, node, device)
        return Choice(node, device if self._obeyed else None)

    def report(self, node: int, sample: Sample, now_s: float) -> None:
        for name, device, _ in sample.pods:
            if belief := self._pods.get(name):
                belief.seen = True
                if not self._pinned:
                    belief.device = device

    def ended(self, job: Job, node: int, now_s: float) -> None:
        del self._pods[job.name]

    def _books(self) -> tuple[list[list[int]], list[list[int]]]:
        """By node and device: bytes, and pods."""
        used = [[0] * self._shape.gpus for _ in range(self._shape.nodes)]
        held = [[0] * self._shape.gpus for _ in range(self._shape.nodes)]
        for belief in self._pods.values():
            used[belief.node][belief.device] += belief.request_bytes
            held[belief.node][belief.device] += 1
        return used, held

    def _any_order(self, job: Job, node: int, device: int, used: list[list[int]]) -> bool:
        """Whether the devices chosen for the node's unseen pods have room in whichever order
        those are admitted: the kubelet does not say which of them it asks a device for."""
        if not self._obeyed or self._pinned:
            return True
        unseen = [b for b in self._pods.values() if b.node == node and not b.seen]
        sizes = sorted([job.request_bytes, *(b.request_bytes for b in unseen)], reverse=True)
        for each in {device, *(b.device for b in unseen)}:
            coming = [b.request_bytes for b in unseen if b.device == each]
            most = sum(sizes[: len(coming) + (each == device)])
            if used[node][each] - sum(coming) + most > self._shape.allocatable_bytes:
                return False
        return True
