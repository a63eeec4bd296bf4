"""The baseline: places pods by free replicas, as Kubernetes does without Headroom.

It picks the node with the largest ratio of free replicas, and breaks ties at random. This is better
than stock Kubernetes, which spreads pods by CPU and host memory and does not consider GPUs.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.demo.fleet import DemoNode
from benchmarks.demo.workload import DemoPod


@dataclass(frozen=True, slots=True)
class Outcome:
    """The result of one scheduling attempt."""

    pod: DemoPod
    #: The node that the pod was bound to, or None if the pod stays pending.
    node: str | None


class FreeReplicas:
    """Counts the free replicas of each node, as kube-scheduler's NodeResourcesFit does."""

    def __init__(self, nodes: Sequence[DemoNode]) -> None:
        self.names = [node.name for node in nodes]
        self._row_of = {name: row for row, name in enumerate(self.names)}
        self.total = np.array([n.group.shape.gpus * n.group.replicas for n in nodes], np.int64)
        self.free = self.total.copy()
        resources = np.array([node.group.resource for node in nodes])
        self._rows = {str(name): np.flatnonzero(resources == name) for name in set(resources)}

    def feasible(self, pod: DemoPod) -> NDArray[np.int64]:
        """Return the rows of nodes that have the pod's resource and enough free replicas."""
        rows = self._rows.get(pod.resource, np.empty(0, np.int64))
        return rows[self.free[rows] >= pod.devices]

    def take(self, pod: DemoPod, node: str) -> None:
        self.free[self._row_of[node]] -= pod.devices

    def give_back(self, pod: DemoPod, node: str) -> None:
        self.free[self._row_of[node]] += pod.devices


class CountingScheduler:
    """Binds pods by free replicas alone. ``seed`` decides how ties are broken."""

    def __init__(self, nodes: Sequence[DemoNode], seed: int) -> None:
        self._replicas = FreeReplicas(nodes)
        self._random = np.random.default_rng(seed)

    def schedule(self, pods: Iterable[DemoPod]) -> Iterator[Outcome]:
        """Place the pods in order. Yield one outcome for each pod."""
        for pod in pods:
            rows = self._replicas.feasible(pod)
            if not len(rows):
                yield Outcome(pod, None)
                continue
            # Counts of replicas are small, so equal ratios give equal floats.
            free_share = self._replicas.free[rows] / self._replicas.total[rows]
            row = self._random.choice(rows[free_share == free_share.max()])
            node = self._replicas.names[row]
            self._replicas.take(pod, node)
            yield Outcome(pod, node)
