"""Places pods with Headroom's own code: state, scores and ledger.

Pods that request no GPU go where Headroom asks kube-scheduler to put them. The code of extender
replica and agents is called as in ``benchmarks.device_truth``. But here nodes have many shapes, and
each pod is admitted, started and reported before the next pod arrives.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from benchmarks.device_truth.arrivals import MIB, Job
from benchmarks.device_truth.product import Product, Steered
from benchmarks.device_truth.world import RESERVED_BYTES, Shape, World
from benchmarks.packing.play import Placed, Rows
from benchmarks.packing.workload import REPLICAS, Ask, Mode, Node, device_amount
from headroom.contract.annotations import ScoringPolicy
from headroom.core.placement.policy import Rules

CHOICES: Mapping[str, type[Product]] = {
    "one-pool": Steered,
    "steered": Steered,
    "predicted": Product,
}
#: Label with the model of a node's devices.
PRODUCT = "nvidia.com/gpu.product"
POLICIES = tuple(policy.value for policy in ScoringPolicy)


@dataclass(frozen=True, slots=True)
class _Job(Job):
    whole: bool = False
    models: frozenset[str] = frozenset()

    @property
    def selector(self) -> Mapping[str, str] | None:
        """Return the selector. One value stands for an affinity to one of several models."""
        return {PRODUCT: "_".join(sorted(self.models))} if self.models else None

    @property
    def vram(self) -> str:
        return "100%" if self.whole else str(self.request_bytes)


class Headroom:
    """Headroom as a scheduler. The devices of nodes in ``unshared`` are not shared."""

    def __init__(
        self,
        nodes: Sequence[Node],
        mode: Mode,
        policy: str,
        choice: str,
        seed: int,
        unshared: Sequence[int],
    ) -> None:
        alone = set(unshared)
        #: One thousandth of a device stands for one MiB, because only proportions matter.
        self._shapes = [
            Shape(
                nodes=1,
                gpus=node.gpus,
                memory_bytes=device_amount(node, mode) * MIB + RESERVED_BYTES,
                replicas=1 if place in alone else REPLICAS,
                policy="distributed",
            )
            for place, node in enumerate(nodes)
        ]
        self._world = World(self._shapes[0], seed, self._shapes)
        self._product = CHOICES[choice](self._world, Rules(policy=ScoringPolicy(policy)))
        #: Number of replicas of each node that kube-scheduler counts as allocated.
        self._given = [0] * len(nodes)
        self._sits: dict[str, tuple[_Job, int]] = {}
        self._now_s = 0.0

    def choose(self, name: str, ask: Ask, offered: Rows) -> Placed | None:
        self._now_s += 1.0
        if not ask.gpus:
            return self._product.aside(offered.tolist(), self._now_s)[0], ()
        whole, job = ask.amount is None, self._job(name, ask)
        nodes = [place for place in offered.tolist() if self._left(place) >= ask.gpus]
        node = self._product.choose(job, nodes, self._now_s) if nodes else None
        if node is None:
            return None
        drawn = self._world.admit(job, node, lambda plugin: self._product.lots(node, plugin))
        assert drawn is not None, f"the kubelet rejects {job}"
        devices = tuple(held.device for held in self._world.given(node, name))
        if ask.gpus == 1:
            devices = (drawn,)
            size = self._shapes[node].allocatable_bytes if whole else job.request_bytes
            self._world.start(replace(job, request_bytes=size), node, devices[0])
        self._given[node] += ask.gpus
        self._sits[name] = job, node
        self._report(node)
        return node, devices

    def _job(self, name: str, ask: Ask) -> "_Job":
        size, whole = (ask.amount or 0) * MIB, ask.amount is None
        return _Job(name, size, self._now_s, 0.0, ask.gpus, whole, ask.models)

    def _left(self, node: int) -> int:
        return self._shapes[node].gpus * self._shapes[node].replicas - self._given[node]

    def ended(self, name: str) -> None:
        self._now_s += 1.0
        if name not in self._sits:
            return  # it requested no GPU
        job, node = self._sits.pop(name)
        self._given[node] -= job.count
        self._world.end(name, node)
        self._report(node)
        self._product.ended(job, node, self._now_s)

    def _report(self, node: int) -> None:
        sample = self._world.sample(node)
        self._product.look(node, sample, self._now_s)(self._now_s)
