"""The demo's nodes: 1,213 nodes of a published cluster, in a shared pool and a whole-GPU pool.

Models, counts and memory sizes come from Alibaba's openb node list. For its two undisclosed models
(G2 and G3), the memory is the value that published work assumes. CPU and host memory never run out.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import yaml

from benchmarks.demo.referee import Gpu
from benchmarks.demo.workload import MIB, SHARED, WHOLE, Workload, apportion

#: The shared pool is sized so that the sharing pods request this percentage of its memory.
LOAD_PERCENT = 85
#: Nodes with at most this many GPUs are the first to be shared.
FEW_GPUS = 2
#: The device plugin rejects a time-slicing configuration with fewer replicas.
FEWEST_REPLICAS = 2


@dataclass(frozen=True, slots=True)
class Shape:
    """A number of equal nodes."""

    model: str
    #: Number of devices on each node.
    gpus: int
    #: Physical memory of each device.
    memory_mib: int
    #: Number of nodes with this shape.
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
    """The nodes of one shape in one pool, which is one entry of the fleet file."""

    shape: Shape
    #: Number of nodes in this pool. ``shape.nodes`` also counts the nodes in the other pool.
    count: int
    #: Replicas of each device; 1 on a node with whole GPUs.
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
        """Return node -> memory and replicas of each device, which is all that the referee
        needs."""
        return {
            node.name: [Gpu(node.group.shape.memory_mib * MIB, node.group.replicas)]
            * node.group.shape.gpus
            for node in self.nodes
        }

    def yaml(self) -> str:
        """Return the fleet file for ``headroom serve --embedded``."""
        entries = [group.entry for group in self.groups]
        return yaml.safe_dump({"nodes": entries}, sort_keys=False)


def divide(shapes: Sequence[Shape], workload: Workload) -> Fleet:
    """Divide the nodes into a shared pool and a whole-GPU pool.

    The shared pool gets so much memory that the sharing pods request ``LOAD_PERCENT`` of it. Nodes
    with one or two GPUs are shared first, because the plugin ignores memory when it chooses the
    device of a node. Nodes with the largest GPU follow, for pods that fit nowhere else. If these
    are not enough, other nodes are added. All shapes of a group contribute in proportion."""
    need_mib = sum(workload.sharing_mib) * 100 // LOAD_PERCENT
    largest_mib = max(shape.memory_mib for shape in shapes)
    is_preferred = [s.gpus <= FEW_GPUS or s.memory_mib == largest_mib for s in shapes]
    shared: dict[Shape, int] = {}
    for preferred in (True, False):
        chosen = [
            s for s, is_first in zip(shapes, is_preferred, strict=True) if is_first is preferred
        ]
        total_mib = sum(shape.nodes * shape.node_mib for shape in chosen)
        shared_mib = min(need_mib, total_mib)
        need_mib -= shared_mib
        for shape in chosen:
            shared[shape] = apportion(shape.nodes, [shared_mib, total_mib - shared_mib])[0]
    groups = []
    for shape in shapes:
        if shared[shape]:
            replicas = replicas_of(shape, workload.median_mib)
            groups.append(Group(shape, shared[shape], replicas))
        if shape.nodes > shared[shape]:
            groups.append(Group(shape, shape.nodes - shared[shape], 1))
    return Fleet(tuple(groups))


def replicas_of(shape: Shape, typical_mib: int) -> int:
    """Return the replicas of each device: as many as pods of ``typical_mib`` fit, but at least
    two."""
    return max(FEWEST_REPLICAS, shape.memory_mib // max(1, typical_mib))
