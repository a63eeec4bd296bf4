"""Finds the pods that have a limit of their GPU memory (``headroom.gpu/vram-limit``)."""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from headroom.contract.annotations import VRAM_LIMIT
from headroom.contract.kube import Pod
from headroom.core.cluster.cluster import Cluster
from headroom.core.overuse.limits import limits_bytes
from headroom.core.placement.device_accounting import first_of_each_memory
from headroom.core.placement.request import MemoryClass, VramRequest
from headroom.core.placement.snapshot import NodeTerms, Snapshot


@dataclass(frozen=True, slots=True)
class PodLimit:
    """The limit of a pod on a device that it holds or could get."""

    uid: str
    device: str
    limit_bytes: int
    memory_class: str


def memory_class(cluster: Cluster, pod: Pod | None) -> MemoryClass | None:
    """Return the class of a pod, or None if its request is unknown."""
    if pod is None:
        return None
    if pod.annotation(VRAM_LIMIT) is None:
        return MemoryClass.UNLIMITED
    request = cluster.understand(pod)
    return request.memory_class if isinstance(request, VramRequest) else None


def pod_limits(cluster: Cluster, node: NodeTerms) -> Iterator[PodLimit]:
    """Yield the limits of the node's pods. Pods without a limit are omitted."""
    gpunode = cluster.gpunode(node.name)
    for pod in cluster.pods_on(node.name) if gpunode else ():
        if gpunode is None or not (limits := limits_bytes(cluster, pod, gpunode, node)):
            continue
        uid, found = pod.metadata.uid, memory_class(cluster, pod)
        for terms in first_of_each_memory(node.devices):
            for holder in terms.holders:
                if holder.uid == uid and found is not None:
                    uuid = terms.device.uuid
                    limit = max(limits[uuid], holder.requested_bytes)
                    yield PodLimit(uid, uuid, limit, found.value)


def pods_by_class(cluster: Cluster, snap: Snapshot) -> Mapping[MemoryClass, int]:
    """Return the number of pods with a reservation of each class."""
    counts = Counter(dict.fromkeys(MemoryClass, 0))
    for node in snap.nodes:
        if (gpunode := cluster.gpunode(node.name)) is None:
            continue
        reservations = gpunode.spec.reservations
        counts[MemoryClass.UNLIMITED] += len(reservations)
        for pod in cluster.pods_on(node.name):
            if pod.annotation(VRAM_LIMIT) is not None and pod.metadata.uid in reservations:
                counts[memory_class(cluster, pod) or MemoryClass.UNLIMITED] += 1
                counts[MemoryClass.UNLIMITED] -= 1
    return counts
