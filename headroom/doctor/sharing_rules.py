"""Rules of the doctor about settings of device plugins that make sharing unsafe or waste memory.

The figures in the messages come from docs/design/device-truth.md ("The price of safety").
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from statistics import median_low

from headroom.contract.annotations import DEFAULT_VRAM, VRAM, Bytes
from headroom.contract.gpunode import GPUNodeStatus
from headroom.contract.quantity import format_bytes
from headroom.core.cluster.cluster import Cluster
from headroom.core.placement.device_accounting import DeviceTerms
from headroom.core.placement.request import VramRequest
from headroom.core.placement.snapshot import NodeTerms
from headroom.doctor.findings import PartialFinding, Weight
from headroom.doctor.waiting_pods import Amounts

#: Minimum number of replicas that the device plugin accepts for a shared device.
FEWEST_REPLICAS = 2
#: Minimum number of GPU containers of a resource for which their requests are representative.
ENOUGH_CONTAINERS = 5


@dataclass(frozen=True, slots=True)
class Typical:
    """The GPU containers that request one resource and state their memory in bytes.

    ``small`` (the lower quartile), ``median`` and ``largest`` are the bytes that such a container
    requests on each device.
    """

    #: Number of these containers, and number of their pods.
    containers: int
    pods: int
    small: int
    median: int
    largest: int
    #: Length of the period whose decisions were read, in seconds; 0 if only existing pods count.
    span_s: float = 0.0


@dataclass(frozen=True, slots=True)
class NodeFacts:
    """One node, and all facts that a rule may use."""

    node: NodeTerms
    annotations: Mapping[str, str]
    #: The agent's report, or None if nothing is known about the node's devices.
    status: GPUNodeStatus | None
    stale: bool
    #: Age of the node's newest report or heartbeat by the wall clock. Negative if its time is in
    #: the future, and None if there is neither.
    age_s: float | None
    #: Version of the doctor; empty if unknown.
    version: str
    #: The typical requests of the existing pods for each resource. ``recent`` also counts the pods
    #: of the last hours.
    typical: Mapping[str, Typical]
    recent: Mapping[str, Typical]
    #: For each resource, the number of GPU containers that request no amount of memory.
    unannotated: Mapping[str, int]
    #: The waiting pods that may run on the node.
    waiting: Amounts

    @property
    def shared(self) -> list[DeviceTerms]:
        return [terms for terms in self.node.devices if terms.shared and terms.health_issue is None]

    @property
    def unshared(self) -> list[DeviceTerms]:
        return [
            terms for terms in self.node.devices if not terms.common and terms.health_issue is None
        ]

    @property
    def sliced(self) -> list[DeviceTerms]:
        return [terms for terms in self.shared if terms.device.sharing == "time-slicing"]


@dataclass(frozen=True, slots=True)
class ContainerRequest:
    """The request of one GPU container."""

    #: Uid of the pod.
    uid: str
    resource: str
    #: The amount in bytes, or None if the pod does not request a number of bytes.
    count_bytes: int | None
    #: Whether an annotation of the pod or of its namespace sets the amount.
    is_annotated: bool


def gpu_requests(state: Cluster) -> list[ContainerRequest]:
    """Return the request of each GPU container, except containers of pods that have ended."""
    pod_requests = [state.understand(pod) for pod in state.pods() if not pod.ended]
    return [
        ContainerRequest(
            request.uid,
            container.resource,
            container.amount.count_bytes if isinstance(container.amount, Bytes) else None,
            container.source != "replica",
        )
        for request in pod_requests
        if isinstance(request, VramRequest)
        for container in request.containers
    ]


def typical_requests(
    requests: Iterable[ContainerRequest], span_s: float = 0.0
) -> dict[str, Typical]:
    """Return the typical request of each resource with at least ``ENOUGH_CONTAINERS`` amounts."""
    sizes_of: dict[str, list[int]] = {}
    pods_of: dict[str, set[str]] = {}
    for request in requests:
        if request.count_bytes is not None:
            sizes_of.setdefault(request.resource, []).append(request.count_bytes)
            pods_of.setdefault(request.resource, set()).add(request.uid)
    return {
        resource: Typical(
            len(sizes),
            len(pods_of[resource]),
            sorted(sizes)[(len(sizes) - 1) // 4],
            median_low(sizes),
            max(sizes),
            span_s,
        )
        for resource, sizes in sizes_of.items()
        if len(sizes) >= ENOUGH_CONTAINERS
    }


def _packed(facts: NodeFacts) -> Iterator[PartialFinding]:
    if any(terms.policy == "packed" for terms in facts.sliced):
        yield (
            Weight.ADVICE,
            "the device plugin has policy packed and chooses the fullest device next, so a pod "
            "fits only if that device has enough free memory. In simulations with pods of 4-60 GiB "
            "and 10 replicas, 1/8 of the memory was used, and 4/5 with policy distributed",
            "set sharedDevicesAllocationPolicy: distributed in the device plugin's configuration",
        )


def _unknown_policy(facts: NodeFacts) -> Iterator[PartialFinding]:
    if facts.status is not None and any(terms.policy == "unknown" for terms in facts.sliced):
        yield (
            Weight.ADVICE,
            "the device plugin's allocation policy is not known: a pod must fit on every device "
            "with a free replica",
            "allow the agent to read the device plugin's configuration; status.sources shows what "
            "it cannot read: kubectl get gpunode NAME -o yaml",
        )


def _topology_manager(facts: NodeFacts) -> Iterator[PartialFinding]:
    if facts.status is None or len({terms.device.numa_node for terms in facts.sliced}) < 2:
        return
    policy = facts.status.plugin.topology_manager_policy
    if policy == "":
        yield (
            Weight.ADVICE,
            "the topology manager policy is not known, and the GPUs are on several NUMA nodes: a "
            "pod must fit on the next device of each NUMA node",
            "set hostPID: true in the agent's DaemonSet: the agent then reads the policy from the "
            "kubelet's process",
        )
    elif policy != "none":
        yield (
            Weight.ADVICE,
            f"the topology manager policy is {policy}, and the GPUs are on several NUMA nodes: a "
            "pod must fit on the next device of each NUMA node",
            "set topologyManagerPolicy: none in the kubelet's configuration if pods with one GPU "
            "do not need alignment",
        )


def _several_replicas(facts: NodeFacts) -> Iterator[PartialFinding]:
    """Advise against containers with several replicas.

    By default, time-slicing admits such containers. MPS rejects them.
    """
    if facts.status is None or not facts.sliced:
        return
    plugin = facts.status.plugin
    steered = all(t.device.resource in plugin.steered for t in facts.sliced)
    if steered and plugin.steers_several:
        # Such a container gets different devices.
        if plugin.fail_requests_greater_than_one is None:
            yield (
                Weight.ADVICE,
                "it is not known whether the device plugin rejects containers with several "
                "replicas (failRequestsGreaterThanOne): the plugin's default is assumed, so they "
                "are placed",
                "allow the agent to read the device plugin's configuration; status.sources shows "
                "what it cannot read: kubectl get gpunode NAME -o yaml",
            )
        return
    if plugin.fail_requests_greater_than_one is not True:
        yield (
            Weight.ADVICE,
            "a container may request several replicas, which can all be on one device: memory is "
            "reserved on each device that it could get, but the container gets no larger share "
            "of any",
            "to give such a container different devices, steer the node; otherwise set "
            "failRequestsGreaterThanOne: true under sharing.timeSlicing in the device plugin's "
            "configuration",
        )


def _unannotated(facts: NodeFacts) -> Iterator[PartialFinding]:
    for resource, replicas, allocatable_bytes in {
        (t.device.resource, t.device.replicas.total, t.allocatable_bytes) for t in facts.sliced
    }:
        typical, count = facts.typical.get(resource), facts.unannotated.get(resource, 0)
        share_bytes = allocatable_bytes // max(1, replicas)
        if count and typical is not None and share_bytes * 2 <= typical.median:
            requests = (
                "1 GPU container requests" if count == 1 else f"{count} GPU containers request"
            )
            reserved = rounded(share_bytes)
            yield (
                Weight.WARNING,
                f"{requests} {resource} without an amount of memory, so a replica's share of "
                f"{reserved} is reserved; at least half of the containers with an amount request "
                f"{rounded(typical.median)} or more",
                f"annotate the pods ({VRAM}: {rounded(typical.median)}) or their namespace "
                f"({DEFAULT_VRAM}), or set reject_unannotated",
            )


def _mps_limit(facts: NodeFacts) -> Iterator[PartialFinding]:
    for resource, memory_bytes, replicas in {
        (t.device.resource, t.device.memory_bytes, t.device.replicas.total)
        for t in facts.shared
        if t.device.sharing == "mps"
    }:
        typical = facts.typical.get(resource)
        cap_bytes = memory_bytes // max(1, replicas)
        if typical is not None and typical.largest > cap_bytes:
            yield (
                Weight.WARNING,
                f"MPS limits each process of {resource} to {rounded(cap_bytes)} "
                f"({replicas} replicas), and pods request up to {rounded(typical.largest)}: larger "
                "requests never fit",
                f"set replicas: {max(FEWEST_REPLICAS, memory_bytes // typical.largest)} or fewer, "
                "or request less memory",
            )


SHARING_RULES: tuple[Callable[[NodeFacts], Iterator[PartialFinding]], ...] = (
    _packed,
    _unknown_policy,
    _topology_manager,
    _several_replicas,
    _unannotated,
    _mps_limit,
)


def rounded(count_bytes: int) -> str:
    """Format bytes as a quantity, which is exact if it is short, and otherwise rounded down to one
    decimal."""
    if len(exact := format_bytes(count_bytes)) <= 5:
        return exact
    for unit, shift in (("Gi", 30), ("Mi", 20)):
        if count_bytes >> shift:
            return f"{count_bytes * 10 // (1 << shift) / 10:.1f}{unit}"
    return exact
