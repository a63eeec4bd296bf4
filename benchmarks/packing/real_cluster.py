"""Nodes and pods of the inflation experiment, as objects of a real API server."""

from collections.abc import Sequence
from typing import Any

from benchmarks.packing.workload import (
    REPLICAS,
    Ask,
    Node,
)
from tests.controlplane import SCHEDULER_NAME, ControlPlane
from tests.e2e.cluster import Cluster
from tests.e2e.nodes import RESOURCE, node_manifest

POOL, MODEL = "pool", "model"


class Fleetful(Cluster):
    """Nodes of the workload. The nodes in ``pools`` are unshared."""

    def __init__(self, plane: ControlPlane, nodes: Sequence[Node], pools: Sequence[int]) -> None:
        super().__init__(plane, [node.name for node in nodes])
        self.fleet, self.pools = nodes, frozenset(pools)

    def create(self) -> None:
        super().create()
        for place, node in enumerate(self.fleet):
            shares = 1 if place in self.pools else REPLICAS
            manifest = node_manifest(node.name)
            manifest["metadata"]["labels"] |= {POOL: self.pool(place), MODEL: node.model}
            manifest["metadata"]["annotations"] = {"headroom.gpu/device-choice": "steered"}
            self.plane.call("POST", "/api/v1/nodes", manifest)
            path = f"/api/v1/nodes/{node.name}"
            amounts = {
                "cpu": f"{node.cpu_milli}m",
                "memory": f"{node.memory_mib}Mi",
                "pods": "1000",
                RESOURCE: str(node.gpus * shares),
            }
            self.plane.call("PATCH", path, {"spec": {"taints": None}})
            status = {"status": {"capacity": amounts, "allocatable": amounts}}
            self.plane.call("PATCH", f"{path}/status", status)

    def pool(self, place: int) -> str:
        return "unshared" if place in self.pools else "shared"


def manifest(name: str, asked: Ask, pooled: bool) -> dict[str, Any]:
    limits = {"cpu": f"{asked.cpu_milli}m", "memory": f"{asked.memory_mib}Mi"}
    spec: dict[str, Any] = {"schedulerName": SCHEDULER_NAME}
    made: dict[str, Any] = {"metadata": {"name": name}, "spec": spec}
    if asked.gpus:
        limits[RESOURCE] = str(asked.gpus)
        vram = "100%" if asked.amount is None else f"{asked.amount}Mi"
        made["metadata"]["annotations"] = {"headroom.gpu/vram": vram}
        if pooled:
            spec["nodeSelector"] = {POOL: "unshared" if asked.gpus > 1 else "shared"}
        if asked.models:
            terms = [{"key": MODEL, "operator": "In", "values": sorted(asked.models)}]
            required = {"nodeSelectorTerms": [{"matchExpressions": terms}]}
            spec["affinity"] = {
                "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}
            }
    spec["containers"] = [{"name": "main", "image": "none", "resources": {"limits": limits}}]
    return made
