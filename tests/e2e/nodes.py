"""Simulates GPU nodes as Node objects, and acts as the kubelet, the device plugin and the agent of
each node.

The demo's referee draws the device at random, and sees only which pod was bound to the node. The
real agent's code sends the status to the API server.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
from kubernetes.client import ApiClient

from agent.kube_client import of_client
from agent.kube_publisher import Held, KubernetesPublisher
from benchmarks.demo.referee import Gpu, Landed, Referee
from headroom.contract.gpunode import (
    Device,
    GPUNodeStatus,
    Plugin,
    PodUse,
    Replicas,
    SmActivity,
    Source,
)
from headroom.contract.gpunode_summary import summary_of
from headroom.contract.heartbeat import Confirmation
from headroom.contract.quantity import parse_bytes
from tests.controlplane import ControlPlane

GIB = 1 << 30
RESOURCE = "nvidia.com/gpu"
SYSTEM_NAMESPACE = "headroom-system"


@dataclass(frozen=True, slots=True)
class Shape:
    gpus: int = 1
    memory_bytes: int = 24 * GIB
    replicas: int = 8
    resource: str = RESOURCE


def node_manifest(name: str) -> dict[str, Any]:
    return {"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}}


def node_status(shape: Shape) -> dict[str, Any]:
    amounts = {
        "cpu": "128",
        "memory": "1Ti",
        "pods": "250",
        shape.resource: str(shape.gpus * shape.replicas),
    }
    return {"status": {"capacity": amounts, "allocatable": amounts}}


class Nodes:
    """All GPU nodes of one test. ``observe`` plays the kubelets and agents, and ``referee`` checks
    the result.
    """

    def __init__(self, plane: ControlPlane, names: Sequence[str], shape: Shape, seed: int) -> None:
        self._plane = plane
        self.names = tuple(names)
        self.shape = shape
        gpus = [Gpu(shape.memory_bytes, shape.replicas)] * shape.gpus
        self.referee = Referee(dict.fromkeys(names, gpus), seed)
        self._client = ApiClient(plane.configuration("agent-of-the-tests"))
        self._uses: dict[str, list[PodUse]] = {name: [] for name in names}
        #: The last report of each node's agent. ``_leases`` has the versions of the nodes' Leases.
        self._reported: dict[str, tuple[Held, GPUNodeStatus]] = {}
        self._leases: dict[str, str] = {}
        self._known: set[str] = set()
        #: Nodes whose agents report unhealthy devices.
        self.sick: set[str] = set()
        #: SM activity that the agent of each node reports. The agents of other nodes do not report
        #: it.
        self.sm_activity: dict[str, float] = {}
        #: Returns the memory that a pod's container uses. If None, a container uses its request.
        self.peak_of: Callable[[Mapping[str, Any]], int] | None = None

    def create(self) -> None:
        for name in self.names:
            manifest = node_manifest(name) | node_status(self.shape)
            made = self._plane.call("POST", "/api/v1/nodes", manifest)
            # Remove the taint that admission can add to a new node, as a kubelet would.
            if "taints" in made["spec"]:
                path, patch = f"/api/v1/nodes/{name}", {"spec": {"taints": None}}
                self._plane.call("PATCH", path, patch)

    def close(self) -> None:
        self._client.close()

    def report(self, names: Sequence[str]) -> None:
        """Send a report and a heartbeat for each of these nodes, as their agents do. Raise
        ``NotDelivered`` if a request fails.
        """
        for name in names:
            status = self._status(name, datetime.now(UTC))
            self._reported[name] = self.publisher(name).report(status), status
            self.beat([name])

    def beat(self, names: Sequence[str]) -> None:
        """Send a heartbeat for each of these nodes. Its sample is current and confirms the last
        report.
        """
        for name in names:
            now, (held, status) = datetime.now(UTC), self._reported[name]
            vouch = Confirmation(
                sampled_at=now.isoformat(),
                gpunode=held.uid,
                observed_at=status.observed_at,
                after=self._leases.get(name, ""),
            )
            self._leases[name] = self.publisher(name).heartbeat(now, vouch)

    def publisher(self, name: str) -> KubernetesPublisher:
        return KubernetesPublisher(of_client(self._client), name, SYSTEM_NAMESPACE, heartbeat_s=30)

    def observe(self, pods: Sequence[Mapping[str, Any]]) -> None:
        """End deleted pods and admit newly bound pods as the kubelets would. Then report
        the nodes.
        """
        left = self._end({pod["metadata"]["uid"] for pod in pods})
        new = {
            pod["metadata"]["uid"]: pod
            for pod in pods
            if pod["spec"].get("nodeName") in self._uses
            and pod["metadata"]["uid"] not in self._known
            and "headroom.gpu/vram" in pod["metadata"].get("annotations", {})
        }
        for uid, pod in new.items():
            self._known.add(uid)
            self.referee.bound(uid, pod["spec"]["nodeName"], 1, _request_bytes(pod))
        landed = self.referee.admit()
        for place in landed:
            self._uses[place.node].append(self._use(place, new[place.pod]))
        self.report(sorted(left | {place.node for place in landed}))

    def give(self, pod: Mapping[str, Any], index: int, used_bytes: int = 0) -> None:
        """Give the pod this device as the kubelet would. The next report shows the device and the
        used bytes.
        """
        node = pod["spec"]["nodeName"]
        self._known.add(pod["metadata"]["uid"])
        place = Landed(pod["metadata"]["uid"], node, (index,))
        self._uses[node].append(
            msgspec.structs.replace(self._use(place, pod), used_bytes=used_bytes)
        )

    def use_unasked(self, pod: Mapping[str, Any], index: int, used_bytes: int) -> None:
        """Let the pod use a device that the kubelet did not give it. The next report shows only the
        pod's UID.
        """
        node = pod["spec"]["nodeName"]
        use = PodUse(pod["metadata"]["uid"], _uuid(node, index), used_bytes=used_bytes)
        self._uses[node].append(use)

    def set_used(self, used_bytes: Mapping[str, int]) -> None:
        """Set the memory that each pod uses, by pod name. The next report shows the new values."""
        for node, uses in self._uses.items():
            self._uses[node] = [
                msgspec.structs.replace(use, used_bytes=used_bytes.get(use.name, use.used_bytes))
                for use in uses
            ]

    def take_back(self, remaining: Set[str]) -> set[str]:
        """End all pods except the remaining pods. Return the nodes of the ended pods."""
        return self._end(remaining)

    def _end(self, remaining: Set[str]) -> set[str]:
        """Free the memory of all pods except the remaining pods. Return the nodes of the ended
        pods.
        """
        left: set[str] = set()
        for node, uses in self._uses.items():
            for use in uses:
                if use.uid not in remaining:
                    self.referee.ended(use.uid)
                    left.add(node)
            self._uses[node] = [use for use in uses if use.uid in remaining]
        return left

    def _use(self, place: Landed, pod: Mapping[str, Any]) -> PodUse:
        (index,) = place.devices
        use = PodUse(
            uid=pod["metadata"]["uid"],
            device=_uuid(place.node, index),
            namespace=pod["metadata"]["namespace"],
            name=pod["metadata"]["name"],
            container="main",
            # Make a unique replica ID, because the referee only counts replicas.
            replica=f"{_uuid(place.node, index)}::{pod['metadata']['uid']}",
            used_bytes=_request_bytes(pod),
            source="test",
        )
        if self.peak_of is None:
            return use
        return msgspec.structs.replace(
            use,
            used_bytes=(peak_bytes := self.peak_of(pod)),
            peak_bytes=peak_bytes,
            started_at=datetime.now(UTC).isoformat(),
        )

    def end(self, node: str, pod: str) -> None:
        """End the pod with this name. The next report no longer shows the pod."""
        self._uses[node] = [use for use in self._uses[node] if use.name != pod]

    def status(self, name: str) -> GPUNodeStatus:
        """Return the report that the node's agent would send now."""
        return self._status(name, datetime.now(UTC))

    def _status(self, name: str, now: datetime) -> GPUNodeStatus:
        uses = self._uses[name]
        taken = Counter(use.device for use in uses if use.replica)
        used: Counter[str] = Counter()
        for use in uses:
            used[use.device] += use.used_bytes or 0
        ratio = self.sm_activity.get(name)
        sm_activity = None if ratio is None else SmActivity(ratio=ratio, source="gpm")
        devices = [
            Device(
                uuid=(uuid := _uuid(name, index)),
                index=index,
                model="NVIDIA L4",
                memory_bytes=self.shape.memory_bytes,
                reserved_bytes=0,
                used_bytes=min(used[uuid], self.shape.memory_bytes),
                unattributed_bytes=0,
                sm_activity=sm_activity,
                healthy=name not in self.sick,
                sharing="time-slicing",
                resource=self.shape.resource,
                replicas=Replicas(free=self.shape.replicas - taken[uuid], allocated=taken[uuid]),
            )
            for index in range(self.shape.gpus)
        ]
        return GPUNodeStatus(
            observed_at=now.isoformat(),
            devices=devices,
            pods=uses,
            plugin=Plugin(allocation_policy="distributed", topology_manager_policy="none"),
            sources=[Source(name="checkpoint"), Source(name="proc")],
            summary=summary_of(devices),
        )


def _uuid(node: str, index: int) -> str:
    return f"GPU-{node}-{index}"


def _request_bytes(pod: Mapping[str, Any]) -> int:
    return parse_bytes(pod["metadata"]["annotations"]["headroom.gpu/vram"])
