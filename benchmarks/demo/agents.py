"""Simulates the agents of the demo's nodes. They report the devices that the referee gave each pod.

Each pod is assumed to use exactly the memory that it requests. A pod with whole GPUs uses all
memory of its devices."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from benchmarks.demo.fleet import DemoNode
from benchmarks.demo.referee import Landed
from benchmarks.demo.wire import Connection
from benchmarks.demo.workload import CONTAINER, MIB, NAMESPACE, DemoPod
from headroom.contract.gpunode import Device, GPUNodeStatus, Plugin, PodUse, Replicas

_PLUGIN = Plugin(
    allocation_policy="distributed", device_list_strategy="envvar", topology_manager_policy="none"
)


@dataclass(frozen=True, slots=True)
class _Report:
    """One node's report in the body of ``POST /embedded/v1/reports``."""

    node: str
    status: GPUNodeStatus


class Agents:
    """All agents of a fleet. Records the pods of each node, and reports nodes that changed."""

    def __init__(self, nodes: Sequence[DemoNode], pods: Iterable[DemoPod], debug_url: str) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._pods = {pod.name: pod for pod in pods}
        self._uses: dict[str, list[PodUse]] = {}
        self._connection = Connection(debug_url)

    def close(self) -> None:
        self._connection.close()

    def report(self, landed: Iterable[Landed]) -> None:
        """Record these admitted pods, then send one report for each of their nodes.

        Raises ``ServerFailed`` if the server rejects the reports.
        """
        changed: dict[str, None] = {}  # an ordered set
        for place in landed:
            self._record(place)
            changed[place.node] = None
        if changed:
            now = datetime.now(UTC).isoformat()
            reports = [_Report(name, self._status(name, now)) for name in changed]
            self._connection.call("/embedded/v1/reports", msgspec.json.encode(reports))

    def _record(self, place: Landed) -> None:
        group = self._nodes[place.node].group
        pod = self._pods[place.pod]
        uses = self._uses.setdefault(place.node, [])
        for index in place.devices:
            uuid = f"GPU-{place.node}-{index}"
            replicas_in_use = sum(use.device == uuid for use in uses)
            request_bytes = pod.request_bytes
            uses.append(
                PodUse(
                    uid=pod.uid,
                    device=uuid,
                    namespace=NAMESPACE,
                    name=pod.name,
                    container=CONTAINER,
                    replica=f"{uuid}::{replicas_in_use}" if group.shared else uuid,
                    used_bytes=(
                        group.shape.memory_mib * MIB if request_bytes is None else request_bytes
                    ),
                    source="demo",
                )
            )

    def _status(self, name: str, now: str) -> GPUNodeStatus:
        group = self._nodes[name].group
        uses = self._uses[name]
        replicas = Counter(use.device for use in uses)
        used_bytes: Counter[str] = Counter()
        for use in uses:
            used_bytes[use.device] += use.used_bytes or 0
        memory_bytes = group.shape.memory_mib * MIB
        devices = [
            Device(
                uuid=(uuid := f"GPU-{name}-{index}"),
                index=index,
                model=group.shape.model,
                memory_bytes=memory_bytes,
                reserved_bytes=0,
                # If the pods request more than the device has, the driver reports all of it.
                used_bytes=min(used_bytes[uuid], memory_bytes),
                unattributed_bytes=0,
                sharing="time-slicing" if group.shared else "none",
                resource=group.resource,
                replicas=Replicas(free=group.replicas - replicas[uuid], allocated=replicas[uuid]),
            )
            for index in range(group.shape.gpus)
        ]
        return GPUNodeStatus(observed_at=now, devices=devices, pods=uses, plugin=_PLUGIN)
