"""Where stock Kubernetes puts a pod: on any node with enough free replicas, memory unseen.

It takes the node with the largest share of its replicas free, ties at random. That favours it: the
stock scheduler spreads by CPU and host memory, which know nothing of GPUs at all.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from benchmarks.demo.fleet import DemoNode
from benchmarks.demo.workload import DemoPod


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one attempt: the node that the pod was bound to, or None: it waits."""

    pod: DemoPod
    node: str | None


class FreeReplicas:
    """The one thing that Kubernetes itself knows: free replicas per node and resource."""

    def __init__(self, nodes: Sequence[DemoNode]) -> None:
        self.names = [node.name for node in nodes]
        self._row_of = {name: row for row, name in enumerate(self.names)}
        self.total = np.array([n.group.shape.gpus * n.group.replicas for n in nodes], np.int64)
        self.free = self.total.copy()
        resources = np.array([node.group.resource for node in nodes])
        self._rows = {str(name): np.flatnonzero(resources == name) for name in set(resources)}

    def feasible(self, pod: DemoPod) -> NDArray[np.int64]:
        """Rows of the nodes that pass the in-tree filter."""
        rows = self._rows.get(pod.resource, np.empty(0, np.int64))
        return rows[self.free[rows] >= pod.devices]

    def take(self, pod: DemoPod, node: str) -> None:
        self.free[self._row_of[node]] -= pod.devices

    def give_back(self, pod: DemoPod, node: str) -> None:
        self.free[self._row_of[node]] += pod.devices


class CountingScheduler:
    def __init__(self, nodes: Sequence[DemoNode], seed: int) -> None:
        self._replicas = FreeReplicas(nodes)
        self._random = np.random.default_rng(seed)

    def schedule(self, pods: Iterable[DemoPod]) -> Iterator[Outcome]:
        """Place the pods in their order; each outcome as soon as it is known."""
        for pod in pods:
            rows = self._replicas.feasible(pod)
            if not len(rows):
                yield Outcome(pod, None)
                continue
            # Shares of replicas, not of bytes: a float is exact enough to compare them.
            free = self._replicas.free[rows] / self._replicas.total[rows]
            row = self._random.choice(rows[free == free.max()])
            node = self._replicas.names[row]
            self._replicas.take(pod, node)
            yield Outcome(pod, node)
