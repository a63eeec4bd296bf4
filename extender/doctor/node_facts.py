"""Facts about one node for the doctor's rules, and the typical memory requests of pods."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low

from contract.annotations import Bytes
from contract.gpunode import GPUNodeStatus
from extender.placement.device_accounting import DeviceTerms
from extender.placement.request import VramRequest
from extender.placement.snapshot import NodeTerms
from extender.state.cluster_state import ClusterState

#: Minimum number of pods of a resource whose requests are representative.
ENOUGH_PODS = 5


@dataclass(frozen=True, slots=True)
class Typical:
    """Bytes that the pods of one resource request on each device, for pods that set an amount."""

    pods: int
    median: int
    largest: int


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, and everything that a rule may use."""

    node: NodeTerms
    annotations: Mapping[str, str]
    #: None if nothing is known about its devices.
    status: GPUNodeStatus | None
    stale: bool
    #: Age of its newest report or heartbeat by wall clock, negative if it is from the future. None
    #: if there is neither.
    age_s: float | None
    #: Version of the doctor; empty if unknown.
    version: str
    #: Resource -> the requests of its pods.
    typical: Mapping[str, Typical]
    #: Resource -> number of GPU containers that request no amount of memory.
    unannotated: Mapping[str, int]

    @property
    def shared(self) -> list[DeviceTerms]:
        return [terms for terms in self.node.devices if terms.shared and terms.health_issue is None]

    @property
    def sliced(self) -> list[DeviceTerms]:
        return [terms for terms in self.shared if terms.device.sharing == "time-slicing"]


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """The request of one GPU container."""

    resource: str
    #: None if the amount is not a number of bytes.
    count_bytes: int | None
    #: Whether an annotation of the pod or of its namespace sets the amount.
    is_annotated: bool


def gpu_requests(state: ClusterState) -> list[ContainerRequest]:
    """Return the request of each GPU container, except those of pods that have ended."""
    pod_requests = [state.understand(pod) for pod in state.pods() if not pod.ended]
    return [
        ContainerRequest(
            container.resource,
            container.amount.count_bytes if isinstance(container.amount, Bytes) else None,
            container.source != "replica",
        )
        for request in pod_requests
        if isinstance(request, VramRequest)
        for container in request.containers
    ]


def typical_requests(requests: Iterable[ContainerRequest]) -> dict[str, Typical]:
    """Return the typical request of each resource that has at least ``ENOUGH_PODS`` amounts."""
    sizes_of: dict[str, list[int]] = {}
    for request in requests:
        if request.count_bytes is not None:
            sizes_of.setdefault(request.resource, []).append(request.count_bytes)
    return {
        resource: Typical(len(sizes), median_low(sizes), max(sizes))
        for resource, sizes in sizes_of.items()
        if len(sizes) >= ENOUGH_PODS
    }
