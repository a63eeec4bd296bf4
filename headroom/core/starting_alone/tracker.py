"""Tracks the nodes with pods that start alone and have not started yet."""

from headroom.contract.gpunode import GPUNode
from headroom.core.tracker import Tracker


class StartingNodes(Tracker):
    """Nodes with pods that are starting alone. The thread that owns the cluster state writes, and
    any thread may read."""

    def __init__(self) -> None:
        self._nodes: dict[str, None] = {}

    def gpunode_seen(self, gpunode: GPUNode, at_s: float) -> None:
        if any(reservation.is_starting for reservation in gpunode.spec.reservations.values()):
            self._nodes[gpunode.name] = None
        else:
            self._nodes.pop(gpunode.name, None)

    def gpunode_gone(self, name: str) -> None:
        self._nodes.pop(name, None)

    def nodes(self) -> list[str]:
        return list(self._nodes)
