"""One node as the doctor's rules see it, and what pods ask for that is typical."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median_low

from contract.annotations import Bytes
from contract.gpunode import GPUNodeStatus
from extender.placement.device_accounting import DeviceTerms
from extender.placement.request import VramRequest
from extender.placement.snapshot import NodeTerms
from extender.state.cluster_state import ClusterState

#: Pods of a resource from which on what they ask for says what is typical.
ENOUGH_PODS = 5


@dataclass(frozen=True, slots=True)
class Typical:
    """What the pods that ask for one resource want on each device, as far as they say."""

    pods: int
    median: int
    largest: int


@dataclass(frozen=True, slots=True)
class Look:
    """One node and what a rule may know."""

    node: NodeTerms
    annotations: Mapping[str, str]
    #: None where nothing is known of its devices.
    status: GPUNodeStatus | None
    stale: bool
    #: Its newest sign of life, before the look by so many seconds of the wall clock; None: none.
    age_s: float | None
    #: Of the doctor; empty where not known.
    version: str
    #: Resource -> what its pods ask for, and how many do not say it.
    typical: Mapping[str, Typical]
    silent: Mapping[str, int]

    @property
    def shared(self) -> list[DeviceTerms]:
        return [terms for terms in self.node.devices if terms.shared and terms.health_issue is None]

    @property
    def sliced(self) -> list[DeviceTerms]:
        return [terms for terms in self.shared if terms.device.sharing == "time-slicing"]


@dataclass(frozen=True, slots=True)
class Ask:
    resource: str
    #: None where the pod does not ask for a number of bytes.
    count_bytes: int | None
    #: Whether it, or its namespace, says how much it wants at all.
    said: bool


def asked(state: ClusterState) -> list[Ask]:
    """Of each GPU container of the pods that have not ended."""
    requests = [state.understand(pod) for pod in state.pods() if not pod.ended]
    return [
        Ask(
            ask.resource,
            ask.amount.count_bytes if isinstance(ask.amount, Bytes) else None,
            ask.source != "replica",
        )
        for request in requests
        if isinstance(request, VramRequest)
        for ask in request.containers
    ]


def typical_requests(asks: Iterable[Ask]) -> dict[str, Typical]:
    """By resource, where enough of them say it."""
    wanted: dict[str, list[int]] = {}
    for ask in asks:
        if ask.count_bytes is not None:
            wanted.setdefault(ask.resource, []).append(ask.count_bytes)
    return {
        resource: Typical(len(sizes), median_low(sizes), max(sizes))
        for resource, sizes in wanted.items()
        if len(sizes) >= ENOUGH_PODS
    }
