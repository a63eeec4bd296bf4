"""Which nodes the demo has: 1,213 published ones, divided into a shared and a whole-GPU pool.

Models, counts and sizes are those of Alibaba's openb node list; the memory of the two undisclosed
models is an assumption that others published. CPU and host memory are taken to suffice.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from benchmarks.demo.referee import Gpu
from benchmarks.demo.workload import MIB, SHARED, WHOLE, Workload, apportion

#: Percent of the shared pool's memory that the sharing pods ask for together.
LOAD_PERCENT = 85
#: The most GPUs of a node that is shared by preference.
FEW_GPUS = 2
#: The plugin refuses to share a device between fewer.
FEWEST_REPLICAS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """Nodes that are alike."""

    model: str
    gpus: int
    #: Physical memory of each device.
    memory_mib: int
    nodes: int

    @property
    def node_mib(self) -> int:
        return self.gpus * self.memory_mib


PUBLISHED = (
    Shape("G2", 8, 22731, 549),
    Shape("T4", 2, 15109, 387),
    Shape("T4", 4, 15109, 17),
    Shape("G3", 8, 81251, 39),
    Shape("P100", 2, 16280, 131),
    Shape("P100", 1, 16280, 3),
    Shape("V100M32", 8, 32510, 21),
    Shape("V100M32", 4, 32510, 9),
    Shape("V100M16", 4, 16160, 28),
    Shape("V100M16", 1, 16160, 19),
    Shape("V100M16", 8, 16160, 8),
    Shape("A10", 1, 22731, 2),
)


@dataclass(frozen=True, slots=True)
class Group:
    """Nodes of one shape in one pool: an entry of the fleet file."""

    shape: Shape
    count: int
    #: Replicas per device; 1 is a whole-GPU node.
    replicas: int

    @property
    def shared(self) -> bool:
        return self.replicas > 1

    @property
    def resource(self) -> str:
        return SHARED if self.shared else WHOLE

    @property
    def names(self) -> list[str]:
        base = f"{self.shape.model.lower()}-{self.shape.gpus}x{'-shared' if self.shared else ''}"
        return [base] if self.count == 1 else [f"{base}-{i:04d}" for i in range(self.count)]

    @property
    def entry(self) -> dict[str, object]:
        entry: dict[str, object] = {
            "name": self.names[0] if self.count == 1 else self.names[0].removesuffix("-0000"),
            "count": self.count,
            "gpus": self.shape.gpus,
            "memory": f"{self.shape.memory_mib}Mi",
            "model": self.shape.model,
            "resource": self.resource,
        }
        if self.shared:
            entry |= {"sharing": "time-slicing", "replicas": self.replicas}
        return entry


@dataclass(frozen=True, slots=True)
class DemoNode:
    name: str
    group: Group


@dataclass(frozen=True, slots=True)
class Fleet:
    groups: tuple[Group, ...]

    @property
    def nodes(self) -> list[DemoNode]:
        return [DemoNode(name, group) for group in self.groups for name in group.names]

    @property
    def gpus(self) -> int:
        return sum(group.count * group.shape.gpus for group in self.groups)

    def memory_mib(self, shared: bool) -> int:
        return sum(g.count * g.shape.node_mib for g in self.groups if g.shared is shared)

    def for_referee(self) -> dict[str, list[Gpu]]:
        """What the referee may know: memory and replicas of each device, and nothing else."""
        return {
            node.name: [Gpu(node.group.shape.memory_mib * MIB, node.group.replicas)]
            * node.group.shape.gpus
            for node in self.nodes
        }

    def yaml(self) -> str:
        entries = [group.entry for group in self.groups]
        return yaml.safe_dump({"nodes": entries}, sort_keys=False)


def divide(shapes: Sequence[Shape], workload: Workload) -> Fleet:
    """Share as many nodes as make the shared pool ``LOAD_PERCENT`` asked for.

    First those with one or two GPUs, because the plugin chooses the device inside the node
    without a look at memory, so fewer is surer; and the largest model, for pods that fit nowhere
    else. Where these are not enough, the others. Within each kind, every shape gives its part.
    """
    need_mib = sum(workload.sharing_mib) * 100 // LOAD_PERCENT
    largest_mib = max(shape.memory_mib for shape in shapes)
    fit = [s.gpus <= FEW_GPUS or s.memory_mib == largest_mib for s in shapes]
    shared: dict[Shape, int] = {}
    for preferred in (True, False):
        kind = [shape for shape, is_fit in zip(shapes, fit, strict=True) if is_fit is preferred]
        kind_mib = sum(shape.nodes * shape.node_mib for shape in kind)
        taken_mib = min(need_mib, kind_mib)
        need_mib -= taken_mib
        for shape in kind:
            shared[shape] = apportion(shape.nodes, [taken_mib, kind_mib - taken_mib])[0]
    groups = []
    for shape in shapes:
        if shared[shape]:
            replicas = replicas_of(shape, workload.median_mib)
            groups.append(Group(shape, shared[shape], replicas))
        if shape.nodes > shared[shape]:
            groups.append(Group(shape, shape.nodes - shared[shape], 1))
    return Fleet(tuple(groups))


def replicas_of(shape: Shape, typical_mib: int) -> int:
    """What a careful administrator sets: as many as typical pods fit, never fewer than two."""
    return max(FEWEST_REPLICAS, shape.memory_mib // max(1, typical_mib))
