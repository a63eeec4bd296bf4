"""Builds the fleet: nodes of time-sliced 80 GiB GPUs, with the same number of pods on each
device."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import msgspec

from benchmarks.hotpath.bodies import GPU, names_of
from headroom.contract.annotations import VRAM
from headroom.contract.gpunode import (
    Charge,
    Device,
    GPUNode,
    GPUNodeSpec,
    GPUNodeStatus,
    Plugin,
    PodUse,
    Replicas,
    Reservation,
    Source,
)
from headroom.contract.kube import (
    Container,
    Node,
    NodeStatus,
    ObjectMeta,
    Pod,
    PodSpec,
    PodStatus,
    ResourceRequirements,
)

GIB, MIB = 1 << 30, 1 << 20
DEVICES, REPLICAS = 8, 8
DEVICE_BYTES, POD_BYTES = 80 * GIB, 8 * GIB
#: The first node has larger GPUs. It is the only node on which a pod with this request fits.
ROOMY_BYTES, ROOMY = 640 * GIB, "300Gi"
FITS_NOWHERE = "2Ti"
_MAIN = Container(name="main", resources=ResourceRequirements(limits={GPU: "1"}))


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


@dataclass(frozen=True, slots=True)
class Sitting:
    """A pod, and the device on which it is."""

    uid: str
    name: str
    device: int


class Fleet:
    def __init__(self, nodes: int, pods_per_device: int) -> None:
        self.names = names_of(nodes)
        self._per_device = pods_per_device
        self._since = now()

    def sitting(self, name: str) -> list[Sitting]:
        return [
            Sitting(f"uid-{name}-{device}-{i}", f"worker-{name}-{device}-{i}", device)
            for device in range(DEVICES)
            for i in range(self._per_device)
        ]

    def kube_node(self, name: str) -> Node:
        amounts = {GPU: str(DEVICES * REPLICAS)}
        return Node(ObjectMeta(name=name, uid=name), status=NodeStatus(allocatable=amounts))

    def kube_pods(self, name: str) -> list[Pod]:
        spec = PodSpec(containers=[_MAIN], node_name=name)
        annotations = {VRAM: f"{POD_BYTES // GIB}Gi"}
        return [
            Pod(
                ObjectMeta(
                    name=pod.name, namespace="default", uid=pod.uid, annotations=annotations
                ),
                spec,
                PodStatus(phase="Running"),
            )
            for pod in self.sitting(name)
        ]

    def gpunode(self, name: str) -> GPUNode:
        reservations = {
            pod.uid: Reservation(
                namespace="default",
                name=pod.name,
                charges=[
                    Charge(resource=GPU, count=1, candidates={_uuid(name, pod.device): POD_BYTES})
                ],
                attempt=f"0123456789ab-{pod.uid}",
                since=self._since,
            )
            for pod in self.sitting(name)
        }
        return GPUNode(
            metadata=ObjectMeta(name=name, uid=f"gpunode-{name}"),
            spec=GPUNodeSpec(initialised=True, reservations=reservations),
            status=self.status(name, 0),
        )

    def status(self, name: str, grown_bytes: int) -> GPUNodeStatus:
        """Return the report of the node's agent if each pod uses ``grown_bytes`` more."""
        used_bytes = POD_BYTES - GIB + grown_bytes
        memory_bytes = ROOMY_BYTES if name == self.names[0] else DEVICE_BYTES
        count = self._per_device
        return GPUNodeStatus(
            observed_at=now(),
            devices=[
                Device(
                    uuid=_uuid(name, i),
                    index=i,
                    model="NVIDIA A100-SXM4-80GB",
                    memory_bytes=memory_bytes,
                    reserved_bytes=GIB // 2,
                    used_bytes=count * used_bytes,
                    unattributed_bytes=0,
                    sharing="time-slicing",
                    resource=GPU,
                    replicas=Replicas(free=REPLICAS - count, allocated=count),
                )
                for i in range(DEVICES)
            ],
            pods=[
                PodUse(
                    uid=pod.uid,
                    device=_uuid(name, pod.device),
                    namespace="default",
                    name=pod.name,
                    container="main",
                    replica=f"{_uuid(name, pod.device)}::{i}",
                    used_bytes=used_bytes,
                    source="nvml",
                )
                for i, pod in enumerate(self.sitting(name))
            ],
            plugin=Plugin(allocation_policy="distributed"),
            sources=[Source(name="checkpoint"), Source(name="proc")],
        )


def _uuid(name: str, index: int) -> str:
    return f"GPU-{name}-0000-4000-8000-{index:012x}"


def encoded(gpunode: GPUNode) -> bytes:
    """Return the object as the API server sends it."""
    whole = {"apiVersion": "headroom.gpu/v1alpha1", "kind": "GPUNode"}
    return msgspec.json.encode({**whole, **msgspec.to_builtins(gpunode)})


def of_all(fleet: Fleet) -> Sequence[GPUNode]:
    return [fleet.gpunode(name) for name in fleet.names]
