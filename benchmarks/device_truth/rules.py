"""Defines the interface of all schedulers that are compared, and two baselines without Headroom.

The baselines share no code with Headroom. Their view of a node is what they bound there, corrected
by the reports of its agent."""

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.device_truth.arrivals import Job
from benchmarks.device_truth.world import Sample, Shape
from tests.standin.allocations import Lots

#: Called with the time at which a report arrives.
Report = Callable[[float], None]


class Scheduler(ABC):
    """A scheduler. By default, kubelet and plugin decide everything after the bind."""

    @abstractmethod
    def choose(self, job: Job, nodes: Sequence[int], now_s: float) -> int | None:
        """Bind the pod to one of these nodes, which have a free replica. Return None to reject
        it."""

    def look(self, node: int, sample: Sample, now_s: float) -> Report:
        """Let the node's agent take a sample. Return what happens when its report arrives."""
        return lambda then_s: None

    def ended(self, job: Job, node: int, now_s: float) -> None:
        """Receive from the API server that the pod is gone."""
        return

    def lots(self, node: int, plugin: Lots) -> Lots:
        """Return what chooses the replicas when the kubelet asks for a preference."""
        return plugin

    def may_start(self, job: Job, node: int, now_s: float) -> bool:
        """Return whether an admitted pod may start. Called again until it may."""
        return True

    def started(self, job: Job, now_s: float) -> None:
        """Receive from the kubelet that the pod has started."""
        return

    def tend(self, now_s: float) -> Sequence[str]:
        """Do the work between calls. Return the names of evicted pods."""
        return ()


class Counting(Scheduler):
    """Stock Kubernetes: takes the node with the most free replicas, ties at random, and ignores
    memory."""

    def __init__(self, shape: Shape, seed: int) -> None:
        self._taken = [0] * shape.nodes
        self._lots = random.Random(seed)

    def choose(self, job: Job, nodes: Sequence[int], now_s: float) -> int | None:
        if not nodes:
            return None
        fewest = min(self._taken[node] for node in nodes)
        node = self._lots.choice([node for node in nodes if self._taken[node] == fewest])
        self._taken[node] += 1
        return node

    def ended(self, job: Job, node: int, now_s: float) -> None:
        self._taken[node] -= 1


@dataclass
class _Belief:
    """One bound pod, and where it is or is expected to appear."""

    request_bytes: int
    node: int
    device: int


class SomeDevice(Scheduler):
    """An extender that has every pod and its device, but does not model the plugin's choice.

    It takes the node with the fitting device that has the least free memory.
    """

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._pods: dict[str, _Belief] = {}

    def choose(self, job: Job, nodes: Sequence[int], now_s: float) -> int | None:
        used = [[0] * self._shape.gpus for _ in range(self._shape.nodes)]
        held = [[0] * self._shape.gpus for _ in range(self._shape.nodes)]
        for belief in self._pods.values():
            used[belief.node][belief.device] += belief.request_bytes
            held[belief.node][belief.device] += 1
        left = [
            (self._shape.allocatable_bytes - used[node][device] - job.request_bytes, node, device)
            for node in nodes
            for device in range(self._shape.gpus)
            if held[node][device] < self._shape.replicas
        ]
        best = min((place for place in left if place[0] >= 0), default=None)
        if best is None:
            return None
        _, node, device = best
        self._pods[job.name] = _Belief(job.request_bytes, node, device)
        return node

    def look(self, node: int, sample: Sample, now_s: float) -> Report:
        def arrives(then_s: float) -> None:
            for held in sample.pods:
                if belief := self._pods.get(held.name):
                    belief.device = held.device

        return arrives

    def ended(self, job: Job, node: int, now_s: float) -> None:
        del self._pods[job.name]
